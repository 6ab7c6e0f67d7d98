"""A ring of the last event batches, by sequence number."""

from __future__ import annotations

import time
from collections.abc import Callable

from radixkv.api.events import Event, EventBatch
from radixkv.errors import EventsLost, RadixKVError, UnknownEventNumber

MAX_BATCHES = 10_000
MAX_BLOCKS = 500_000  # 36 MB of tokens and hashes, in events of blocks of 16


class EventLog:
    """A ring of batches. One thread appends; any thread reads, from the number that it chooses.

        numbers     start │  dropped  │ first ........... last │ future
                          │           └──── can be read ────┘  │

    Numbers start at the microseconds since 1970, so that they are larger after each restart. A number from before a
    restart is therefore always recognized and refused.

    Args:
        max_batches: maximum number of kept batches.
        max_blocks: maximum number of blocks in the kept batches; the last batch is always kept.
        clock: Unix time in seconds.

    Attributes:
        start: the number before the first batch of this process.
        first: the oldest number that can be read; `last + 1` if there is none.
        last: the number of the last batch; `start` before there is one.
        num_blocks: number of blocks in all batches so far.
        error: why the log has ended; None while it is open.
    """

    def __init__(
        self,
        max_batches: int = MAX_BATCHES,
        max_blocks: int = MAX_BLOCKS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.start = int(clock() * 1e6)
        self.first = self.start + 1
        self.last = self.start
        self.num_blocks = 0
        self.error: RadixKVError | None = None
        self._clock = clock
        self._max_blocks = max_blocks
        self._num_kept_blocks = 0
        self._ring: list[EventBatch | None] = [None] * max_batches
        self._listeners: tuple[Callable[[], None], ...] = ()

    @property
    def num_batches(self) -> int:
        """Number of batches so far."""
        return self.last - self.start

    def append(self, events: tuple[Event, ...]) -> None:
        """Append the events of a step as a batch, and notify the listeners. Complexity: O(dropped batches)."""
        batch = EventBatch(self.last + 1, self._clock(), events)
        self.num_blocks += batch.num_blocks
        self._num_kept_blocks += batch.num_blocks
        if self.last + 1 - self.first == len(self._ring):
            self._drop_first()
        while self._num_kept_blocks > self._max_blocks and self.first <= self.last:
            self._drop_first()
        self._ring[batch.sequence_number % len(self._ring)] = batch
        self.last += 1  # after the write, so that readers on other threads find the batch
        self._notify()

    def close(self, error: RadixKVError) -> None:
        """End the log: readers get `error` after the last batch. Thread-safe; closing again does nothing."""
        self.error = self.error or error
        self._notify()

    def require(self, after: int) -> None:
        """Check a number to continue from.

        Args:
            after: number of the last batch that a reader has.

        Raises:
            UnknownEventNumber: the number is from before a restart or above `last`, or batches after it were dropped.
        """
        if not self.first - 1 <= after <= self.last:
            raise UnknownEventNumber(
                f"start_sequence_number: expected 0, or {self.first - 1} to {self.last} since the last start of the "
                f"service, got {after}"
            )

    def after(self, number: int) -> EventBatch | None:
        """Return the batch after a number; None if it does not exist yet.

        Raises:
            EventsLost: the batch was dropped, because the reader was too slow.
        """
        if number >= self.last:
            return None
        batch = self._ring[(number + 1) % len(self._ring)]
        if batch is None or batch.sequence_number != number + 1:
            raise EventsLost(
                f"events: the next batch was dropped, since the log keeps at most {len(self._ring)} batches with at "
                f"most {self._max_blocks} blocks; subscribe again from 0"
            )
        return batch

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each batch and at the end, on the thread that appends or closes.

        The listener must be fast and must not raise. Only one thread may add listeners.
        """
        self._listeners = (*self._listeners, listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Remove a listener, on the thread that added it."""
        self._listeners = tuple(each for each in self._listeners if each != listener)

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    def _drop_first(self) -> None:
        index = self.first % len(self._ring)
        batch = self._ring[index]
        assert batch is not None
        self._ring[index] = None
        self._num_kept_blocks -= batch.num_blocks
        self.first += 1
