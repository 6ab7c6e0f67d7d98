"""The leaves that may be evicted: those on probation, and all others."""

from __future__ import annotations

import itertools
from collections.abc import Collection

from radixkv.api.miss_reason import MissReason
from radixkv.cache.changes import Listener
from radixkv.cache.eviction_policy import EvictionPolicy
from radixkv.cache.lines.eviction_lines import EvictionLines
from radixkv.cache.lines.probation import Probation
from radixkv.cache.node import Node
from radixkv.cache.tenants import Tenants


class ProbationLines(EvictionLines, Listener):
    """Eviction lines, and a second set of them, in which leaves on probation wait.

    While leaves on probation take more than their share, the first of them goes, unless another leaf has a lower
    priority. Otherwise the first of all goes. When a tenant at its ceiling needs room, its ceiling's share counts.

    Args:
        policy: orders all lines alike.
        tenants: their quotas.
        probation: knows which leaves are on probation. It is told of each change before the lines are.

    Complexity: that of `EvictionLines`.
    """

    def __init__(self, policy: EvictionPolicy, tenants: Tenants, probation: Probation) -> None:
        arrivals = itertools.count()
        super().__init__(policy, tenants, arrivals)
        self._on_probation = EvictionLines(policy, tenants, arrivals)
        self._probation = probation
        self._tenants = tenants

    def __len__(self) -> int:
        return super().__len__() + len(self._on_probation)

    def add(self, node: Node) -> None:
        """Put a leaf in its line, unless it is in one already."""
        if node.eviction_entry is None and self._probation.has(node):
            self._on_probation.add(node)
            self._count(node, node.num_blocks)
        else:
            super().add(node)

    def discard(self, node: Node) -> None:
        """Take a leaf out of its line, if it is there."""
        if node.num_probation_blocks:
            self._on_probation.discard(node)
            self._count(node, -node.num_probation_blocks)
        else:
            super().discard(node)

    def first_of(self, tenant: str) -> Node | None:
        """Return the leaf that goes first of one tenant with a line of its own; None if it has none."""
        usage = self._tenants[tenant]
        ceiling_blocks = usage.quota.ceiling_blocks or 0
        is_over = usage.num_probation_blocks > self._probation.share * ceiling_blocks
        return _first(self._on_probation.first_of(tenant), super().first_of(tenant), is_over)

    def first(self, spared: Collection[str]) -> Node | None:
        """Return the leaf that goes first of all tenants but the spared ones; None if there is none."""
        num_spared_blocks = sum(self._tenants[tenant].num_probation_blocks for tenant in spared)
        is_over = self._probation.num_blocks - num_spared_blocks > self._probation.max_blocks
        return _first(self._on_probation.first(spared), super().first(spared), is_over)

    def grown(self, leaf: Node, num_new_blocks: int, now_s: float) -> None:
        """Count what a waiting leaf has gained."""
        self._recount(leaf)

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        """Let the lower half go on waiting, perhaps in the other lines."""
        self.cut(lower)

    def cut(self, lower: Node) -> None:
        """Let the lower half go on waiting, perhaps in the other lines."""
        self._recount(lower)
        if (lower.num_probation_blocks > 0) is not self._probation.has(lower):
            self.requeue(lower)

    def joined(self, uppers: list[Node], lower: Node) -> None:
        """Count what a waiting leaf has gained."""
        self._recount(lower)

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        """Count what a waiting leaf loses. One that goes is discarded after this."""
        if leaf.num_probation_blocks:
            self._probation.num_evicted_blocks += num_blocks
            if num_blocks < leaf.num_blocks:
                self._count(leaf, -num_blocks)

    def _recount(self, leaf: Node) -> None:
        if leaf.num_probation_blocks:
            self._count(leaf, leaf.num_blocks - leaf.num_probation_blocks)

    def _count(self, leaf: Node, num_blocks: int) -> None:
        leaf.num_probation_blocks += num_blocks
        leaf.owner.usage.num_probation_blocks += num_blocks
        self._probation.num_blocks += num_blocks


def make_lines(
    policy: EvictionPolicy, tenants: Tenants, probation: Probation
) -> tuple[EvictionLines, tuple[Listener, ...]]:
    """Make the eviction lines of a cache. Returns them, and what has to listen to changes for them, in this order."""
    if not probation.is_on:
        return EvictionLines(policy, tenants), ()
    lines = ProbationLines(policy, tenants, probation)
    return lines, (probation, lines)


def _first(on_probation: Node | None, other: Node | None, is_over: bool) -> Node | None:
    if on_probation is None or other is None:
        return on_probation or other
    assert on_probation.eviction_entry is not None
    assert other.eviction_entry is not None
    if is_over and on_probation.priority <= other.priority:
        return on_probation
    return min(on_probation.eviction_entry, other.eviction_entry)[-1]
