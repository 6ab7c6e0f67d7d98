"""Views of servers on loopback stay current after gaps, restarts and cut connections."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import grpc.aio
import numpy as np
import pytest

from radixkv.api.events import AllCleared, BlocksRemoved, BlocksStored, EventBatch, SnapshotPart
from radixkv.errors import ConfigError
from radixkv.events.block_identity import Identities
from radixkv.routing.candidate import Hits
from radixkv.routing.fleet_view import FleetView
from radixkv.routing.prompt_blocks import PromptBlocks
from radixkv.service.client import AsyncClient
from radixkv.service.fleet.event_subscription import EventSubscription, batch_of
from radixkv.service.server.servicers.events import EventServicer
from radixkv.v1.events_pb2 import EventBatch as Message
from tests.events.fake_source import BASE, BLOCK_SIZE, FakeSource
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.fleet.scripted_server import ScriptedServer, batch, refusal, snapshot
from tests.service.serving import becomes_true, serving


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def prompt(first: int, count: int = 9) -> list[int]:
    return list(range(first, first + count))


def hits(view: FleetView, ids: list[int], *names: str) -> list[int]:
    """Return how many tokens of a prompt each replica has on its device, in whole blocks of four."""
    blocks = PromptBlocks(BASE, np.array(ids, "<u4").tobytes(), BLOCK_SIZE, Identities())
    return [hit.device for hit in view.match(blocks.all(), names or view.names)]


@contextlib.asynccontextmanager
async def server_with_events():
    """Yield a source of events and the address of a server that streams them."""
    engine = FakeEngine()
    engine.events = FakeSource()
    async with serving(engine) as (_, address):
        yield engine.events, address


@contextlib.asynccontextmanager
async def followed(view: FleetView, name: str, address: str):
    """Follow the events of a server inside the `with` block."""
    async with AsyncClient(address) as client:
        task = asyncio.create_task(EventSubscription(name, client, view).run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def test_a_view_of_two_servers_stays_current_and_recovers():
    async def test():
        view = FleetView(BLOCK_SIZE)
        async with server_with_events() as (first, first_address), server_with_events() as (second, second_address):
            first.store(*prompt(0))
            for name in "ab":
                view.join(name)
            async with followed(view, "a", first_address), followed(view, "b", second_address):
                assert await becomes_true(lambda: view.is_up_to_date("a") and view.is_up_to_date("b"))
                assert hits(view, prompt(0)) == [8, 0]
                second.store(*prompt(0))
                second.store(*prompt(100))
                assert await becomes_true(lambda: hits(view, prompt(100)) == [0, 8])
                assert hits(view, prompt(0)) == [8, 8]
                second.cache.purge()
                second.feed.publish()
                assert await becomes_true(lambda: hits(view, prompt(0)) == [8, 0])

                view.request_snapshot("a")  # a batch was lost on the way
                first.store(*prompt(200))
                assert await becomes_true(lambda: hits(view, prompt(200), "a") == [8])
                assert view.is_up_to_date("a")
                assert await becomes_true(lambda: first.num_readers == 1)

    run(test)


def test_a_server_that_was_started_again_is_read_from_its_snapshot():
    async def test():
        view = FleetView(BLOCK_SIZE)
        view.join("a")
        async with server_with_events() as (source, address), followed(view, "a", address):
            source.store(*prompt(0))
            source.store(*prompt(100))
            assert await becomes_true(lambda: hits(view, prompt(100)) == [8])
        async with server_with_events() as (source, address):
            source.store(*prompt(300))
            async with followed(view, "a", address):
                assert await becomes_true(lambda: hits(view, prompt(300)) == [8])
                assert hits(view, prompt(100)) == [0]

    run(test)


def test_a_server_without_events_or_with_another_block_size_ends_a_subscription():
    async def test():
        view = FleetView(BLOCK_SIZE + 1)
        view.join("a")
        async with server_with_events() as (source, address), AsyncClient(address) as client:
            source.store(*prompt(0))
            with pytest.raises(ConfigError, match=r"events\.block_size: expected 5 tokens"):
                await EventSubscription("a", client, view).run()
        async with serving(FakeEngine()) as (_, address), AsyncClient(address) as client:
            view.join("a")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await EventSubscription("a", client, view).run()
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(test)


def test_a_broken_stream_resumes_after_the_last_number_with_exponential_backoff():
    server = ScriptedServer(
        [snapshot(5, 1, 2), batch(6, 3), refusal(grpc.StatusCode.UNAVAILABLE)],
        [refusal(grpc.StatusCode.UNAVAILABLE)],
        [refusal(grpc.StatusCode.CANCELLED)],
        [batch(7, 4), refusal(grpc.StatusCode.UNAVAILABLE)],
    )
    server.run()
    assert server.starts == [0, 6, 6, 6, 7]
    assert server.pauses_s == [0.05, 0.1, 0.2, 0.05]
    assert server.view.match([1, 2, 3, 4], ["a"]) == [Hits(device=16)]


@pytest.mark.parametrize("code", [grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.DATA_LOSS])
def test_a_number_that_the_server_does_not_know_is_dropped(code):
    server = ScriptedServer([snapshot(5, 1, 2), refusal(code)], [snapshot(9, 1)])
    server.run()
    assert server.starts == [0, 0, 9]
    assert server.view.match([1, 2], ["a"]) == [Hits(device=4)]


def test_a_missing_batch_requests_a_snapshot():
    server = ScriptedServer([snapshot(5, 1, 2), batch(7, 3), batch(8, 4)], [snapshot(8, 1, 2, 3)])
    server.run()
    assert server.starts == [0, 0, 8]
    assert server.num_closed == 3
    assert server.view.match([1, 2, 3], ["a"]) == [Hits(device=12)]


def test_the_blocks_of_an_unreachable_server_are_removed_after_30_s():
    broken_stream = [refusal(grpc.StatusCode.UNAVAILABLE)]
    server = ScriptedServer([snapshot(5, 1), *broken_stream], broken_stream, broken_stream, clock_step_s=16)
    server.run(holds_before_last_stream=lambda: server.view.match([1], ["a"]) == [Hits(device=4)])
    assert server.view.match([1], ["a"]) == [Hits()]
    assert server.view.number_of("a") == 0


def test_a_subscription_ends_when_its_server_leaves_the_view():
    server = ScriptedServer([snapshot(5, 1), refusal(grpc.StatusCode.UNAVAILABLE)])
    server.view.leave("a")
    server.run()
    assert server.starts == []


def test_a_refused_client_gets_the_error():
    server = ScriptedServer([refusal(grpc.StatusCode.UNAUTHENTICATED)])
    with pytest.raises(grpc.aio.AioRpcError):
        server.run()


EVENTS = (
    AllCleared(),
    BlocksStored(None, np.array([1, 2**64 - 1], "<u8").tobytes(), np.arange(8, dtype="<u4").tobytes(), 4, ""),
    BlocksStored(2**64 - 1, np.array([7], "<u8").tobytes(), np.arange(4, dtype="<u4").tobytes(), 4, "name"),
    BlocksStored(None, np.array([7], "<u8").tobytes(), b"", 4, "name", "host"),
    BlocksRemoved(np.array([1], "<u8").tobytes(), "name"),
    BlocksRemoved(np.array([7], "<u8").tobytes(), "name", "redis"),
)


def test_batches_are_read_as_the_service_writes_them() -> None:
    for part in (None, SnapshotPart(1, 3, 99)):
        batch = EventBatch(12, 3.5, EVENTS, part)
        parsed = batch_of(Message.FromString(EventServicer(None, 1)._write(batch, True)))  # type: ignore[arg-type]
        assert (parsed.sequence_number, parsed.time_s, parsed.events, parsed.snapshot) == (12, 3.5, EVENTS, part)
