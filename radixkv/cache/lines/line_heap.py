"""The eviction lines of any number of tenants, and the leaf that goes first of all of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from radixkv.cache.eviction_policy import EvictionPolicy
from radixkv.cache.lines.eviction_index import Entry, EvictionIndex
from radixkv.cache.node import Node

_SLACK = 64  # of entries in the heap that are not first any more, beside one for each line
_MOVED_AT_ONCE = 4  # takes 0.5 ms, as each line gives some leaves new keys


class LineHeap:
    """A line for each tenant that has a leaf to evict, and a heap of their first leaves.

    The heap may have entries that are not first any more. Each is replaced when it comes to the top, so that a leaf
    that is used again costs nothing here.

    When the policy changes its order, lines move into the new order a few at a time, beginning with those at the front.
    A line goes after them until it is moved.

    Args:
        policy: orders all lines alike.
        arrivals: distinct numbers, in rising order.

    Complexity: O(log leaves + log tenants), amortized.
    """

    def __init__(self, policy: EvictionPolicy, arrivals: Iterator[int]) -> None:
        self._policy = policy
        self._arrivals = arrivals
        self._lines: dict[str, EvictionIndex] = {}
        self._heap: list[tuple[Entry, str]] = []  # arrivals are distinct, so tenants are never compared
        self._outdated: list[tuple[Entry, str]] = []  # the same, of the policy's previous order
        self._generation = policy.generation

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def add(self, node: Node) -> None:
        """Put a leaf in its tenant's line, unless it is there already."""
        tenant = node.owner.namespace.tenant
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = EvictionIndex(self._policy, self._arrivals)
        line.add(node)
        first = line.first()
        if first is not None and first is node.eviction_entry:
            heapq.heappush(self._heap, (first, tenant))
            if len(self._heap) > 2 * len(self._lines) + _SLACK:
                self._heap = self._least_of_each_line()
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
        self._follow_policy()
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

    def _follow_policy(self) -> None:
        if self._generation != self._policy.generation:
            self._generation = self._policy.generation
            self._outdated += self._heap
            heapq.heapify(self._outdated)
            self._heap = []
        num_moved = 0
        while self._outdated and (num_moved < _MOVED_AT_ONCE or not self._heap):
            _, tenant = heapq.heappop(self._outdated)
            if (entry := self.first_of(tenant)) is not None:
                heapq.heappush(self._heap, (entry, tenant))
                if self._lines[tenant].is_changing:
                    heapq.heappush(self._outdated, (entry, tenant))
                num_moved += 1

    def _least_of_each_line(self) -> list[tuple[Entry, str]]:
        least: dict[str, Entry] = {}
        for entry, tenant in self._heap:
            if tenant in self._lines:
                least[tenant] = min(entry, least.get(tenant, entry))
        return [(entry, tenant) for tenant, entry in least.items()]
