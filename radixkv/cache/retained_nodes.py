"""Retention: the priorities of nodes, when they expire, and how many blocks they retain."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from sortedcontainers import SortedList

from radixkv.api.miss_reason import MissReason
from radixkv.api.retention import DEFAULT_PRIORITY, Grant
from radixkv.cache.changes import Listener
from radixkv.cache.namespace_trees import NamespaceTrees
from radixkv.cache.node import Node, path_to
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.tenants import TenantUsage
from radixkv.tokens import TOKEN_BYTES

# Maximum number of priorities that one call of `expire` resets; the next calls reset the others. 40,000 at once would
# take 0.4 s.
_MAX_ENDED_AT_ONCE = 256


class RetainedNodes(Listener):
    """Gives nodes a priority, and resets it when it expires.

    A node is retained while its priority is above the default. Its ancestors are retained as well, because a node
    cannot be evicted before its descendants:

        root ── [50] ── [90] ─┬─ [50]        priorities; 50 is the default
                              └─ [20]        retained: the first two, whatever priority the first has

    Args:
        max_blocks: blocks that may be retained.
        trees: the trees of the cache.

    Attributes:
        max_blocks: the argument.
        num_blocks: blocks that are retained.
    """

    def __init__(self, max_blocks: int, trees: NamespaceTrees) -> None:
        self.max_blocks = max_blocks
        self.num_blocks = 0
        self._trees = trees
        self._expiries = SortedList()  # of (expires_s, serial, node); serials are distinct, so nodes are never compared
        self._serials = itertools.count()

    @property
    def num_expiring(self) -> int:
        """Number of nodes whose priority expires."""
        return len(self._expiries)

    def grant(
        self,
        node: Node,
        priority: int,
        expires_s: float | None,
        *,
        renew_s: float | None = None,
        only_raise: bool = False,
    ) -> Node | None:
        """Give a node a priority. If not all of it may be retained, split it and give the priority to its beginning.

        Args:
            node: the node.
            priority: 0 to 100.
            expires_s: when the priority expires; None for never.
            renew_s: see `Node.renew_s`.
            only_raise: do not change a node that has a higher priority, or the same priority for at least as long.

        Returns:
            The node that has the priority now (or a higher one, with `only_raise`); None if no more blocks may be
            retained.

        Complexity: O(depth + log expiring nodes), and a cut.
        """
        if only_raise and _is_retained_longer(node, priority, expires_s):
            return node
        if priority > DEFAULT_PRIORITY and not is_retained(node):
            num_blocks = self._num_grantable(node.owner.usage) - _num_unretained_blocks(node.parent)
            if num_blocks <= 0:
                return None
            if num_blocks < node.num_blocks:
                node = self._trees.cut(node, num_blocks)
        self.set(node, priority, expires_s, renew_s)
        return node

    def _num_grantable(self, usage: TenantUsage) -> int:
        tenant_max_blocks = usage.quota.max_retained_blocks
        num_left_blocks = self.max_blocks - self.num_blocks
        if tenant_max_blocks is None:
            return num_left_blocks
        return min(num_left_blocks, tenant_max_blocks - usage.num_retained_blocks)

    def grant_tokens(
        self,
        tree: RadixTree | None,
        tokens: bytes,
        start: int,
        end: int,
        priority: int,
        expires_s: float | None,
        only_raise: bool,
        renew_s: float | None = None,
    ) -> tuple[Grant, list[Node]]:
        """Give the cached tokens in `[start, end)` of a prompt a priority, as many from `start` on as may be retained.

        Nodes are split at the ends of the range, unless their path has more than 256 nodes: then only nodes that are in
        the range as a whole get the priority (see `NamespaceTrees.nodes_in_range`).

        Args:
            tree: where to look; None if the namespace has no tree.
            tokens: the prompt, little-endian uint32 bytes.
            start, end: the range, in tokens.
            priority, expires_s, only_raise, renew_s: as in `grant`.

        Returns:
            What was granted, and the nodes that have the priority now, in order.

        Complexity: `grant` for each node of the range, and two cuts.
        """
        node, num_bytes, *_ = (None, 0) if tree is None else tree.match(tokens[: end * TOKEN_BYTES])
        cached_upto = num_bytes // TOKEN_BYTES
        if node is None or tree is None or cached_upto <= start:
            return Grant(0, 0, end - start), []
        block_size = tree.owner.block_size
        first_block, end_block = start // block_size, -(-cached_upto // block_size)
        granted: list[Node] = []
        for each in self._trees.nodes_in_range(node, first_block, end_block):
            granted_node = self.grant(each, priority, expires_s, renew_s=renew_s, only_raise=only_raise)
            if granted_node is not None:
                granted.append(granted_node)
            if granted_node is not each:
                break
        num_blocks = first_block + sum(each.num_blocks for each in granted)
        granted_tokens = max(0, min(cached_upto, num_blocks * block_size) - start)
        expiry_times_s = [each.expiry_entry[0] for each in granted if each.expiry_entry is not None]
        refused_tokens = cached_upto - start - granted_tokens
        return Grant(granted_tokens, refused_tokens, end - cached_upto, min(expiry_times_s, default=None)), granted

    def reset_after(self, leaf: Node, num_blocks: int) -> None:
        """Give the blocks after the first `num_blocks` of a grown leaf the default priority, by splitting the leaf."""
        if leaf.num_blocks > num_blocks:
            if num_blocks:
                self._trees.cut(leaf, num_blocks)
            self.set(leaf, DEFAULT_PRIORITY, None)

    def set(self, node: Node, priority: int, expires_s: float | None, renew_s: float | None = None) -> None:
        """Give a node a priority until `expires_s`; None for no expiry. Complexity: O(depth + log expiring nodes)."""
        was_retained = is_retained(node)
        node.priority = priority
        node.renew_s = renew_s
        node.has_expired = False
        self._set_expiry(node, expires_s)
        self._recount(node, was_retained)

    def renew(self, node: Node, num_bytes: int, now_s: float) -> None:
        """Restart the time to live of the nodes that a lease has found completely, if they have a `renew_s`.

        Args:
            node: the end of the path.
            num_bytes: bytes of the path that the lease found.
            now_s: time on the cache's clock.

        Complexity: O(depth + log expiring nodes for each renewed node); O(1) if no priority expires.
        """
        if not self._expiries:
            return
        if node.start_bytes + len(node.tokens) > num_bytes and node.parent is not None:
            node = node.parent
        for each in path_to(node):
            if each.renew_s is not None:
                self._set_expiry(each, now_s + each.renew_s)

    def expire(self, now_s: float) -> Iterator[Node]:
        """Reset expired priorities, 256 at most, and yield their nodes.

        Complexity: O(depth + log expiring nodes) per node.
        """
        for _ in range(_MAX_ENDED_AT_ONCE):
            if not self._expiries or self._expiries[0][0] > now_s:
                return
            node = self._expiries[0][2]
            had_priority = node.priority > DEFAULT_PRIORITY
            self.set(node, DEFAULT_PRIORITY, None)
            node.has_expired = had_priority
            yield node

    def grown(self, leaf: Node, num_new_blocks: int, now_s: float) -> None:
        """Count the new blocks of a retained leaf."""
        if is_retained(leaf):
            self._count(leaf, num_new_blocks)

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        """Copy the priority of a node, which a request has split, to its new upper half."""
        self.cut(lower)

    def cut(self, lower: Node) -> None:
        """Copy the priority of a node, which the cache itself has split, to its new upper half."""
        upper = lower.parent
        assert upper is not None
        upper.priority = lower.priority
        upper.has_expired = lower.has_expired
        upper.renew_s = lower.renew_s
        upper.num_retained_children = int(is_retained(lower))
        if lower.expiry_entry is not None:
            self._set_expiry(upper, lower.expiry_entry[0])

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        """Subtract the evicted blocks of a leaf. Complexity: O(depth + log expiring nodes)."""
        if num_blocks == leaf.num_blocks:
            self.set(leaf, DEFAULT_PRIORITY, None)
        elif is_retained(leaf):
            self._count(leaf, -num_blocks)

    def purged(self, node: Node) -> None:
        """Forget a node. Complexity: O(log expiring nodes)."""
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
        """Update the count for a node whose state has changed, and for nodes above it whose state changes with it."""
        sign = -1 if was_retained else 1
        while node.parent is not None and is_retained(node) is not was_retained:
            self._count(node, sign * node.num_blocks)
            node = node.parent
            was_retained = is_retained(node)
            node.num_retained_children += sign

    def _count(self, node: Node, num_blocks: int) -> None:
        self.num_blocks += num_blocks
        node.owner.usage.num_retained_blocks += num_blocks


def _num_unretained_blocks(node: Node | None) -> int:
    """Count the blocks from a node back to the nearest retained one. Complexity: O(depth)."""
    num_blocks = 0
    while node is not None and node.parent is not None and not is_retained(node):
        num_blocks += node.num_blocks
        node = node.parent
    return num_blocks


def is_retained(node: Node) -> bool:
    """Whether a node's blocks count as retained."""
    return node.priority > DEFAULT_PRIORITY or node.num_retained_children > 0


def _is_retained_longer(node: Node, priority: int, expires_s: float | None) -> bool:
    """Whether a node has a higher priority, or the same one at least until `expires_s`."""
    if node.priority != priority:
        return node.priority > priority
    return node.expiry_entry is None or (expires_s is not None and node.expiry_entry[0] >= expires_s)
