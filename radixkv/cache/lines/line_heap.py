"""The eviction lines of any number of tenants, and the leaf that goes first of all of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from radixkv.cache.lines.eviction_index import Entry, EvictionIndex
from radixkv.cache.tree.node import Node

_SLACK = 64  # of outdated entries in the heap, beside one for each line


class LineHeap:
    """A line for each tenant that has a leaf to evict, and a heap of their first leaves.

    The heap may have entries that are not first any more. Each is replaced when it comes to the top, so that a leaf
    that is used again costs nothing here.

    Args:
        make_line: makes an empty line.

    Complexity: O(log leaves + log tenants), amortized.
    """

    def __init__(self, make_line: Callable[[], EvictionIndex]) -> None:
        self._make_line = make_line
        self._lines: dict[str, EvictionIndex] = {}
        self._heap: list[tuple[Entry, str]] = []  # arrivals are distinct, so tenants are never compared

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def add(self, node: Node) -> None:
        """Put a leaf in its tenant's line, unless it is there already."""
        tenant = node.owner.namespace.tenant
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = self._make_line()
        line.add(node)
        first = line.first()
        if first is not None and first is node.eviction_entry:
            heapq.heappush(self._heap, (first, tenant))
            if len(self._heap) > 2 * len(self._lines) + _SLACK:
                self._heap = [(head, name) for name, each in self._lines.items() if (head := each.first()) is not None]
                heapq.heapify(self._heap)

    def discard(self, node: Node) -> None:
        """Take a leaf out of its line, if it is there."""
        tenant = node.owner.namespace.tenant
        line = self._lines.get(tenant)
        if line is not None:
            line.discard(node)
            if not line:
                del self._lines[tenant]

    def first_of(self, tenant: str) -> Entry | None:
        """Return the entry of the leaf that goes first of one tenant; None if it has none."""
        line = self._lines.get(tenant)
        return None if line is None else line.first()

    def first(self) -> Entry | None:
        """Return the entry of the leaf that goes first of all tenants; None if there is none."""
        while self._heap:
            entry, tenant = self._heap[0]
            actual = self.first_of(tenant)
            if actual is entry:
                return entry
            if actual is None:
                heapq.heappop(self._heap)
            else:
                heapq.heapreplace(self._heap, (actual, tenant))
        return None
