from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.api.events import EventBatch
from radixkv.errors import Draining, EventsLost, StepHangs, TooManyReaders, UnknownEventNumber
from radixkv.events.readers import _MAX_BATCHES_AT_ONCE, MAX_BATCHES_PER_S, MAX_READERS, EventReaders
from tests.events.event_oracle import Knowledge
from tests.events.fake_source import BLOCK_SIZE, SALTED, FakeSource
from tests.patience import PATIENCE_S


def run(test: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


async def read(readers: EventReaders, start: int, last: int) -> list[EventBatch]:
    """Subscribe from `start` on, read up to the batch `last`, and close the reader."""
    batches = []
    async with contextlib.aclosing(readers.subscribe(start)) as stream:
        async for batch in stream:
            batches.append(batch)
            if batch.sequence_number == last:
                return batches
    raise AssertionError("the stream ended")


def test_a_reader_gets_a_snapshot_and_then_new_batches() -> None:
    async def test() -> None:
        source = FakeSource()
        readers = EventReaders(source)
        source.store(1, 2, 3, 4, 5, 6, 7, 8)
        knowledge = Knowledge()
        async with contextlib.aclosing(readers.subscribe(0)) as stream:
            first = await anext(stream)
            assert first.snapshot is not None
            assert (first.snapshot.count, first.snapshot.num_blocks) == (1, 2)
            knowledge.read(first)
            source.store(1, 2, 3, 4, 9, 9, 9, 9)
            source.evict(1)
            for _ in range(2):
                knowledge.read(await anext(stream))
        assert len(knowledge.blocks) == 2, "two in the snapshot, one stored, one evicted"
        assert first.sequence_number == source.log.last - 2
        assert source.num_readers == 0

    run(test)


def test_an_empty_cache_has_a_snapshot_too() -> None:
    async def test() -> None:
        source = FakeSource()
        stream = EventReaders(source).subscribe(0)
        first = await anext(stream)
        assert (first.sequence_number, first.snapshot is not None) == (source.log.start, True)
        await stream.aclose()

    run(test)


def test_a_large_snapshot_consists_of_several_batches() -> None:
    async def test() -> None:
        source = FakeSource()
        source.store(*range(1300 * BLOCK_SIZE))
        source.store(*range(2 * BLOCK_SIZE), namespace=SALTED)
        stream, knowledge, parts = EventReaders(source).subscribe(0), Knowledge(), []
        async for batch in stream:
            knowledge.read(batch)
            assert batch.snapshot is not None
            assert batch.sequence_number == source.log.last
            parts.append((batch.snapshot.index, batch.snapshot.count, batch.snapshot.num_blocks))
            if batch.snapshot.index + 1 == batch.snapshot.count:
                break
        assert parts == [(index, 3, 1302) for index in range(3)], "at most 512 blocks per part"
        assert len(knowledge.blocks) == 1302
        await stream.aclose()

    run(test)


def test_a_reader_replays_from_its_sequence_number() -> None:
    async def test() -> None:
        source = FakeSource()
        readers = EventReaders(source)
        source.switch_on()
        for token in range(5):
            source.store(token, 1, 2, 3)
        start = source.log.last - 3
        batches = await read(readers, start, source.log.last)
        assert [batch.sequence_number for batch in batches] == [start + n for n in range(1, 4)]
        assert all(batch.snapshot is None for batch in batches)

    run(test)


def test_an_unknown_sequence_number_is_refused_at_once() -> None:
    async def test() -> None:
        source = FakeSource()
        readers = EventReaders(source)
        for number in (1, source.log.start - 1, source.log.last + 1):
            with pytest.raises(UnknownEventNumber, match=r"^start_sequence_number: expected"):
                readers.subscribe(number)

    run(test)


def test_a_slow_reader_loses_events_and_others_continue() -> None:
    async def test() -> None:
        source = FakeSource(max_batches=4)
        readers = EventReaders(source)
        slow, quick = readers.subscribe(0), readers.subscribe(0)
        await anext(slow)
        await anext(quick)
        for token in range(9):
            source.store(token, 1, 2, 3)
            assert (await anext(quick)).sequence_number == source.log.last
        with pytest.raises(EventsLost):
            await anext(slow)
        assert (source.num_lost, source.num_readers) == (1, 1)
        source.store(9, 1, 2, 3)
        assert (await anext(quick)).sequence_number == source.log.last
        await quick.aclose()
        again = await read(readers, 0, source.log.last)
        assert again[0].snapshot is not None
        assert again[0].snapshot.num_blocks == 10

    run(test)


def test_readers_share_each_batch_and_one_snapshot() -> None:
    async def test() -> None:
        source = FakeSource()
        readers = EventReaders(source)
        source.store(1, 2, 3, 4)
        source.switch_on()
        streams = [readers.subscribe(0) for _ in range(MAX_READERS)]
        firsts = await asyncio.gather(*(anext(stream) for stream in streams))
        assert len({id(batch) for batch in firsts}) == 1
        waiting = [asyncio.ensure_future(anext(stream)) for stream in streams[: MAX_READERS // 2]]
        source.store(5, 2, 3, 4)
        assert len({id(batch) for batch in await asyncio.gather(*waiting)}) == 1
        assert source.num_readers == MAX_READERS
        for stream in streams:
            await stream.aclose()
        assert source.num_readers == 0

    run(test)


def test_one_reader_too_many_is_refused_until_another_one_closes() -> None:
    async def test() -> None:
        source = FakeSource()
        readers = EventReaders(source)
        streams = [readers.subscribe(0) for _ in range(MAX_READERS)]
        with pytest.raises(TooManyReaders, match=f"events: expected at most {MAX_READERS} readers, got one more"):
            readers.subscribe(0)

        # Two readers end: one is closed twice before it has read anything, one is cancelled while it waits for a batch.
        await streams[0].aclose()
        await streams[0].aclose()
        await anext(streams[1])
        waiting = asyncio.ensure_future(anext(streams[1]))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

        for _ in range(2):
            streams.append(readers.subscribe(0))
        with pytest.raises(TooManyReaders):
            readers.subscribe(0)
        for stream in streams:
            await stream.aclose()
        assert source.num_readers == 0

    run(test)


def test_all_readers_together_get_a_bounded_number_of_batches_per_second() -> None:
    async def test() -> None:
        source, now_s, sleeps_s = FakeSource(), [100.0], []

        async def sleep(seconds: float) -> None:
            sleeps_s.append(seconds)

        readers = EventReaders(source)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("radixkv.events.readers.asyncio", SimpleNamespace(sleep=sleep))
            patch.setattr(readers, "_loop", SimpleNamespace(time=lambda: now_s[0]))
            for _ in range(_MAX_BATCHES_AT_ONCE):
                await readers._take_turn()
            assert len(sleeps_s) <= 1
            sleeps_s.clear()

            # The clock stands still, so each sleep lasts until the turn of its batch, counted from the same moment.
            for _ in range(2 * MAX_BATCHES_PER_S):
                await readers._take_turn()
            assert sleeps_s[-1] == pytest.approx(2.0, abs=0.01)

            now_s[0] += 3.0
            sleeps_s.clear()
            await readers._take_turn()
            assert sleeps_s == []

    run(test)


def test_batches_published_on_another_thread_reach_readers() -> None:
    async def test() -> None:
        source = FakeSource()
        readers = EventReaders(source)
        stream = readers.subscribe(0)
        await anext(stream)
        engine = threading.Thread(target=lambda: [source.store(token, 1, 2, 3) for token in range(50)])
        engine.start()
        numbers = [(await anext(stream)).sequence_number for _ in range(50)]
        engine.join()
        assert numbers == [source.log.start + n for n in range(1, 51)]
        await stream.aclose()

    run(test)


def test_readers_end_with_the_service() -> None:
    async def test() -> None:
        source = FakeSource()
        readers = EventReaders(source)
        streams = [readers.subscribe(0) for _ in range(3)]
        for stream in streams:
            await anext(stream)
        waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await asyncio.sleep(0)
        source.close(Draining("service: draining"))
        for each in waiting:
            with pytest.raises(Draining):
                await each
        with pytest.raises(Draining):
            await anext(readers.subscribe(0))
        assert source.num_readers == 0

    run(test)


def test_readers_end_with_the_log_after_its_last_batch() -> None:
    async def test() -> None:
        source = FakeSource()
        stream = EventReaders(source).subscribe(0)
        await anext(stream)
        source.store(1, 2, 3, 4)
        source.feed.close(Draining("engine: stopped"))
        assert (await anext(stream)).num_blocks == 1
        with pytest.raises(Draining):
            await anext(stream)

    run(test)


def test_a_new_reader_gets_an_error_while_a_step_hangs() -> None:
    async def test() -> None:
        source = FakeSource()
        source.is_hanging = True
        with pytest.raises(StepHangs):
            await anext(EventReaders(source).subscribe(0))

    run(test)
