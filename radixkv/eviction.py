"""Which leaf goes first: the policies and the sorted index they order."""

from __future__ import annotations

import itertools
from typing import Protocol

from sortedcontainers import SortedList

from radixkv.radix_tree import Node


class EvictionPolicy(Protocol):
    """A sort key for leaves that nobody uses: the smallest goes first."""

    def key(self, node: Node) -> object:
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

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._entries = SortedList()  # of (key, arrival, node); arrivals are distinct, so nodes are never compared
        self._arrivals = itertools.count()

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

    def first(self) -> Node:
        """The leaf to evict next.

        Raises:
            IndexError: there is none.
        """
        node: Node = self._entries[0][2]
        return node
