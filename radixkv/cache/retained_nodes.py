"""Retained nodes: which nodes have a priority, when it ends, and how many blocks that keeps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from sortedcontainers import SortedList

from radixkv.api.retention import DEFAULT_PRIORITY
from radixkv.cache.node import Node, path_to
from radixkv.cache.tenants import TenantUsage

if TYPE_CHECKING:
    pass


class RetainedNodes:
    """Gives nodes a priority and takes it back in time.

    A node is retained while its priority is above the default. So is every node before it, which can't leave earlier:

        root ── [50] ── [90] ─┬─ [50]        retained: the first two, whatever priority the first has
                              └─ [20]

    Args:
        max_blocks: how many blocks may be retained.
        on_cut: told of the lower half of each node that is cut here.

    Attributes:
        num_blocks: how many are.
    """

    def __init__(self, max_blocks: int, on_cut: Callable[[Node], None]) -> None:
        self._on_cut = on_cut
        self.max_blocks = max_blocks
        self.num_blocks = 0
        self._expiries = SortedList()  # of (expires_s, serial, node); serials are distinct, so nodes are never compared
        self._serials = itertools.count()

    @property
    def num_expiring(self) -> int:
        """Nodes whose priority will end."""
        return len(self._expiries)

    def grant(self, node: Node, priority: int, expires_s: float | None, *, only_raise: bool = False) -> Node | None:
        """Give a node a priority; if not all of it may be retained, cut it and give it to its beginning.

        Args:
            node: which.
            priority: 0 to 100.
            expires_s: when it ends; None for never.
            only_raise: leave a node that has a higher priority, or as long the same.

        Returns:
            The node that has it, None if there is no room for any.

        Complexity: O(depth + log expiring nodes), and a cut.
        """
        if only_raise and _is_retained_longer(node, priority, expires_s):
            return node
        if priority > DEFAULT_PRIORITY and not is_retained(node):
            num_blocks = self._num_grantable(node.tree.usage) - _num_unretained_blocks(node.parent)
            if num_blocks <= 0:
                return None
            if num_blocks < node.num_blocks:
                node = self.cut(node, num_blocks)
        self.set(node, priority, expires_s)
        return node

    def _num_grantable(self, usage: TenantUsage) -> int:
        own = usage.quota.max_retained_blocks
        left = self.max_blocks - self.num_blocks
        return left if own is None else min(left, own - usage.num_retained_blocks)

    def cut_range(self, node: Node, start: int, end: int) -> list[Node]:
        """The nodes that hold the blocks `[start, end)` of a node's path, and no others; cut where that takes it.

        Complexity: O(depth), and two cuts.
        """
        nodes = []
        position = 0
        for part in path_to(node):
            first, position = position, position + part.num_blocks
            if first < end < position:
                part = self.cut(part, end - first)
            if first < start < position:
                self.cut(part, start - first)  # `part` is the lower half now
            if start < position and first < end:
                nodes.append(part)
        return nodes

    def cut(self, node: Node, num_blocks: int) -> Node:
        """Cut a node in two; see `RadixTree.cut`. Returns the upper one."""
        upper = node.tree.cut(node, num_blocks)
        self.split(node)
        self._on_cut(node)
        return upper

    def set(self, node: Node, priority: int, expires_s: float | None) -> None:
        """Give a node a priority, for ever without an end. Complexity: O(depth + log expiring nodes)."""
        was_retained = is_retained(node)
        node.priority = priority
        node.has_expired = False
        self._set_expiry(node, expires_s)
        self._recount(node, was_retained)

    def expire(self, now_s: float) -> Iterator[Node]:
        """Take the priorities back whose time has come; yields each node. Complexity: O(depth + log n) a node."""
        while self._expiries and self._expiries[0][0] <= now_s:
            node = self._expiries[0][2]
            was_kept = node.priority > DEFAULT_PRIORITY
            self.set(node, DEFAULT_PRIORITY, None)
            node.has_expired = was_kept
            yield node

    def split(self, lower: Node) -> None:
        """A node was cut in two: what one had both have."""
        upper = lower.parent
        assert upper is not None
        upper.priority = lower.priority
        upper.has_expired = lower.has_expired
        upper.num_retained_children = int(is_retained(lower))
        if lower.expiry_entry is not None:
            self._set_expiry(upper, lower.expiry_entry[0])

    def grown(self, leaf: Node, num_blocks: int) -> None:
        """A leaf has so many more blocks."""
        if is_retained(leaf):
            self._count(leaf, num_blocks)

    def cut_off(self, leaf: Node, num_blocks: int) -> None:
        """So many blocks are about to leave a leaf's end, perhaps all. Complexity: O(depth + log expiring nodes)."""
        if num_blocks == leaf.num_blocks:
            self.set(leaf, DEFAULT_PRIORITY, None)
        elif is_retained(leaf):
            self._count(leaf, -num_blocks)

    def purged(self, node: Node) -> None:
        """A node's whole tree goes. Complexity: O(log expiring nodes)."""
        if is_retained(node):
            self._count(node, -node.num_blocks)
        self._set_expiry(node, None)

    def _set_expiry(self, node: Node, expires_s: float | None) -> None:
        if node.expiry_entry is not None:
            self._expiries.remove(node.expiry_entry)
        node.expiry_entry = None if expires_s is None else (expires_s, next(self._serials), node)
        if node.expiry_entry is not None:
            self._expiries.add(node.expiry_entry)

    def _recount(self, node: Node, was_retained: bool) -> None:
        """Tell the nodes before this one, as far up as it makes a difference to them."""
        sign = -1 if was_retained else 1
        while node.parent is not None and is_retained(node) is not was_retained:
            self._count(node, sign * node.num_blocks)
            node = node.parent
            was_retained = is_retained(node)
            node.num_retained_children += sign

    def _count(self, node: Node, num_blocks: int) -> None:
        self.num_blocks += num_blocks
        node.tree.usage.num_retained_blocks += num_blocks


def _num_unretained_blocks(node: Node | None) -> int:
    """Blocks from a node back to the first that is retained. Complexity: O(depth)."""
    num_blocks = 0
    while node is not None and not is_retained(node):
        num_blocks += node.num_blocks
        node = node.parent
    return num_blocks


def is_retained(node: Node) -> bool:
    """Whether a node's blocks count as retained."""
    return node.priority > DEFAULT_PRIORITY or node.num_retained_children > 0


def _is_retained_longer(node: Node, priority: int, expires_s: float | None) -> bool:
    """Whether a node has a higher priority, or the same at least until then."""
    if node.priority != priority:
        return node.priority > priority
    return node.expiry_entry is None or (expires_s is not None and node.expiry_entry[0] >= expires_s)
