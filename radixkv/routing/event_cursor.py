"""The place of a reader in a replica's event log: what fits, what was read before, and what is missing."""

from __future__ import annotations

from enum import Enum, auto

from radixkv.api.events import EventBatch


class Verdict(Enum):
    """Answer to what is to be done with a batch."""

    READ = auto()
    """It is the next one."""
    SKIP = auto()
    """It was read before."""
    ASK = auto()
    """Batches are missing: ask for a snapshot, and skip what comes before that."""


class EventCursor:
    """Follows the sequence numbers of one replica.

    A gap is not healed by later batches. Until a snapshot begins, everything is skipped; one may begin at any time.

    Attributes:
        number: of the last batch that was read, to subscribe from; 0 to ask for a snapshot.
    """

    def __init__(self) -> None:
        self.number = 0
        self._next_part: int | None = None  # of a snapshot that is being read

    @property
    def is_in_step(self) -> bool:
        """Whether all up to `number` is known."""
        return self.number > 0 and self._next_part is None

    def take(self, batch: EventBatch) -> Verdict:
        """Judge the next batch that came, and move on."""
        part = batch.snapshot
        if part is not None:
            is_next = part.index == self._next_part and batch.sequence_number == self.number
            if part.index and not is_next:
                return self.lose()
            self.number = batch.sequence_number
            self._next_part = part.index + 1 if part.index + 1 < part.count else None
            return Verdict.READ
        if self._next_part is not None or not self.number:
            return self.lose()
        if batch.sequence_number <= self.number:
            return Verdict.SKIP
        if batch.sequence_number > self.number + 1:
            return self.lose()
        self.number = batch.sequence_number
        return Verdict.READ

    def lose(self) -> Verdict:
        """Note that batches are missing, or that the number is of an earlier life of the replica."""
        self.number = 0
        self._next_part = None
        return Verdict.ASK
