"""The children of one node, by the bytes of their first block."""

from __future__ import annotations

from bisect import bisect_left
from typing import Generic, TypeVar

from sortedcontainers import SortedList

from radixkv.tokens import shared_bytes

_V = TypeVar("_V")

_MAX_SCANNED = 4  # most nodes fork in two; a sorted list costs 2 us and 800 bytes before it holds anything


class ChildTable(dict[bytes, _V], Generic[_V]):
    """A dict that also finds the nearest key. Change it by `table[key] = child` and `del table[key]` only.

    A few keys are compared one by one; more than four are kept in sorted order as well.

    Example:
        >>> table = ChildTable()
        >>> table[b"aaaabbbb"], table[b"aaaacccc"] = "first", "second"  # two tokens each
        >>> table.nearest(b"aaaaccccdddd")
        ('second', 8)
    """

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: _SortedKeys | None = None

    def __setitem__(self, first_block: bytes, child: _V) -> None:
        """File a child, perhaps in the place of another. Complexity: O(log n)."""
        if self._order is not None and first_block not in self:
            self._order.add(first_block)
        dict.__setitem__(self, first_block, child)
        if self._order is None and len(self) > _MAX_SCANNED:
            self._order = _SortedKeys(self)

    def __delitem__(self, first_block: bytes) -> None:
        """Remove a child. Complexity: O(log n)."""
        dict.__delitem__(self, first_block)
        if self._order is not None:
            self._order.remove(first_block)

    def nearest(self, first_block: bytes) -> tuple[_V, int]:
        """Find the child whose key shares the most tokens with `first_block`, and the number of bytes shared.

        The table must not be empty. In sorted order the longest common prefix is always with a neighbor.

        Complexity: O(log n).
        """
        keys = self if self._order is None else self._order.neighbors(first_block)
        nearest, most = b"", -1
        for key in keys:
            shared = shared_bytes(key, first_block, 0)
            if shared > most:
                nearest, most = key, shared
        return self[nearest], most

    def is_in_order(self) -> bool:
        """Whether the sorted keys are the keys of the table. Complexity: O(n log n)."""
        return self._order is None or list(self._order) == sorted(self)


class _SortedKeys(SortedList):  # type: ignore[misc]  # has no annotations
    """Sorted keys that find the two neighbors of a key quickly.

    The public methods would need two look-ups by position, and the position index is thrown away by each insertion:
    3.3 us among 100,000 keys, and 5.2 between insertions. The lists inside a `SortedList` take 0.8 and 1.9.
    """

    def neighbors(self, key: bytes) -> tuple[bytes, bytes]:
        """Return the greatest key below `key` and the least one that is not; the same one twice at either end."""
        lists: list[list[bytes]] = self._lists
        place = bisect_left(self._maxes, key)
        if place == len(lists):
            return lists[-1][-1], lists[-1][-1]
        keys = lists[place]
        index = bisect_left(keys, key)
        if index:
            return keys[index - 1], keys[index]
        return lists[place - 1][-1] if place else keys[0], keys[0]
