"""The order in which snapshots are given up."""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    saved_tokens: int
    num_uses: int
    worth: float


class WorthOrder:
    """Orders snapshots by the tokens that they save a byte, and by how lately that was seen.

    All snapshots take the same bytes, so their tokens are compared. A snapshot is worth the tokens between the one
    before it and itself, once for its making and once for each use, above the worth of the last one that was given up:
    what was worth much long ago falls behind (GreedyDual-Size with Frequency; Cherkasova, HPL-98-69R1).

    Attributes:
        level: the worth of the last snapshot that was given up.

    Example:
        >>> order = WorthOrder()
        >>> order.add(7, saved_tokens=512)
        >>> order.add(8, saved_tokens=64)
        >>> order.least(), order.worth_of(100) > order.worth(8)
        (8, True)
        >>> order.used(8)
        >>> order.worth(8)
        128.0
    """

    def __init__(self) -> None:
        self.level = 0.0
        self._entries: dict[int, _Entry] = {}
        self._heap: list[tuple[float, int]] = []  # with entries that are out of date; those are skipped

    def __len__(self) -> int:
        return len(self._entries)

    def worth_of(self, saved_tokens: int) -> float:
        """Return what a new snapshot would be worth."""
        return self.level + saved_tokens

    def worth(self, slot: int) -> float:
        """Return what a snapshot is worth."""
        return self._entries[slot].worth

    def num_uses(self, slot: int) -> int:
        """Return how often a snapshot was used."""
        return self._entries[slot].num_uses

    def add(self, slot: int, saved_tokens: int) -> None:
        """Add a snapshot. Complexity: O(log snapshots), amortized."""
        self._entries[slot] = entry = _Entry(saved_tokens, 0, self.worth_of(saved_tokens))
        self._push(slot, entry)

    def used(self, slot: int) -> None:
        """Note a use of a snapshot. Complexity: O(log snapshots), amortized."""
        entry = self._entries[slot]
        entry.num_uses += 1
        entry.worth = self.level + entry.saved_tokens * (1 + entry.num_uses)
        self._push(slot, entry)

    def discard(self, slot: int) -> None:
        """Forget a snapshot. Complexity: O(1)."""
        del self._entries[slot]

    def least(self) -> int | None:
        """Return the snapshot that is worth least; None if there is none. Complexity: O(log snapshots), amortized."""
        while self._heap:
            worth, slot = self._heap[0]
            entry = self._entries.get(slot)
            if entry is not None and entry.worth == worth:
                return slot
            heapq.heappop(self._heap)
        return None

    def give_up(self, slot: int) -> None:
        """Forget a snapshot for the sake of another one. Complexity: O(1)."""
        self.level = max(self.level, self._entries[slot].worth)
        self.discard(slot)

    def _push(self, slot: int, entry: _Entry) -> None:
        """Put what a snapshot is worth now into the heap. What is out of date leaves it when there is much of it."""
        heapq.heappush(self._heap, (entry.worth, slot))
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [(each.worth, number) for number, each in self._entries.items()]
            heapq.heapify(self._heap)
