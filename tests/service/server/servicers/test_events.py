"""`EventService.Subscribe` over a real connection."""

import asyncio
import contextlib

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from radixkv.api.events import BlocksRemoved, BlocksStored
from radixkv.errors import InvariantViolation
from radixkv.events.readers import MAX_READERS, EventReaders
from radixkv.service.client import AsyncClient, Client
from radixkv.service.fleet.event_subscription import batch_of
from radixkv.service.server.servicers.events import SERVICE, EventServicer
from radixkv.v1.events_pb2 import SubscribeRequest
from tests.events.fake_source import BLOCK_SIZE, SALTED, FakeSource
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import becomes_true, refusal_of, serve_and_call, serving, slow_line


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def engine_with_events(**bounds) -> FakeEngine:
    engine = FakeEngine()
    engine.events = FakeSource(**bounds)
    return engine


async def status_at_the_end(batches) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in batches:
            pass
    return caught.value.code()


def test_a_stream_begins_with_all_blocks_and_continues():
    async def test():
        engine = engine_with_events()
        engine.events.store(1, 2, 3, 4, 5, 6, 7, 8)
        engine.events.store(1, 2, 3, 4, namespace=SALTED)
        async with serving(engine) as (_, address), AsyncClient(address) as client:
            batches = client.subscribe()
            first = await anext(batches)
            assert (first.epoch, first.snapshot.index, first.snapshot.count) == (engine.limits.epoch, 0, 1)
            assert first.snapshot.blocks == 3
            assert first.events[0].WhichOneof("event") == "cleared"
            plain, salted = sorted((event.stored for event in first.events[1:]), key=lambda stored: stored.cache_salt)
            assert list(plain.token_ids) == [1, 2, 3, 4, 5, 6, 7, 8]
            assert (len(plain.block_hashes), plain.block_size, plain.cache_salt) == (2, 4, "")
            assert not plain.HasField("parent_block_hash")
            assert "secret" not in salted.cache_salt
            assert "acme" not in salted.cache_salt
            assert len(salted.cache_salt) == 32
            assert set(salted.block_hashes).isdisjoint(plain.block_hashes)
            engine.events.store(1, 2, 3, 4, 9, 9, 9, 9)
            engine.events.evict(1)
            stored, removed = await anext(batches), await anext(batches)
            assert not stored.HasField("snapshot")
            assert [stored.sequence_number, removed.sequence_number] == [
                first.sequence_number + 1,
                first.sequence_number + 2,
            ]
            assert stored.events[0].stored.parent_block_hash == plain.block_hashes[0]
            assert list(removed.events[0].removed.block_hashes) == [plain.block_hashes[1]]
            engine.events.cache.purge()
            engine.events.feed.publish()
            assert (await anext(batches)).events[0].WhichOneof("event") == "cleared"

    run(test)


def test_hashes_are_those_that_the_engine_logs():
    source = FakeSource()
    source.switch_on()
    source.store(*range(40))

    async def test():
        servicer = EventServicer(EventReaders(source), 1)
        batch = source.log.after(source.log.start)
        message = servicer._write(batch, True)
        assert batch.events[0].block_hashes in message
        assert batch.events[0].tokens in message
        assert servicer._serialize(batch, True) is servicer._serialize(batch, True)

    run(test)


def test_events_of_stores_are_sent_to_subscribers_that_request_them():
    async def test():
        engine = engine_with_events()
        async with serving(engine) as (_, address), AsyncClient(address) as client:
            device, all_tiers = client.subscribe(), client.subscribe(stores=True)
            await anext(device)
            await anext(all_tiers)
            hashes = np.array([1, 2], "<u8").tobytes()
            engine.events.log.append((BlocksStored(None, hashes, b"", BLOCK_SIZE, "salt", "host"),))
            engine.events.log.append((BlocksRemoved(hashes[:8], "salt", "host"),))
            engine.events.store(1, 2, 3, 4)
            batches = [await anext(all_tiers) for _ in range(3)]
            stored, removed = batches[0].events[0].stored, batches[1].events[0].removed
            assert (list(stored.block_hashes), stored.tier, list(stored.token_ids)) == ([1, 2], "host", [])
            assert (list(removed.block_hashes), removed.tier) == ([1], "host")
            assert batch_of(batches[0]).events == engine.events.log.after(batches[0].sequence_number - 1).events
            assert batch_of(batches[1]).events == engine.events.log.after(batches[0].sequence_number).events
            assert batches[2].events[0].stored.tier == ""
            device_batches = [await anext(device) for _ in range(3)]
            assert [len(batch.events) for batch in device_batches] == [0, 0, 1]
            assert [each.sequence_number for each in device_batches] == [each.sequence_number for each in batches]

    run(test)


def test_the_metadata_comes_before_the_first_batch():
    async def test():
        engine = engine_with_events()
        engine.events.switch_on()
        engine.events.store(1, 2, 3, 4)
        async with serving(engine) as (_, address), grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_stream(
                "/radixkv.v1.EventService/Subscribe", request_serializer=SubscribeRequest.SerializeToString
            )(SubscribeRequest(start_sequence_number=engine.events.log.last))
            assert await call.initial_metadata() is not None
            call.cancel()

    run(test)


