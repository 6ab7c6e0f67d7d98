"""Pins of the nodes that leases use. A pinned node is not evicted."""

from __future__ import annotations

import numpy as np

from radixkv.cache.cache_state import CacheState
from radixkv.cache.node import NUM_FOLLOWED_NODES, Node, path_to
from radixkv.tokens import TOKEN_BYTES


class Pins:
    """Counts what holds each node, and takes held leaves out of the eviction lines.

        held ── unpin, by the last lease ──▶ unused; a leaf is in line ── evict ──▶ gone
             ◀───────────── pin ────────────

    A lease holds the node in which its path ends, and a held node holds its parent. So the nodes before a held one
    need no count of their own for each lease:

        root ── [2] ─┬─ [1] ◀─ lease          a second lease on the upper leaf makes that 2, and nothing above changes
                     └─ [1] ◀─ lease

    Attributes:
        num_pinned_blocks: published blocks that a lease keeps from eviction.
    """

    def __init__(self, holdings: CacheState) -> None:
        self.num_pinned_blocks = 0
        self._trees = holdings.trees
        self._pool = holdings.pool
        self._policy = holdings.policy
        self._retained = holdings.retained
        self._block_size = holdings.block_size
        self._lines = holdings.lines
        self._changes = holdings.changes
        self._clock = holdings.clock

    def pin(self, node: Node) -> None:
        """Keep a path from eviction. Complexity: O(log leaves + nodes of the path that nothing held)."""
        self._lines.discard(node)
        now, first, num_blocks = self._clock(), node, 0
        while node.parent is not None:
            node.num_holds += 1
            if node.num_holds > 1:
                break
            num_blocks += node.num_blocks
            node.last_used_s = now
            node = node.parent
        self.count(first, num_blocks)
        _touch(node, now)

    def unpin(self, node: Node) -> Node:
        """Undo one `pin` of the same node.

        Returns:
            The deepest node of the path that is still held, or the root.

        Complexity: O(log leaves + nodes of the path that nothing holds any more).
        """
        now, first, num_blocks = self._clock(), node, 0
        while node.parent is not None:
            node.num_holds -= 1
            if node.num_holds:
                break
            num_blocks += node.num_blocks
            if node.retired_block_ids:
                self._free_retired(node)
            node.last_used_s = now
            node = node.parent
        self.count(first, -num_blocks)
        _touch(node, now)
        if first.is_evictable:
            self._lines.add(first)
        return node

    def unpin_and_join(self, node: Node, *, even_unlike: bool = False) -> None:
        """Undo one `pin`, and make one node of those that nothing holds any more, where nothing differs.

        So what was cut for a priority that ended, or for a branch that is gone, does not cost every later request.

        Args:
            node: the end of the path.
            even_unlike: also join what the policy tells apart.

        Complexity: that of `unpin`, and O(tokens of the nodes that are joined).
        """
        end = self.unpin(node)
        while node is not end:
            uppers: list[Node] = []
            above = node.parent
            while above is not None and above is not end and self._may_join(above, node, even_unlike):
                uppers.append(above)
                above = above.parent
            if uppers:
                uppers.reverse()
                self._trees[node.owner.namespace].join(uppers, node)
                self._changes.joined(uppers, node)
                self._lines.requeue(node)
            if above is None:
                return
            node = above

    def _may_join(self, upper: Node, lower: Node, even_unlike: bool) -> bool:
        return (
            upper.children is not None
            and len(upper.children) == 1
            and len(upper.block_ids) > 0  # otherwise it was purged
            and upper.priority == lower.priority
            and upper.has_expired is lower.has_expired
            and upper.expiry_entry is None
            and lower.expiry_entry is None
            and (even_unlike or self._policy.are_alike(upper, lower))
        )

    def num_unheld_blocks(self, node: Node | None, enough: int) -> int:
        """Count the blocks of a path that nothing holds yet; 0 if they are at most `enough` anyway.

        Complexity: O(1) if they are, otherwise O(nodes of the path that nothing holds).
        """
        if node is None:
            return 0
        num_blocks_before = node.start_bytes // (node.owner.block_size * TOKEN_BYTES)
        if num_blocks_before + node.num_blocks <= enough:
            return 0
        num_blocks = 0
        while node.parent is not None and node.num_holds == 0:
            num_blocks += node.num_blocks
            node = node.parent
        return num_blocks

    def narrowed(self, node: Node | None, cached_tokens: int, num_spare_blocks: int) -> tuple[Node | None, int, int]:
        """Pin less of a path whose own blocks the lease needs, and if need be reuse less of it.

        First the path is cut off after the reused blocks; then the block that is reused in part is given up. Whole
        reused blocks are never given up, because computing one again takes a block as well.

        Args:
            node: the deepest node that shares tokens.
            cached_tokens: tokens that could be reused.
            num_spare_blocks: blocks that the lease could take, less those that the suffix takes.

        Returns:
            The end of the path to pin, the tokens to reuse, and the number of blocks that are missing to keep the
            whole ones of these beside the suffix. If any are missing, nothing has changed.
        """
        num_pinned_blocks = sum(above.num_blocks for above in path_to(node) if above.num_holds)
        num_held_blocks = -(-cached_tokens // self._block_size)
        if num_spare_blocks < num_held_blocks - num_pinned_blocks:
            num_held_blocks = cached_tokens // self._block_size
            cached_tokens = num_held_blocks * self._block_size
        num_available_blocks = num_spare_blocks - max(0, num_held_blocks - num_pinned_blocks)
        if num_available_blocks < 0 or node is None or not cached_tokens:
            return None, 0, max(0, -num_available_blocks)
        return self._retained.cut_range(node, 0, num_held_blocks)[-1], cached_tokens, 0

    def count(self, node: Node, num_blocks: int) -> None:
        """Note that `num_blocks` more blocks of a node are pinned, or fewer if it is negative."""
        self.num_pinned_blocks += num_blocks
        node.owner.usage.num_pinned_blocks += num_blocks

    def _free_retired(self, node: Node) -> None:
        block_ids = np.frombuffer(node.retired_block_ids, dtype=np.int32)
        self._pool.release(block_ids)
        node.owner.usage.num_leased_blocks -= block_ids.size
        node.retired_block_ids = b""


def _touch(node: Node, now_s: float) -> None:
    """Note a use of the nodes from a held one up. Those far above learn of it when nothing holds them any more."""
    for _ in range(NUM_FOLLOWED_NODES):
        if node.parent is None:
            return
        node.last_used_s = now_s
        node = node.parent
