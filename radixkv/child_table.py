"""The children of one node, by the bytes of their first block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sortedcontainers import SortedList

from radixkv.token_bytes import shared_bytes

if TYPE_CHECKING:
    from radixkv.node import Node

_MAX_SCANNED = 4  # most nodes fork in two; a sorted list costs 2 us and 800 bytes before it holds anything


class ChildTable(dict[bytes, "Node"]):
    """A dict that finds the nearest key, too. Filled and emptied by `table[key] = node` and `del table[key]` alone.

    A few keys are compared one by one; more are kept in sorted order as well.
    """

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: SortedList | None = None

    def __setitem__(self, first_block: bytes, node: Node) -> None:
        """File a node, perhaps in the place of another. Complexity: O(log n)."""
        if self._order is not None and first_block not in self:
            self._order.add(first_block)
        dict.__setitem__(self, first_block, node)
        if self._order is None and len(self) > _MAX_SCANNED:
            self._order = SortedList(self)

    def __delitem__(self, first_block: bytes) -> None:
        """Forget a node. Complexity: O(log n)."""
        dict.__delitem__(self, first_block)
        if self._order is not None:
            self._order.remove(first_block)

    def nearest(self, first_block: bytes) -> tuple[Node, int]:
        """The node whose key shares the most tokens with `first_block`, and how many bytes those are.

        The table must not be empty. In sorted order the longest common prefix is always with a neighbour.

        Complexity: O(log n)
        """
        keys = self if self._order is None else _neighbours(self._order, first_block)
        nearest, most = b"", -1
        for key in keys:
            shared = shared_bytes(key, first_block, 0)
            if shared > most:
                nearest, most = key, shared
        return self[nearest], most

    def is_in_order(self) -> bool:
        """Whether the sorted keys are the keys. Complexity: O(n log n)."""
        return self._order is None or list(self._order) == sorted(self)


def _neighbours(order: SortedList, first_block: bytes) -> tuple[bytes, bytes]:
    """The keys before and after a place; twice the same at either end."""
    after = order.bisect_left(first_block)
    return order[max(after - 1, 0)], order[min(after, len(order) - 1)]