def test_an_unknown_sequence_number_is_out_of_range_before_the_metadata():
    async def test():
        engine = engine_with_events()
        async with serving(engine) as (_, address), AsyncClient(address) as client:
            for number in (1, engine.events.log.start - 1, engine.events.log.last + 1, 2**64 - 1):
                assert await status_at_the_end(client.subscribe(number)) is grpc.StatusCode.OUT_OF_RANGE
            assert (await anext(client.subscribe(0))).HasField("snapshot")

    run(test)


def test_a_blocking_client_replays_from_its_sequence_number():
    engine = engine_with_events()
    engine.events.switch_on()
    for token in range(5):
        engine.events.store(token, 2, 3, 4)
    last = engine.events.log.last

    def read(address: str) -> list[int]:
        with Client(address) as client:
            numbers = []
            with contextlib.closing(client.subscribe(last - 3)) as batches:
                for batch in batches:
                    numbers.append(batch.sequence_number)
                    if batch.sequence_number == last:
                        break
            return numbers

    assert serve_and_call(engine, read) == [last - 2, last - 1, last]


def test_a_slow_reader_gets_data_loss_and_others_continue():
    async def test():
        engine = engine_with_events(max_batches=8)
        async with (
            serving(engine) as (_, address),
            slow_line(address) as slow_address,
            AsyncClient(slow_address) as slow,
            AsyncClient(address) as quick,
        ):
            slow_batches, quick_batches = slow.subscribe(), quick.subscribe()
            await anext(slow_batches)
            await anext(quick_batches)
            lost = asyncio.ensure_future(status_at_the_end(slow_batches))
            token = 0
            while not lost.done():
                token += 1
                engine.events.store(*[token] * 16_000)
                engine.events.cache.purge()
                engine.events.feed.publish()
                numbers = [(await anext(quick_batches)).sequence_number for _ in range(2)]
                assert numbers == [engine.events.log.last - 1, engine.events.log.last]
            assert await lost is grpc.StatusCode.DATA_LOSS
            assert (await anext(slow.subscribe())).HasField("snapshot")

    run(test)


def test_callers_that_read_nothing_delay_neither_requests_nor_the_drain():
    async def test():
        engine = engine_with_events()
        engine.events.store(*range(8000))
        async with (
            serving(engine, drain_timeout_s=PATIENCE_S) as (server, address),
            AsyncClient(address, options=[("grpc.use_local_subchannel_pool", 1)]) as not_reading,
            AsyncClient(address) as client,
        ):
            calls = [not_reading.subscribe() for _ in range(MAX_READERS)]
            for call in calls:
                await anext(call)
            refusal = await refusal_of(anext(client.subscribe()))
            assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            for token in range(20):
                engine.events.store(token, *[token] * 4000)
                engine.events.cache.purge()
            assert (await client.prefill([1, 2, 3])).next_token_id == 6
            # A drain that waited for them would take as long as its timeout, which is longer than the test may take.
            assert await server.drain()

    run(test)


def test_a_caller_that_disconnects_is_forgotten():
    async def test():
        engine = engine_with_events()
        async with serving(engine) as (_, address), AsyncClient(address) as client:
            batches = client.subscribe()
            await anext(batches)
            assert engine.events.num_readers == 1
            await batches.aclose()
            assert await becomes_true(lambda: engine.events.num_readers == 0)

    run(test)


def test_a_stream_ends_with_the_service_or_with_a_bug():
    async def test():
        engine = engine_with_events()
        async with serving(engine) as (server, address), AsyncClient(address) as client:
            batches = client.subscribe()
            await anext(batches)
            ended = asyncio.ensure_future(status_at_the_end(batches))
            await server.drain()
            assert await ended is grpc.StatusCode.UNAVAILABLE
        engine = engine_with_events()
        async with serving(engine) as (_, address), AsyncClient(address) as client:
            batches = client.subscribe()
            await anext(batches)
            engine.events.feed.close(InvariantViolation("events: broken"))
            assert await status_at_the_end(batches) is grpc.StatusCode.INTERNAL

    run(test)


def test_reflection_and_health_know_the_service():
    async def test():
        async with serving(engine_with_events()) as (_, address), grpc.aio.insecure_channel(address) as channel:
            request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            answer = await anext(aiter(stub.ServerReflectionInfo(iter([request]))))
            assert b"SubscribeRequest" in answer.file_descriptor_response.file_descriptor_proto[0]
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
            assert health.status == health_pb2.HealthCheckResponse.SERVING

    run(test)


def test_an_engine_without_events_has_no_such_service():
    async def test():
        engine = FakeEngine()
        async with serving(engine) as (_, address), AsyncClient(address) as client:
            assert await status_at_the_end(client.subscribe()) is grpc.StatusCode.UNIMPLEMENTED

    run(test)
