"""The leaves that may be evicted: a line for each tenant that may be spared or go first, and one for all others."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator

from radixkv.cache.eviction_policy import EvictionPolicy
from radixkv.cache.lines.eviction_index import EvictionIndex
from radixkv.cache.lines.line_heap import LineHeap
from radixkv.cache.node import Node
from radixkv.cache.tenants import Tenants


class EvictionLines:
    """One line for each tenant with a quota and one for all other tenants, so that a tenant can be spared or go first.

    Args:
        policy: orders all lines alike.
        tenants: their quotas. If other tenants have a ceiling, each of them has a line of its own as well.
        arrivals: distinct numbers, in rising order; by default its own.

    Complexity: O(log leaves + log tenants) to add, discard and requeue; O(tenants with a quota) to find the first leaf.
    """

    def __init__(self, policy: EvictionPolicy, tenants: Tenants, arrivals: Iterator[int] | None = None) -> None:
        arrivals = itertools.count() if arrivals is None else arrivals
        self._own = {tenant: EvictionIndex(policy, arrivals) for tenant in tenants.with_quota}
        self._others: EvictionIndex | LineHeap = EvictionIndex(policy, arrivals)
        if tenants.default_quota.ceiling_blocks is not None:
            self._others = LineHeap(policy, arrivals)

    def __len__(self) -> int:
        return len(self._others) + sum(map(len, self._own.values()))

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
            self.discard(node)
            self.add(node)

    def first_of(self, tenant: str) -> Node | None:
        """Return the leaf that goes first of one tenant with a line of its own; None if it has none."""
        if tenant in self._own:
            first = self._own[tenant].first()
        else:
            assert isinstance(self._others, LineHeap), "only a tenant with a ceiling goes first"
            first = self._others.first_of(tenant)
        return None if first is None else first[-1]

    def first(self, spared: Collection[str]) -> Node | None:
        """Return the leaf that goes first of all tenants but the spared ones; None if there is none."""
        lines = [self._others, *(line for tenant, line in self._own.items() if tenant not in spared)]
        first = min((entry for line in lines if (entry := line.first()) is not None), default=None)
        return None if first is None else first[-1]

    def _line(self, node: Node) -> EvictionIndex | LineHeap:
        return self._own.get(node.owner.namespace.tenant, self._others)
