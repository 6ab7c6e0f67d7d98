"""Cache events that the gateway receives."""

import asyncio
import contextlib

import grpc
import numpy as np
import pytest

from radixkv.api.events import BlocksRemoved, BlocksStored, EventBatch
from radixkv.gateway.engine_common_pb2 import SubscribeKvEventsRequest
from radixkv.gateway.vllm_engine_pb2_grpc import VllmEngineStub
from radixkv.service.server.gateway import event_stream
from tests.events.fake_source import BLOCK_SIZE, SALTED, FakeSource
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import GATEWAY, becomes_true, refusal_of, serving


class EngineWithEvents(FakeEngine):
    def __init__(self, **options):
        super().__init__()
        self.events = FakeSource(**options)


def run_with_server(talk, engine=None):
    """Return the result of `talk(subscribe, source, server)` with a running server; `subscribe` begins a stream."""
    engine = EngineWithEvents() if engine is None else engine

    async def run():
        async with (
            serving(engine, gateway=GATEWAY, drain_timeout_s=0.1) as (server, address),
            grpc.aio.insecure_channel(address) as channel,
        ):

            def subscribe(start=0, load_first=False):
                request = SubscribeKvEventsRequest(
                    start_sequence_number=start, load_records_before_first_batch=load_first
                )
                return VllmEngineStub(channel).SubscribeKvEvents(request)

            return await asyncio.wait_for(talk(subscribe, engine.events, server), PATIENCE_S)

    return asyncio.run(run())


async def next_batch(call):
    """Return the next message that is not a load record."""
    while (message := await call.read()).HasField("load"):
        pass
    return message


def stored(message):
    """Return the events of a batch that report stored blocks."""
    return [event.stored for event in message.events if event.HasField("stored")]


def test_a_gateway_without_a_sequence_number_first_gets_a_snapshot():
    async def talk(subscribe, source, _):
        source.store(*range(9))
        source.store(*range(4), 7, 7, 7, 7)
        return await next_batch(subscribe()), source.log.last

    snapshot, last = run_with_server(talk)
    assert (snapshot.sequence_number, snapshot.dp_rank, snapshot.snapshot.blocks) == (last, 0, 3)
    assert snapshot.events[0].WhichOneof("data") == "cleared"
    blocks = [block for each in stored(snapshot) for block in each.blocks]
    assert sorted(list(block.token_ids) for block in blocks) == [[0, 1, 2, 3], [4, 5, 6, 7], [7, 7, 7, 7]]
    assert {block.block_size for block in blocks} == {BLOCK_SIZE}
    assert len({block.block_hash for block in blocks}) == 3


def test_an_empty_cache_has_a_snapshot_as_well():
    empty = run_with_server(lambda subscribe, *_: next_batch(subscribe()))
    assert [event.WhichOneof("data") for event in empty.events] == ["cleared"]
    assert (empty.snapshot.index, empty.snapshot.count, empty.snapshot.blocks) == (0, 1, 0)


def test_changes_follow_one_by_one_with_parents_before_children():
    async def talk(subscribe, source, _):
        call = subscribe()
        snapshot = await next_batch(call)
        source.store(*range(8))
        two_blocks = await next_batch(call)
        source.store(*range(12))
        third_block = await next_batch(call)
        source.evict(1)
        return snapshot, two_blocks, third_block, await next_batch(call)

    snapshot, two_blocks, third_block, removed = run_with_server(talk)
    changes = (two_blocks, third_block, removed)
    assert [each.sequence_number - snapshot.sequence_number for each in changes] == [1, 2, 3]
    assert [event.event_id for each in (snapshot, *changes) for event in each.events] == [1, 2, 3, 4]
    (parent,), (child,) = stored(two_blocks), stored(third_block)
    assert not parent.HasField("parent_block_hash")
    assert child.parent_block_hash == parent.blocks[-1].block_hash
    assert list(child.blocks[0].token_ids) == [8, 9, 10, 11]
    assert list(removed.events[0].removed.block_hashes) == [child.blocks[0].block_hash]
    assert not any(each.HasField("snapshot") for each in changes)


def test_a_batch_with_only_events_of_other_namespaces_is_sent_without_events():
    async def talk(subscribe, source, _):
        call = subscribe()
        await next_batch(call)
        source.store(*range(8), namespace=SALTED)
        hidden = await next_batch(call)
        source.store(*range(8))
        return hidden, await next_batch(call)

    hidden, shown = run_with_server(talk)
    assert list(hidden.events) == []
    assert shown.sequence_number == hidden.sequence_number + 1
    assert [len(each.blocks) for each in stored(shown)] == [2]


def test_other_namespaces_are_not_in_a_snapshot():
    async def talk(subscribe, source, _):
        source.store(*range(8), namespace=SALTED)
        source.store(*range(4))
        return await next_batch(subscribe())

    assert [len(each.blocks) for each in stored(run_with_server(talk))] == [1]


def test_a_gateway_that_reconnects_continues_after_its_sequence_number():
    async def talk(subscribe, source, _):
        source.switch_on()
        for start in range(3):
            source.store(*range(100 * start, 100 * start + 4))
        return await next_batch(subscribe(source.log.last - 1)), source.log.last

    batch, last = run_with_server(talk)
    assert (batch.sequence_number, batch.HasField("snapshot")) == (last, False)
    assert list(stored(batch)[0].blocks[0].token_ids) == [200, 201, 202, 203]


