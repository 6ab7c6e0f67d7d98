"""Which leaf goes first: the policies and the sorted index they order."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator
from typing import Any, Protocol

from sortedcontainers import SortedList

from radixkv.radix_tree import Node


class EvictionPolicy(Protocol):
    """A sort key for leaves that nobody uses: the smallest goes first."""

    def key(self, node: Node) -> Any:
        """The node's place in line, taken when it becomes evictable. Keys of one policy are comparable."""
        ...


class LeastRecentlyUsed:
    """The leaf whose last lease began or ended longest ago goes first."""

    def key(self, node: Node) -> float:
        """Time of last use, in seconds."""
        return node.last_used_s


class EvictionIndex:
    """Leaves that may go, in the policy's order.

    Complexity: O(log n) for each operation.
    """

    def __init__(self, policy: EvictionPolicy, arrivals: Iterator[int]) -> None:
        self._policy = policy
        self._entries = SortedList()  # of (key, arrival, node); arrivals are distinct, so nodes are never compared
        self._arrivals = arrivals

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, node: Node) -> bool:
        return node.eviction_entry is not None

    def add(self, node: Node) -> None:
        """Put a leaf in line, if it is not there already."""
        if node.eviction_entry is None:
            node.eviction_entry = (self._policy.key(node), next(self._arrivals), node)
            self._entries.add(node.eviction_entry)

    def discard(self, node: Node) -> None:
        """Take a leaf out of the line, if it is there."""
        if node.eviction_entry is not None:
            self._entries.remove(node.eviction_entry)
            node.eviction_entry = None

    def first(self) -> tuple[Any, int, Node] | None:
        """Sort key, arrival and node of the leaf to evict next; None if there is no leaf."""
        return self._entries[0] if self._entries else None


class EvictionLines:
    """A line for each tenant with a quota and one for all the others, so that a tenant can be spared or go first.

    Args:
        policy: orders all lines alike.
        tenants: those with a quota.

    Complexity: O(log leaves) to add and discard, O(lines) to find the first.
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
        """Put a leaf in its tenant's line, if it is not there already."""
        self._line(node).add(node)

    def discard(self, node: Node) -> None:
        """Take a leaf out of its line, if it is there."""
        self._line(node).discard(node)

    def first_of(self, tenant: str) -> Node | None:
        """The leaf of a tenant with a quota that goes first."""
        first = self._own[tenant].first()
        return None if first is None else first[2]

    def first(self, spared: Container[str]) -> Node | None:
        """The leaf that goes first of all but the spared tenants."""
        lines = [self._common, *(line for tenant, line in self._own.items() if tenant not in spared)]
        first = min((entry for line in lines if (entry := line.first()) is not None), default=None)
        return None if first is None else first[2]

    def _line(self, node: Node) -> EvictionIndex:
        return self._own.get(node.tree.namespace.tenant, self._common)
