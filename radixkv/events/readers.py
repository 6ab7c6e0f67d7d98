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

# Batches that all readers of a loop get in a second, and at once. gRPC takes 60 us for each, so readers, however many
# they are, take a sixteenth of the loop's time, and 2 ms at once. Where that is not enough they lag behind.
MAX_BATCHES_A_SECOND = 1000
_MAX_BATCHES_AT_ONCE = 32

# Readers of a loop. Routers are few, and each of a thousand callers would still cost the loop a batch in its turn.
MAX_READERS = 64


class EventSource:
    """The event log of an engine, for any thread.

    Args:
        feed: belongs to the engine's thread.
        nodes: yields all nodes of the cache, parents before children.
        call: calls a function on the engine's thread between two steps.

    Attributes:
        log: the batches.
        num_readers: readers of event loops that read now.
        num_lost: readers that got EventsLost.
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
            Draining, StepHangs: the engine takes no calls.
        """
        return self._call(lambda: self._feed.switch_on(self._nodes))

    def snapshot(self) -> Future[Snapshot]:
        """Ask for all blocks that are cached. Records events from now on.

        Raises:
            Draining, StepHangs: the engine takes no calls.
            Later, through the future: Draining; it may also be cancelled.
        """
        answer: Future[Snapshot] = Future()

        def ask() -> None:
            self._feed.switch_on(self._nodes)
            self._feed.ask(answer)

        call = self._call(ask)
        call.add_done_callback(lambda done: answer.cancel() if done.cancelled() else None)
        return answer

    def close(self, error: RadixKVError) -> None:
        """End all readers with `error`, after what is logged."""
        self.log.close(error)


class EventReader:
    """One reader: an iterator of batches that gives its place back when it ends or is closed.

    Args:
        batches: what it reads.
        leave: gives the place back; called once.
    """

    def __init__(self, batches: AsyncGenerator[EventBatch, None], leave: Callable[[], None]) -> None:
        self._batches = batches
        self._leave: Callable[[], None] | None = leave

    def __aiter__(self) -> EventReader:
        return self

    async def __anext__(self) -> EventBatch:
        try:
            return await anext(self._batches)
        except BaseException:  # after which there is no batch more
            self._end()
            raise

    async def aclose(self) -> None:
        """Stop reading. Closing again does nothing."""
        self._end()
        await self._batches.aclose()

    def _end(self) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


class EventReaders:
    """The readers of one event loop. A new batch wakes the loop once, however many they are.

    A reader is a number: the last batch that it has. Nothing is queued for it, so one that reads slowly or not at all
    costs nobody anything; it gets `EventsLost` when the batch after its own is forgotten. All readers together get
    `MAX_BATCHES_A_SECOND`, one after the other, so that requests on the same loop go on.

    To be made and used inside the event loop.
    """

    def __init__(self, source: EventSource) -> None:
        self._source = source
        self._log = source.log
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._is_waking = False
        self._free_s = 0.0  # when all batches that were handed out have had their time
        self._log.listen(self._wake)

    def close(self) -> None:
        """Wake nobody any more."""
        self._log.unlisten(self._wake)

    def subscribe(self, start: int) -> EventReader:
        """Read batches until the log ends.

        Args:
            start: the last number that the reader has; 0 to begin with a snapshot, a batch or several.

        Returns:
            An iterator. It raises EventsLost if the reader falls too far behind, or Draining when the service ends. It
            keeps a place until it ends or is closed.

        Raises:
            TooManyReaders: `MAX_READERS` read.
            UnknownSequence: `start` is a number of another life, or the batches after it are forgotten. Subscribe
                from 0 then.
        """
        if start:
            self._log.require(start)
        if self._source.num_readers >= MAX_READERS:
            raise TooManyReaders(f"events: expected at most {MAX_READERS} readers, got one more")
        self._source.num_readers += 1
        return EventReader(self._read(start), self._leave)

    def _leave(self) -> None:
        self._source.num_readers -= 1

    async def _read(self, number: int) -> AsyncGenerator[EventBatch, None]:
        try:
            if not number:
                snapshot = await self._snapshot()
                for batch in snapshot.batches:
                    await self._take_turn()
                    yield batch
                number = snapshot.sequence_number
            while True:
                news = self._news  # before looking, so that a batch that comes from now on is noticed
                batch_or_none = self._log.after(number)
                if batch_or_none is not None:
                    number += 1
                    await self._take_turn()
                    yield batch_or_none
                elif self._log.error is not None:
                    raise self._log.error
                else:
                    await news.wait()
        except EventsLost:
            self._source.num_lost += 1
            raise

    async def _take_turn(self) -> None:
        """Wait for the time of one batch more."""
        now_s = self._loop.time()
        begins_s = max(now_s - _MAX_BATCHES_AT_ONCE / MAX_BATCHES_A_SECOND, self._free_s)
        self._free_s = begins_s + 1 / MAX_BATCHES_A_SECOND
        if begins_s > now_s:
            await asyncio.sleep(begins_s - now_s)

    async def _snapshot(self) -> Snapshot:
        if self._log.error is not None:
            raise self._log.error
        asked = asyncio.wrap_future(self._source.snapshot())
        ended = asyncio.ensure_future(self._ended())
        try:
            await asyncio.wait((asked, ended), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                ended.result()
            if asked.cancelled():
                raise StepHangs("engine: a step takes too long; no snapshot was made")
            snapshot = asked.result()
        finally:
            asked.cancel()
            ended.cancel()
        await asyncio.to_thread(lambda: snapshot.batches)  # of a large cache it takes a while
        return snapshot

    async def _ended(self) -> None:
        """Wait for the end of the log, and raise its error."""
        while self._log.error is None:
            await self._news.wait()
        raise self._log.error

    def _wake(self) -> None:
        """Wake the event loop, if anybody reads. Called on the engine's thread."""
        if self._source.num_readers and not self._is_waking and not self._loop.is_closed():
            self._is_waking = True
            with contextlib.suppress(RuntimeError):  # it was closed since
                self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._is_waking = False  # before the readers look, so that a batch that comes from now on wakes the loop again
        news, self._news = self._news, asyncio.Event()
        news.set()
