"""One line of leaves that may be evicted, in the order in which they go.

Leaves of lower priority go before all others; among leaves of equal priority the policy decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sortedcontainers import SortedList

from radixkv.cache.eviction_policy import EvictionPolicy
from radixkv.cache.node import Node

Entry = tuple[int, Any, int, Node]
"""Priority, the policy's key, arrival and node of a leaf; arrivals are distinct."""

_KEYED_AT_ONCE = 32  # takes 0.1 ms; all of a million leaves at once would take 3 s


class EvictionIndex:
    """One line of leaves, sorted by priority and then by the policy's key.

    When the policy changes its order, leaves get new keys a few at a time, beginning with those at the front. A leaf
    with an outdated key is not evicted before it has a new one.

    Complexity: O(log n) for each operation.
    """

    def __init__(self, policy: EvictionPolicy, arrivals: Iterator[int]) -> None:
        self._policy = policy
        self._entries = SortedList()  # of (priority, key, arrival, node); arrivals are distinct
        self._outdated = SortedList()  # the same, with keys of the policy's previous order
        self._arrivals = arrivals
        self._generation = policy.generation

    def __len__(self) -> int:
        return len(self._entries) + len(self._outdated)

    def __contains__(self, node: Node) -> bool:
        return node.eviction_entry is not None

    @property
    def is_changing(self) -> bool:
        """Whether leaves wait for new keys, so that `first` may yet become another one by itself."""
        return bool(self._outdated)

    def add(self, node: Node) -> None:
        """Put a leaf in line, unless it is there already."""
        if node.eviction_entry is None:
            node.eviction_entry = (node.priority, self._policy.key(node), next(self._arrivals), node)
            self._entries.add(node.eviction_entry)

    def discard(self, node: Node) -> None:
        """Take a leaf out of the line, if it is there."""
        if node.eviction_entry is not None:
            is_outdated = self._outdated and node.eviction_entry in self._outdated
            (self._outdated if is_outdated else self._entries).remove(node.eviction_entry)
            node.eviction_entry = None

    def first(self) -> Entry | None:
        """Return priority, key, arrival and node of the leaf to evict next; None if there is no leaf."""
        if self._generation != self._policy.generation:
            self._generation = self._policy.generation
            self._outdated.update(self._entries)
            self._entries.clear()
        for _ in range(min(_KEYED_AT_ONCE, len(self._outdated))):
            priority, _, arrival, node = self._outdated.pop(0)
            node.eviction_entry = (priority, self._policy.key(node), arrival, node)
            self._entries.add(node.eviction_entry)
        return self._entries[0] if self._entries else None
