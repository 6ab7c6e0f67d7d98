"""The leaves that may be evicted, in the order in which they go.

Leaves of lower priority go before all others; among leaves of equal priority the policy decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator
from typing import Any

from sortedcontainers import SortedList

from radixkv.cache.policies.policy import EvictionPolicy
from radixkv.cache.tree.node import Node

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

    def first(self) -> tuple[int, Any, int, Node] | None:
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


class EvictionLines:
    """One line for each tenant with a quota and one for all other tenants, so that a tenant can be spared or go first.

    Args:
        policy: orders all lines alike.
        tenants: names of the tenants with a quota.

    Complexity: O(log leaves) to add, discard and requeue; O(lines) to find the first leaf.
    """

    def __init__(self, policy: EvictionPolicy, tenants: Iterable[str]) -> None:
        arrivals = itertools.count()
        self._common = EvictionIndex(policy, arrivals)
        self._own = {tenant: EvictionIndex(policy, arrivals) for tenant in tenants}

    def __len__(self) -> int:
        return len(self._common) + sum(map(len, self._own.values()))

    def __contains__(self, node: Node) -> bool:
        return node.eviction_entry is not None

    def add(self, node: Node) -> None:
        """Put a leaf in its tenant's line, unless it is there already."""
        self._line(node).add(node)

    def discard(self, node: Node) -> None:
        """Take a leaf out of its line, if it is there."""
        self._line(node).discard(node)

    def requeue(self, node: Node) -> None:
        """Give a node a new place in its line, if it is there."""
        if node.eviction_entry is not None:
            line = self._line(node)
            line.discard(node)
            line.add(node)

    def first_of(self, tenant: str) -> Node | None:
        """Return the leaf that goes first of one tenant with a quota; None if it has none."""
        first = self._own[tenant].first()
        return None if first is None else first[-1]

    def first(self, spared: Container[str]) -> Node | None:
        """Return the leaf that goes first of all tenants but the spared ones; None if there is none."""
        lines = [self._common, *(line for tenant, line in self._own.items() if tenant not in spared)]
        first = min((entry for line in lines if (entry := line.first()) is not None), default=None)
        return None if first is None else first[-1]

    def _line(self, node: Node) -> EvictionIndex:
        return self._own.get(node.owner.namespace.tenant, self._common)
