"""A fleet with prefill and decode replicas: real servers behind an ingress, which are killed and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from radixkv.config import ServerConfig
from radixkv.service.client import AsyncClient, Client, KVSource
from radixkv.service.fleet.disaggregated_prefill import DisaggregatedPrefill
from radixkv.service.fleet.fleet_state import FleetState
from radixkv.service.fleet.forwarder import Forwarder
from radixkv.service.fleet.ingress_server import IngressServer
from radixkv.service.fleet.replica_connection import HealthCheckTimes, ReplicaConnection
from tests.patience import PATIENCE_S, wait_until
from tests.service.fleet.fake_connection import facts
from tests.whole.forked_server import serving
from tests.whole.test_transfer import fetching_from, prompt

_TENANT, _NEW_TOKENS = "acme", 8
_PREFILL = ("--role", "prefill")


class SplitFleet:
    """A client of the ingress.

    Attributes:
        client: the client.
        before_next_decode: called once, before the decode replica of the next request is chosen.
    """

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.before_next_decode: Callable[[], None] | None = None

    async def generate(self, tokens: list[int], **options) -> tuple[list[int], object]:
        """Return the generated tokens and the usage of the last chunk."""
        chunks = [each async for each in self.client.generate(tokens, tenant=_TENANT, **OPTIONS, **options)]
        return [token_id for each in chunks for token_id in each.token_ids], chunks[-1].usage


OPTIONS = {"max_new_tokens": _NEW_TOKENS, "temperature": 0.9, "seed": 7, "ignore_eos": True}


@contextlib.asynccontextmanager
async def run_split_fleet(prefill_addresses: list[str], decode_addresses: list[str]) -> AsyncIterator[SplitFleet]:
    """Run an ingress in front of prefill and decode replicas."""
    async with contextlib.AsyncExitStack() as stack:
        states = []
        for addresses in (prefill_addresses, decode_addresses):
            state = FleetState(lambda replica_facts: ReplicaConnection(replica_facts, HealthCheckTimes(0.1, 5.0)))
            stack.push_async_callback(state.close)
            state.update(dataclasses.replace(facts(address), event_block_size=16) for address in addresses)
            states.append(state)
        prefill_state, decode_state = states

        async def route_prefill(question):
            return prefill_state.route(question)

        async def route_decode(question):
            if fleet.before_next_decode is not None:
                callback, fleet.before_next_decode = fleet.before_next_decode, None
                await asyncio.to_thread(callback)
            return decode_state.route(question)

        forwarder = Forwarder(route_prefill, 0.5)
        disaggregated = DisaggregatedPrefill(forwarder, Forwarder(route_decode, 1.0))

        async def list_replicas():
            return [connection for state in states for connection in state.connections]

        server = IngressServer(
            ServerConfig(port=0), facts(prefill_addresses[0]), forwarder, list_replicas, disaggregated
        )
        address = await server.start()
        stack.push_async_callback(server.drain)
        fleet = SplitFleet(await stack.enter_async_context(AsyncClient(address, timeout_s=PATIENCE_S)))
        yield fleet


def token_counts(usage) -> tuple[int, ...]:
    return usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens, usage.device_tokens, usage.generated_tokens


def has_no_lease(client: Client) -> bool:
    stats = client.stats()
    return (stats.held_leases, stats.blocks.leased, stats.blocks.pinned) == (0, 0, 0)


def test_completions_equal_those_of_one_server_and_no_lease_remains() -> None:
    with (
        serving() as (_, single_address),
        serving(*_PREFILL) as (_, prefill_address),
        serving("--role", "decode", *fetching_from(prefill_address)) as (_, decode_address),
        Client(single_address, timeout_s=PATIENCE_S) as single_client,
        Client(prefill_address, timeout_s=PATIENCE_S) as prefill_client,
        Client(decode_address, timeout_s=PATIENCE_S) as decode_client,
    ):

        async def compare() -> None:
            async with run_split_fleet([prefill_address], [decode_address]) as fleet:
                for seed, num_tokens in ((0, 337), (0, 337), (1, 337), (1, 20), (2, 64)):
                    tokens = prompt(seed, num_tokens)
                    expected = list(await asyncio.to_thread(single_client.generate, tokens, tenant=_TENANT, **OPTIONS))
                    answer, usage = await fleet.generate(tokens)
                    assert answer == [token_id for each in expected for token_id in each.token_ids]
                    assert token_counts(usage) == token_counts(expected[-1].usage)
                concurrent_results = await asyncio.gather(*(fleet.generate(prompt(seed)) for seed in range(3, 9)))
                for seed, (answer, _) in enumerate(concurrent_results, 3):
                    chunks = await asyncio.to_thread(
                        list, single_client.generate(prompt(seed), tenant=_TENANT, **OPTIONS)
                    )
                    assert answer == [token_id for each in chunks for token_id in each.token_ids]
                held = prefill_client.prefill(prompt(20), tenant=_TENANT, hold_lease=True)
                source = KVSource(address=prefill_address, lease_id=held.lease_id, epoch=held.epoch)
                answer, usage = await fleet.generate(prompt(20), kv_source=source)
                assert (len(answer), usage.remote_tokens) == (_NEW_TOKENS, 320)
                prefill_client.release(held.lease_id, tenant=_TENANT)
                for wrong_address in ("127.0.0.1:1", decode_address):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await fleet.generate(prompt(20), kv_source=KVSource(address=wrong_address, lease_id="a"))
                    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await fleet.generate(prompt(21), stop_token_ids=range(1000))
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert (await fleet.client.prefill(prompt(0), tenant=_TENANT)).usage.cached_tokens == 336

                stats = await fleet.client.stats()
                assert [each.address for each in stats.replicas] == [prefill_address, decode_address]
                assert stats.tokens.computed == sum(each.stats.tokens.computed for each in stats.replicas)
                await fleet.client.purge(tenant=_TENANT)
                assert [each.stats.blocks.published for each in (await fleet.client.stats()).replicas] == [0, 0]

        asyncio.run(asyncio.wait_for(compare(), 3 * PATIENCE_S))
        assert decode_client.stats().tokens.computed < prefill_client.stats().tokens.computed
        for client in (prefill_client, decode_client):
            wait_until(lambda: has_no_lease(client))  # noqa: B023 - called before `client` changes


@pytest.mark.long
def test_killing_a_server_before_the_first_token_fails_no_request() -> None:
    with contextlib.ExitStack() as stack:
        prefill_process, prefill_address = stack.enter_context(serving(*_PREFILL))
        source_options = fetching_from(prefill_address)
        decode_process, first_decode = stack.enter_context(serving("--role", "decode", *source_options))
        _, second_decode = stack.enter_context(serving("--role", "decode", *source_options))

        def kill(process) -> None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(PATIENCE_S)

        restarted_processes: list = []

        def restart_prefill() -> None:
            kill(prefill_process)
            port = prefill_address.rpartition(":")[2]
            process, _ = stack.enter_context(serving(*_PREFILL, "--port", port))
            restarted_processes.append(process)

        async def generate_repeatedly() -> list[list[int]]:
            async with run_split_fleet([prefill_address], [first_decode, second_decode]) as fleet:
                completions = [(await fleet.generate(prompt(30)))[0]]
                failures = (lambda: kill(decode_process), restart_prefill, lambda: kill(restarted_processes[-1]))
                for failure in failures:
                    fleet.before_next_decode = failure
                    completions.append((await fleet.generate(prompt(30)))[0])
                return completions

        completions = asyncio.run(asyncio.wait_for(generate_repeatedly(), 3 * PATIENCE_S))
        assert len(completions[0]) == _NEW_TOKENS
        assert completions == [completions[0]] * 4
        with Client(second_decode, timeout_s=PATIENCE_S) as client:
            wait_until(lambda: has_no_lease(client))
