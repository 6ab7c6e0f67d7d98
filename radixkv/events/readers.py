"""Reads the event log from an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from typing import Any

from radixkv.api.events import EventBatch
from radixkv.cache.node import Node
from radixkv.errors import EventsLost, RadixKVError, StepHangs, TooManyReaders
from radixkv.events.event_log import EventLog
from radixkv.events.snapshot import Snapshot
from radixkv.events.tree_feed import TreeFeed

# Maximum number of batches for all readers of a loop together, per second and in one burst. gRPC takes 60 us per batch,
# so they take at most 1/16 of the time of the loop, and 2 ms at once. If that is not enough, the readers fall behind.
MAX_BATCHES_PER_S = 1000
_MAX_BATCHES_AT_ONCE = 32

# Readers of one `EventSource`. There are few routers, and a thousand readers would overload an event loop.
MAX_READERS = 64


class EventSource:
    """The event log of an engine, usable from any thread.

    Args:
        feed: used on the engine's thread.
        nodes: yields all nodes of the cache, parents before children.
        call: runs a function on the engine's thread between two steps.

    Attributes:
        log: the batches.
        num_readers: number of current readers on event loops.
        num_lost: number of readers that got EventsLost so far.
    """

    def __init__(
        self,
        feed: TreeFeed,
        nodes: Callable[[], Iterable[Node]],
        call: Callable[[Callable[[], None]], Future[Any]],
    ) -> None:
        self.log: EventLog = feed.log
        self.num_readers = 0
        self.num_lost = 0
        self._feed = feed
        self._nodes = nodes
        self._call = call

    def switch_on(self) -> Future[Any]:
        """Record events from now on; see `TreeFeed.switch_on`.

        Raises:
            Draining, StepHangs: the engine accepts no calls.
            QueueFull: too many calls wait for the engine.
        """
        return self._call(lambda: self._feed.switch_on(self._nodes))

    def snapshot(self) -> Future[Snapshot]:
        """Request a snapshot of all cached blocks. Events are recorded from now on.

        Returns:
            A future, which raises the error of the log if the log has ended, and is cancelled if the call is.

        Raises:
            Draining, StepHangs: the engine accepts no calls.
            QueueFull: too many calls wait for the engine.
        """
        answer: Future[Snapshot] = Future()

        def request() -> None:
            self._feed.switch_on(self._nodes)
            self._feed.request_snapshot(answer)

        call = self._call(request)
        call.add_done_callback(lambda done: answer.cancel() if done.cancelled() else None)
        return answer

    def close(self, error: RadixKVError) -> None:
        """End all readers with `error` after the last batch."""
        self.log.close(error)


class EventReader:
    """One reader: an iterator over batches that unregisters itself when it ends or is closed.

    Args:
        batches: the batches.
        unregister: unregisters the reader; called once.
    """

    def __init__(self, batches: AsyncGenerator[EventBatch, None], unregister: Callable[[], None]) -> None:
        self._batches = batches
        self._unregister: Callable[[], None] | None = unregister

    def __aiter__(self) -> EventReader:
        return self

    async def __anext__(self) -> EventBatch:
        try:
            return await anext(self._batches)
        except BaseException:  # after which there are no more batches
            self._end()
            raise

    async def aclose(self) -> None:
        """Stop reading. Closing again does nothing."""
        self._end()
        await self._batches.aclose()

    def _end(self) -> None:
        unregister, self._unregister = self._unregister, None
        if unregister is not None:
            unregister()


class EventReaders:
    """The readers on one event loop. A new batch wakes the loop once, whatever the number of readers.

    The state of a reader is the number of its last batch. Batches are not queued for readers, so a slow reader uses no
    memory; it gets `EventsLost` when the batch after its last one has been dropped. All readers together get at most
    `MAX_BATCHES_PER_S`, one after the other, so that requests on the same loop are not delayed.

    Create and use an instance inside the event loop.
    """

    def __init__(self, source: EventSource) -> None:
        self._source = source
        self._log = source.log
        self._loop = asyncio.get_running_loop()
        self._new_batch = asyncio.Event()
        self._is_waking = False
        self._next_turn_s = 0.0  # when the rate limit allows the next batch
        self._log.listen(self._wake)

    def close(self) -> None:
        """Stop waking the event loop."""
        self._log.unlisten(self._wake)

    def subscribe(self, start: int) -> EventReader:
        """Read batches until the log ends.

        Args:
            start: number of the last batch that the reader has; 0 to begin with a snapshot of one or more batches.

        Returns:
            An iterator, which counts as a reader until it ends or is closed. It raises EventsLost if the reader falls
            too far behind, Draining when the service stops, InvariantViolation if a bug has ended the log, and the
            errors of `EventSource.snapshot`.

        Raises:
            TooManyReaders: the source has `MAX_READERS` readers.
            UnknownEventNumber: `start` is from before a restart, or the batches after it were dropped; subscribe again
                from 0.
        """
        if start:
            self._log.require(start)
        if self._source.num_readers >= MAX_READERS:
            raise TooManyReaders(f"events: expected at most {MAX_READERS} readers, got one more")
        self._source.num_readers += 1
        return EventReader(self._read(start), self._unregister)

    def _unregister(self) -> None:
        self._source.num_readers -= 1

    async def _read(self, number: int) -> AsyncGenerator[EventBatch, None]:
        try:
            if not number:
                snapshot = await self._wait_for_snapshot()
                for batch in snapshot.batches:
                    await self._take_turn()
                    yield batch
                number = snapshot.sequence_number
            while True:
                new_batch = self._new_batch  # read before the log, so that no batch is missed
                batch_or_none = self._log.after(number)
                if batch_or_none is not None:
                    number += 1
                    await self._take_turn()
                    yield batch_or_none
                elif self._log.error is not None:
                    raise self._log.error
                else:
                    await new_batch.wait()
        except EventsLost:
            self._source.num_lost += 1
            raise

    async def _take_turn(self) -> None:
        """Wait until the rate limit allows another batch."""
        now_s = self._loop.time()
        begins_s = max(now_s - _MAX_BATCHES_AT_ONCE / MAX_BATCHES_PER_S, self._next_turn_s)
        self._next_turn_s = begins_s + 1 / MAX_BATCHES_PER_S
        if begins_s > now_s:
            await asyncio.sleep(begins_s - now_s)

    async def _wait_for_snapshot(self) -> Snapshot:
        if self._log.error is not None:
            raise self._log.error
        snapshot_future = asyncio.wrap_future(self._source.snapshot())
        log_end = asyncio.ensure_future(self._wait_for_end())
        try:
            await asyncio.wait((snapshot_future, log_end), return_when=asyncio.FIRST_COMPLETED)
            if not snapshot_future.done():
                log_end.result()  # raises the error of the log
            if snapshot_future.cancelled():
                raise StepHangs("engine: a step takes too long; no snapshot was made")
            snapshot = snapshot_future.result()
        finally:
            snapshot_future.cancel()
            log_end.cancel()
        await asyncio.to_thread(lambda: snapshot.batches)  # slow for a large cache
        return snapshot

    async def _wait_for_end(self) -> None:
        """Wait until the log ends, and raise its error."""
        while self._log.error is None:
            await self._new_batch.wait()
        raise self._log.error

    def _wake(self) -> None:
        """Wake the event loop if there are readers. Called on the engine's thread."""
        if self._source.num_readers and not self._is_waking and not self._loop.is_closed():
            self._is_waking = True
            with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
                self._loop.call_soon_threadsafe(self._notify)

    def _notify(self) -> None:
        self._is_waking = False  # reset before readers run, so that the next batch wakes the loop again
        new_batch = self._new_batch
        self._new_batch = asyncio.Event()
        new_batch.set()
