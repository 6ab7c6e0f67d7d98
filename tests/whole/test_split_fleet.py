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


class Split:
    """An ingress, with a hook before a decode replica is chosen."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.before_generating: Callable[[], None] | None = None

    async def generate(self, tokens: list[int], **options) -> tuple[list[int], object]:
        chunks = [each async for each in self.client.generate(tokens, tenant=_TENANT, **OPTIONS, **options)]
        return [token_id for each in chunks for token_id in each.token_ids], chunks[-1].usage


OPTIONS = {"max_new_tokens": _NEW_TOKENS, "temperature": 0.9, "seed": 7, "ignore_eos": True}


@contextlib.asynccontextmanager
async def split_fleet(computing: list[str], generating: list[str]) -> AsyncIterator[Split]:
    async with contextlib.AsyncExitStack() as stack:
        states = []
        for addresses in (computing, generating):
            state = FleetState(lambda about: ReplicaConnection(about, HealthCheckTimes(0.1, 5.0)))
            stack.push_async_callback(state.close)
            state.update(dataclasses.replace(facts(address), event_block_size=16) for address in addresses)
            states.append(state)

        async def choose(question):
            return states[0].route(question)

        async def choose_generating(question):
            if split.before_generating is not None:
                function, split.before_generating = split.before_generating, None
                await asyncio.to_thread(function)
            return states[1].route(question)

        forwarder = Forwarder(choose, 0.5)
        disaggregated = DisaggregatedPrefill(forwarder, Forwarder(choose_generating, 1.0))

        async def list_replicas():
            return [connection for state in states for connection in state.connections]

        server = IngressServer(ServerConfig(port=0), facts(computing[0]), forwarder, list_replicas, disaggregated)
        address = await server.start()
        stack.push_async_callback(server.drain)
        split = Split(await stack.enter_async_context(AsyncClient(address, timeout_s=PATIENCE_S)))
        yield split


def of_prompt(usage) -> tuple[int, ...]:
    return usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens, usage.device_tokens, usage.generated_tokens


def is_at_rest(client: Client) -> bool:
    stats = client.stats()
    return (stats.held_leases, stats.blocks.leased, stats.blocks.pinned) == (0, 0, 0)


def test_completions_equal_those_of_one_server_and_no_lease_remains() -> None:
    with (
        serving() as (_, alone),
        serving(*_PREFILL) as (_, computing),
        serving("--role", "decode", *fetching_from(computing)) as (_, generating),
        Client(alone, timeout_s=PATIENCE_S) as one,
        Client(computing, timeout_s=PATIENCE_S) as first,
        Client(generating, timeout_s=PATIENCE_S) as second,
    ):

        async def compare() -> None:
            async with split_fleet([computing], [generating]) as split:
                for seed, num_tokens in ((0, 337), (0, 337), (1, 337), (1, 20), (2, 64)):
                    tokens = prompt(seed, num_tokens)
                    expected = list(await asyncio.to_thread(one.generate, tokens, tenant=_TENANT, **OPTIONS))
                    answer, usage = await split.generate(tokens)
                    assert answer == [token_id for each in expected for token_id in each.token_ids]
                    assert of_prompt(usage) == of_prompt(expected[-1].usage)
                many = await asyncio.gather(*(split.generate(prompt(seed)) for seed in range(3, 9)))
                for seed, (answer, _) in enumerate(many, 3):
                    chunks = await asyncio.to_thread(list, one.generate(prompt(seed), tenant=_TENANT, **OPTIONS))
                    assert answer == [token_id for each in chunks for token_id in each.token_ids]
                held = first.prefill(prompt(20), tenant=_TENANT, hold_lease=True)
                source = KVSource(address=computing, lease_id=held.lease_id, epoch=held.epoch)
                answer, usage = await split.generate(prompt(20), kv_source=source)
                assert (len(answer), usage.remote_tokens) == (_NEW_TOKENS, 320)
                first.release(held.lease_id, tenant=_TENANT)
                for elsewhere in ("127.0.0.1:1", generating):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await split.generate(prompt(20), kv_source=KVSource(address=elsewhere, lease_id="a"))
                    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await split.generate(prompt(21), stop_token_ids=range(1000))
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert (await split.client.prefill(prompt(0), tenant=_TENANT)).usage.cached_tokens == 336

                stats = await split.client.stats()
                assert [each.address for each in stats.replicas] == [computing, generating]
                assert stats.tokens.computed == sum(each.stats.tokens.computed for each in stats.replicas)
                await split.client.purge(tenant=_TENANT)
                assert [each.stats.blocks.published for each in (await split.client.stats()).replicas] == [0, 0]

        asyncio.run(asyncio.wait_for(compare(), 3 * PATIENCE_S))
        assert second.stats().tokens.computed < first.stats().tokens.computed
        for client in (first, second):
            wait_until(lambda: is_at_rest(client))  # noqa: B023 - asked at once


@pytest.mark.long
def test_killing_a_server_before_the_first_token_fails_no_request() -> None:
    with contextlib.ExitStack() as stack:
        computer, computing = stack.enter_context(serving(*_PREFILL))
        sources = fetching_from(computing)
        doomed, first = stack.enter_context(serving("--role", "decode", *sources))
        _, second = stack.enter_context(serving("--role", "decode", *sources))

        def kill(process) -> None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(PATIENCE_S)

        def start_again() -> None:
            kill(computer)
            started.append(stack.enter_context(serving(*_PREFILL, "--port", computing.rpartition(":")[2])))

        started: list = []

        async def answers() -> list[list[int]]:
            async with split_fleet([computing], [first, second]) as split:
                completions = [(await split.generate(prompt(30)))[0]]
                for before in (lambda: kill(doomed), start_again, lambda: kill(started[-1][0])):
                    split.before_generating = before
                    completions.append((await split.generate(prompt(30)))[0])
                return completions

        completions = asyncio.run(asyncio.wait_for(answers(), 3 * PATIENCE_S))
        assert len(completions[0]) == _NEW_TOKENS
        assert completions == [completions[0]] * 4
        with Client(second, timeout_s=PATIENCE_S) as client:
            wait_until(lambda: is_at_rest(client))
