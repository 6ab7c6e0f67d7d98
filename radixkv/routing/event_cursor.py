"""The position of a reader in the event log of a replica, which detects gaps and duplicates."""

from __future__ import annotations

from enum import Enum, auto

from radixkv.api.events import EventBatch


class Verdict(Enum):
    """What to do with a batch."""

    APPLY = auto()
    """Apply it: it is the next one."""
    SKIP = auto()
    """Ignore it: it was read before."""
    RESYNC = auto()
    """Batches are missing: request a snapshot, and ignore the batches before it."""


class EventCursor:
    """Follows the sequence numbers of one replica.

    After a gap, all batches are ignored until a snapshot begins. A snapshot may begin at any time.

    Attributes:
        number: number of the last batch that was read, from which to subscribe; 0 to request a snapshot.
    """

    def __init__(self) -> None:
        self.number = 0
        self._next_part: int | None = None  # of a snapshot that is being read

    @property
    def is_up_to_date(self) -> bool:
        """Whether all batches up to `number` were applied."""
        return self.number > 0 and self._next_part is None

    def take(self, batch: EventBatch) -> Verdict:
        """Decide what to do with the next batch, and advance."""
        part = batch.snapshot
        if part is not None:
            is_next = part.index == self._next_part and batch.sequence_number == self.number
            if part.index and not is_next:
                return self.request_snapshot()
            self.number = batch.sequence_number
            self._next_part = part.index + 1 if part.index + 1 < part.count else None
            return Verdict.APPLY
        if self._next_part is not None or not self.number:
            return self.request_snapshot()
        if batch.sequence_number <= self.number:
            return Verdict.SKIP
        if batch.sequence_number > self.number + 1:
            return self.request_snapshot()
        self.number = batch.sequence_number
        return Verdict.APPLY

    def request_snapshot(self) -> Verdict:
        """Start again with a snapshot: batches are missing, or the number is from before a restart of the replica."""
        self.number = 0
        self._next_part = None
        return Verdict.RESYNC
