"""A ring of the last event batches, by sequence number."""

from __future__ import annotations

import time
from collections.abc import Callable

from radixkv.api.events import Event, EventBatch
from radixkv.errors import EventsLost, RadixKVError, UnknownSequence

MAX_BATCHES = 10_000
MAX_BLOCKS = 500_000  # 36 MB of tokens and hashes, in events of blocks of 16


class EventLog:
    """A ring of batches. One thread appends; any thread reads, with a number of its own.

        numbers     start │ forgotten │ first ........... last │ not yet
                          │           └──── can be read ────┘  │

    Numbers begin at the microseconds since 1970, so that those of a later life of the process are larger: a reader that
    comes back with a number of an earlier life is refused, and never taken for one that has read this life's batches.

    Args:
        max_batches: batches that are kept.
        max_blocks: blocks that the kept batches may name together; the last batch is kept in any case.
        clock: Unix time in seconds.

    Attributes:
        start: the number before the first batch of this life.
        first: the oldest number that can be read; `last + 1` if there is none.
        last: the number of the last batch; `start` before there is one.
        num_blocks: blocks that all batches so far named.
        error: why there will be no more batches; None while there may be.
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
        """Number and keep the events of a step, and wake the readers. Complexity: O(batches forgotten)."""
        batch = EventBatch(self.last + 1, self._clock(), events)
        self.num_blocks += batch.num_blocks
        self._num_kept_blocks += batch.num_blocks
        if self.last + 1 - self.first == len(self._ring):
            self._forget_first()
        while self._num_kept_blocks > self._max_blocks and self.first <= self.last:
            self._forget_first()
        self._ring[batch.sequence_number % len(self._ring)] = batch
        self.last += 1  # only now: a reader on another thread finds what it is told of
        self._tell()

    def close(self, error: RadixKVError) -> None:
        """End the log: readers get `error` after the last batch. From any thread; a second end changes nothing."""
        self.error = self.error or error
        self._tell()

    def require(self, after: int) -> None:
        """Check a number to go on from.

        Args:
            after: the last number that a reader has.

        Raises:
            UnknownSequence: it is of another life, or the batches after it are forgotten.
        """
        if not self.first - 1 <= after <= self.last:
            raise UnknownSequence(
                f"start_sequence_number: expected 0, or {self.first - 1} to {self.last} of this life of the service, "
                f"got {after}"
            )

    def after(self, number: int) -> EventBatch | None:
        """Return the batch after a number; None if it does not exist yet.

        Raises:
            EventsLost: it is forgotten: the reader was too slow.
        """
        if number >= self.last:
            return None
        batch = self._ring[(number + 1) % len(self._ring)]
        if batch is None or batch.sequence_number != number + 1:
            raise EventsLost(f"events: expected a reader of the last {len(self._ring)} batches, got one that is behind")
        return batch

    def listen(self, listener: Callable[[], None]) -> None:
        """Have `listener` called after each batch and at the end, on the thread that appends or closes.

        It must be quick and raise nothing. One thread adds listeners.
        """
        self._listeners = (*self._listeners, listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Call a listener no more. On the thread that added it."""
        self._listeners = tuple(each for each in self._listeners if each != listener)

    def _tell(self) -> None:
        for tell in self._listeners:
            tell()

    def _forget_first(self) -> None:
        place = self.first % len(self._ring)
        batch = self._ring[place]
        assert batch is not None
        self._ring[place] = None
        self._num_kept_blocks -= batch.num_blocks
        self.first += 1
