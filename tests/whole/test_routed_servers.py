"""A router in front of real servers: prompts go to the server that has their prefix."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import numpy as np
import pytest

from radixkv.events.block_identity import Identities
from radixkv.namespace import Namespace
from radixkv.routing.candidate import Hits
from radixkv.routing.fleet_load import FleetLoad
from radixkv.routing.fleet_view import FleetView
from radixkv.routing.policies import RoutingWeights, make_routing
from radixkv.routing.prefix_demand import PrefixDemand
from radixkv.routing.prompt_blocks import PromptBlocks
from radixkv.routing.router import Router
from radixkv.service.client import AsyncClient
from radixkv.service.fleet.event_subscription import EventSubscription
from tests.patience import PATIENCE_S
from tests.service.serving import becomes_true
from tests.whole.forked_server import serving

BLOCK_SIZE = 16  # the default of `events.block_size`
PREFIX_TOKENS = 192
BASE = Namespace("tiny")


def prompt(prefix: int, suffix: int) -> list[int]:
    """Return a prompt with a numbered prefix of 192 tokens and a numbered suffix of 9."""
    rng = np.random.default_rng(prefix)
    return [*rng.integers(500, size=PREFIX_TOKENS).tolist(), *([suffix] * 9)]


class RoutedServers:
    """A router, its event streams, and clients for the servers that it chooses."""

    def __init__(self, addresses: list[str]) -> None:
        self.router = Router(
            FleetView(BLOCK_SIZE),
            FleetLoad(),
            PrefixDemand(),
            make_routing("prefix", RoutingWeights(least_match_tokens=64)),
            identities=Identities(),
        )
        self.clients = {address: AsyncClient(address) for address in addresses}
        for address in addresses:
            self.router.join(address)
        self.streams = [
            asyncio.create_task(EventSubscription(address, client, self.router.view).run())
            for address, client in self.clients.items()
        ]

    async def prefill(self, ids: list[int], avoid: frozenset[str] = frozenset()) -> tuple[str, int, int]:
        """Return the chosen server, the number of cached tokens that the router expected, and the actual number."""
        route = self.router.route(BASE, np.array(ids, "<u4").tobytes(), avoid)
        answer = await self.clients[route.name].prefill(ids)
        self.router.finished(route, answer.usage.computed_tokens)
        return route.name, route.hits.total, answer.usage.cached_tokens

    def hits(self, name: str, ids: list[int]) -> Hits:
        """Return how many tokens of a prompt the router expects a server to have, without routing a request."""
        blocks = PromptBlocks(BASE, np.array(ids, "<u4").tobytes(), BLOCK_SIZE, Identities())
        return self.router.view.match(blocks.all(), [name])[0]

    def known_tokens(self, name: str, ids: list[int]) -> int:
        """Return how many tokens of a prompt the router expects a server to have on its device."""
        return self.hits(name, ids).device

    async def close(self) -> None:
        for stream in self.streams:
            stream.cancel()
        await asyncio.gather(*self.streams, return_exceptions=True)
        for client in self.clients.values():
            await client.close()


async def check_routing_by_prefix(one: str, two: str, kill_one: Callable[[], None]) -> None:
    """Route prompts to two servers, of which the first is killed in the end."""
    fleet = RoutedServers([one, two])
    view = fleet.router.view
    try:
        assert await becomes_true(lambda: view.is_up_to_date(one) and view.is_up_to_date(two))
        server_of_prefix: dict[int, str] = {}
        for suffix in range(4):
            for prefix in range(8):
                name, num_expected, num_cached = await fleet.prefill(prompt(prefix, suffix))
                assert server_of_prefix.setdefault(prefix, name) == name
                assert num_expected == (PREFIX_TOKENS if suffix else 0)
                assert num_cached >= num_expected
        assert set(server_of_prefix.values()) == {one, two}

        await fleet.clients[two].prefill(prompt(100, 0))  # without the router
        assert await becomes_true(lambda: fleet.known_tokens(two, prompt(100, 1)) == PREFIX_TOKENS)
        assert (await fleet.prefill(prompt(100, 1)))[0] == two

        kill_one()
        lost_prefix = next(prefix for prefix, name in server_of_prefix.items() if name == one)
        name, num_expected, _ = await fleet.prefill(prompt(lost_prefix, 9), frozenset({one}))
        assert (name, num_expected) == (two, 0)
        fleet.router.leave(one)
        assert (await fleet.prefill(prompt(lost_prefix, 10)))[:2] == (two, PREFIX_TOKENS)
    finally:
        await fleet.close()


class InterruptibleProxy:
    """A TCP proxy in front of a server. While it is cut, all connections are aborted, new ones too."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self.is_cut = False

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        self.is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        self.cut()
        self._server.close()
        await self._server.wait_closed()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            writer.transport.abort()
            return
        server_reader, server_writer = await asyncio.open_connection(self._host, self._port)
        writers = {writer, server_writer}
        self._writers |= writers
        try:
            await asyncio.gather(self._copy(reader, server_writer), self._copy(server_reader, writer))
        finally:
            self._writers -= writers

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(1 << 16):
                writer.write(chunk)
                await writer.drain()
        writer.close()