@pytest.mark.parametrize("number", [7, 2**63])
def test_an_unknown_sequence_number_is_refused_before_metadata(number):
    async def talk(subscribe, *_):
        call = subscribe(number)
        refusal = await refusal_of(call.read())
        return refusal.code(), refusal.details(), await call.initial_metadata()

    code, details, metadata = run_with_server(talk)
    assert code is grpc.StatusCode.OUT_OF_RANGE
    assert details.startswith("start_sequence_number: expected 0, or ")
    assert dict(metadata) == {}, "if metadata came before the status, the gateway would take the stream for broken"


def test_metadata_arrives_at_once_even_without_events():
    async def talk(subscribe, source, _):
        source.switch_on()
        call = subscribe(source.log.last)
        await call.initial_metadata()
        return not call.done()

    assert run_with_server(talk)


def test_the_stream_of_a_gateway_that_falls_behind_ends_with_data_loss():
    async def talk(subscribe, source, _):
        call = subscribe()
        await next_batch(call)
        for start in range(100):  # in one iteration of the event loop
            source.store(*range(4 * start, 4 * start + 4))

        async def read_to_the_end():
            while True:
                await next_batch(call)

        return (await refusal_of(read_to_the_end())).code(), (await next_batch(subscribe())).snapshot.blocks

    assert run_with_server(talk, EngineWithEvents(max_batches=4)) == (grpc.StatusCode.DATA_LOSS, 100)


def test_load_records_have_the_sequence_number_of_the_last_batch(monkeypatch):
    monkeypatch.setattr(event_stream, "HEARTBEAT_S", 0.01)

    async def talk(subscribe, *_):
        call = subscribe()
        batch = await next_batch(call)
        return batch, [await call.read() for _ in range(3)]

    batch, loads = run_with_server(talk)
    assert {each.sequence_number for each in loads} == {batch.sequence_number}
    samples = [each.load.sample for each in loads]
    assert samples == list(range(samples[0], samples[0] + 3))
    assert {(each.load.load_only, each.load.active_token_usage, len(each.events)) for each in loads} == {(True, 0.3, 0)}


@pytest.mark.parametrize("load_first", [False, True])
def test_a_load_record_precedes_the_first_batch_only_on_request(load_first):
    async def talk(subscribe, source, _):
        source.switch_on()
        call = subscribe(source.log.last, load_first)
        if not load_first:
            source.store(*range(4))
        return await call.read()

    message = run_with_server(talk)
    assert message.HasField("load") is load_first
    assert (message.sequence_number == 0) is load_first


def test_a_drain_ends_the_stream_and_does_not_wait_for_it():
    async def talk(subscribe, source, server):
        call = subscribe()
        await next_batch(call)
        is_clean = await server.drain()
        return is_clean, (await refusal_of(next_batch(call))).code()

    assert run_with_server(talk) == (True, grpc.StatusCode.UNAVAILABLE)


def test_a_gateway_that_disconnects_is_no_longer_a_reader():
    engine = EngineWithEvents()

    async def talk(subscribe, *_):
        call = subscribe()
        await next_batch(call)
        before = engine.events.num_readers
        call.cancel()
        return before, await becomes_true(lambda: engine.events.num_readers == 0)

    assert run_with_server(talk, engine) == (1, True)


def test_events_are_sent_while_the_engine_refuses_calls(monkeypatch):
    monkeypatch.setattr(event_stream, "HEARTBEAT_S", 0.001)
    engine = EngineWithEvents()

    def refuse():
        raise engine.cancellation

    async def talk(subscribe, source, _):
        call = subscribe()
        await next_batch(call)
        monkeypatch.setattr(engine, "load", refuse)
        source.store(*range(4))
        return await next_batch(call)

    assert len(stored(run_with_server(talk, engine))) == 1


def test_an_engine_without_a_log_has_no_events():
    async def talk(subscribe, *_):
        with contextlib.suppress(StopAsyncIteration):
            return (await refusal_of(subscribe().read())).code()

    assert run_with_server(talk, FakeEngine()) is grpc.StatusCode.UNIMPLEMENTED


def test_signed_block_hashes_have_the_bits_of_the_unsigned_ones():
    source = FakeSource()
    source.switch_on()
    source.store(*range(64))
    event = source.log.after(source.log.start).events[0]
    message = event_stream.batch_message(source.log.after(source.log.start), iter([1]))
    sent = np.array([block.block_hash for block in message.events[0].stored.blocks], "<i8")
    assert sent.tobytes() == event.block_hashes


def test_the_gateway_gets_events_of_the_device_only():
    hashes = np.array([1], "<u8").tobytes()
    of_a_store = BlocksStored(None, hashes, b"", BLOCK_SIZE, "", "host"), BlocksRemoved(hashes, "", "host")
    of_the_device = BlocksRemoved(hashes, "")
    message = event_stream.batch_message(EventBatch(1, 0.0, (*of_a_store, of_the_device)), iter([1, 2, 3]))
    assert [event.WhichOneof("data") for event in message.events] == ["removed"]
