"""Two real servers behind the router: prompts go to the server that has their prefix."""

from __future__ import annotations

import asyncio
import contextlib

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


def prompt(prefix: int, own: int) -> list[int]:
    draw = np.random.default_rng(prefix)
    return [*draw.integers(500, size=PREFIX_TOKENS).tolist(), *([own] * 9)]


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

    async def ask(self, ids: list[int], avoid: frozenset[str] = frozenset()) -> tuple[str, int, int]:
        """Return the chosen server, the number of cached tokens that the router expected, and the actual number."""
        route = self.router.route(BASE, np.array(ids, "<u4").tobytes(), avoid)
        answer = await self.clients[route.name].prefill(ids)
        self.router.finished(route, answer.usage.computed_tokens)
        return route.name, route.hits.total, answer.usage.cached_tokens

    def hits(self, name: str, ids: list[int]) -> Hits:
        """Return the number of tokens that the router expects a server to have, without routing a request."""
        blocks = PromptBlocks(BASE, np.array(ids, "<u4").tobytes(), BLOCK_SIZE, Identities())
        return self.router.view.match(blocks.all(), [name])[0]

    def known_tokens(self, name: str, ids: list[int]) -> int:
        """Return how many of them it has on its device."""
        return self.hits(name, ids).device

    async def close(self) -> None:
        for stream in self.streams:
            stream.cancel()
        await asyncio.gather(*self.streams, return_exceptions=True)
        for client in self.clients.values():
            await client.close()


async def visit(one: str, two: str, kill_one) -> None:
    fleet = RoutedServers([one, two])
    view = fleet.router.view
    try:
        assert await becomes_true(lambda: view.is_up_to_date(one) and view.is_up_to_date(two))
        homes = {}
        for own in range(4):
            for prefix in range(8):
                name, supposed, cached = await fleet.ask(prompt(prefix, own))
                assert homes.setdefault(prefix, name) == name
                assert (supposed, cached >= supposed) == (PREFIX_TOKENS if own else 0, True)
        assert set(homes.values()) == {one, two}

        await fleet.clients[two].prefill(prompt(100, 0))  # without the router
        assert await becomes_true(lambda: fleet.known_tokens(two, prompt(100, 1)) == PREFIX_TOKENS)
        assert (await fleet.ask(prompt(100, 1)))[0] == two

        kill_one()
        lost = next(prefix for prefix, name in homes.items() if name == one)
        name, supposed, _ = await fleet.ask(prompt(lost, 9), frozenset({one}))
        assert (name, supposed) == (two, 0)
        fleet.router.leave(one)
        assert (await fleet.ask(prompt(lost, 10)))[:2] == (two, PREFIX_TOKENS)
    finally:
        await fleet.close()


class Wire:
    """A proxy in front of a server that can be cut: connections end, and new ones are closed at once."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self.is_cut = False

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        self.is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        self.cut()
        self._server.close()
        await self._server.wait_closed()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        ends = {writer, far_writer}
        self._writers |= ends
        try:
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))
        finally:
            self._writers -= ends

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()


async def cut_and_mend(address: str) -> None:
    wire = Wire(address)
    seen_at = await wire.start()
    fleet = RoutedServers([seen_at])
    try:
        async with AsyncClient(address) as direct:
            assert await becomes_true(lambda: fleet.router.view.is_up_to_date(seen_at))
            await direct.prefill(prompt(1, 0))
            assert await becomes_true(lambda: fleet.known_tokens(seen_at, prompt(1, 0)) > 0)
            wire.cut()
            await direct.prefill(prompt(2, 0))
            await direct.prefill(prompt(3, 0))
            assert fleet.known_tokens(seen_at, prompt(1, 0)) > 0
            assert fleet.known_tokens(seen_at, prompt(2, 0)) == 0
            wire.is_cut = False
            assert await becomes_true(lambda: fleet.known_tokens(seen_at, prompt(3, 0)) > 0)
            assert fleet.known_tokens(seen_at, prompt(2, 0)) > 0
    finally:
        await fleet.close()
        await wire.close()


async def fill_and_look(address: str) -> None:
    fleet = RoutedServers([address])
    try:
        assert await becomes_true(lambda: fleet.router.view.is_up_to_date(address))
        for prefix in range(6):
            await fleet.ask(prompt(prefix, 0))
        in_host = Hits(host=PREFIX_TOKENS)
        assert await becomes_true(lambda: fleet.hits(address, prompt(0, 9)) == in_host), "while the server rests"
        _, supposed, cached = await fleet.ask(prompt(0, 1))
        assert (supposed, cached) == (PREFIX_TOKENS, PREFIX_TOKENS)
        await fleet.clients[address].purge(everything=True)
        assert await becomes_true(lambda: fleet.hits(address, prompt(1, 9)) == Hits())
    finally:
        await fleet.close()


def test_the_router_knows_which_evicted_blocks_are_in_host_memory() -> None:
    settings = "cache.capacity_tokens=512", "tiers.host_bytes=100000000"
    with serving(*(argument for setting in settings for argument in ("--set", setting))) as (_, address):
        asyncio.run(asyncio.wait_for(fill_and_look(address), PATIENCE_S))


def test_events_during_a_disconnection_are_delivered_afterwards() -> None:
    with serving() as (_, address):
        asyncio.run(asyncio.wait_for(cut_and_mend(address), PATIENCE_S))


@pytest.mark.slow
def test_prompts_go_to_the_server_that_has_their_prefix() -> None:
    with serving() as (process, one), serving() as (_, two):
        asyncio.run(asyncio.wait_for(visit(one, two, process.kill), PATIENCE_S))