async def check_events_after_disconnection(address: str) -> None:
    """Cut the connection of the router, but not that of a client whose prompts the server caches meanwhile."""
    proxy = InterruptibleProxy(address)
    proxy_address = await proxy.start()
    fleet = RoutedServers([proxy_address])
    try:
        async with AsyncClient(address) as direct:
            assert await becomes_true(lambda: fleet.router.view.is_up_to_date(proxy_address))
            await direct.prefill(prompt(1, 0))
            assert await becomes_true(lambda: fleet.known_tokens(proxy_address, prompt(1, 0)) > 0)
            proxy.cut()
            await direct.prefill(prompt(2, 0))
            await direct.prefill(prompt(3, 0))
            assert fleet.known_tokens(proxy_address, prompt(1, 0)) > 0
            assert fleet.known_tokens(proxy_address, prompt(2, 0)) == 0
            proxy.is_cut = False
            assert await becomes_true(lambda: fleet.known_tokens(proxy_address, prompt(3, 0)) > 0)
            assert fleet.known_tokens(proxy_address, prompt(2, 0)) > 0
    finally:
        await fleet.close()
        await proxy.close()


async def check_hits_in_host_memory(address: str) -> None:
    """Prefill more prompts than the pool has room for, and look for the first one in host memory."""
    fleet = RoutedServers([address])
    try:
        assert await becomes_true(lambda: fleet.router.view.is_up_to_date(address))
        for prefix in range(6):
            await fleet.prefill(prompt(prefix, 0))
        in_host = Hits(host=PREFIX_TOKENS)
        assert await becomes_true(lambda: fleet.hits(address, prompt(0, 9)) == in_host), (
            "blocks are saved while the server is idle"
        )
        _, num_expected, num_cached = await fleet.prefill(prompt(0, 1))
        assert (num_expected, num_cached) == (PREFIX_TOKENS, PREFIX_TOKENS)
        await fleet.clients[address].purge(everything=True)
        assert await becomes_true(lambda: fleet.hits(address, prompt(1, 9)) == Hits())
    finally:
        await fleet.close()


def test_the_router_knows_which_evicted_blocks_are_in_host_memory() -> None:
    settings = "cache.capacity_tokens=512", "tiers.host_bytes=100000000"
    with serving(*(argument for setting in settings for argument in ("--set", setting))) as (_, address):
        asyncio.run(asyncio.wait_for(check_hits_in_host_memory(address), PATIENCE_S))


def test_events_during_a_disconnection_are_delivered_afterwards() -> None:
    with serving() as (_, address):
        asyncio.run(asyncio.wait_for(check_events_after_disconnection(address), PATIENCE_S))


@pytest.mark.slow
def test_prompts_go_to_the_server_that_has_their_prefix() -> None:
    with serving() as (process, one), serving() as (_, two):
        asyncio.run(asyncio.wait_for(check_routing_by_prefix(one, two, process.kill), PATIENCE_S))
