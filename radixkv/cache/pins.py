"""Pins of the nodes that leases use. A pinned node is not evicted."""

from __future__ import annotations

import numpy as np

from radixkv.cache.holdings import Holdings
from radixkv.cache.node import Node


class Pins:
    """Counts the leases that use each node, and takes used leaves out of the eviction lines.

        pinned ── unpin, by the last lease ──▶ unused; a leaf is in line ── evict ──▶ gone
               ◀───────────── pin ────────────

    Attributes:
        num_pinned_blocks: published blocks that a lease keeps from eviction.
    """

    def __init__(self, holdings: Holdings) -> None:
        self.num_pinned_blocks = 0
        self._pool = holdings.pool
        self._lines = holdings.lines
        self._clock = holdings.clock

    def pin(self, node: Node | None) -> None:
        """Keep a path from eviction. Complexity: O(depth + log leaves)."""
        now = self._clock()
        if node is not None:
            self._lines.discard(node)
        while node is not None and node.parent is not None:
            if node.pin_count == 0:
                self.count(node, node.num_blocks)
            node.pin_count += 1
            node.last_used_s = now
            node = node.parent

    def unpin(self, node: Node | None) -> None:
        """Undo one `pin` of the same node. Complexity: O(depth + log leaves)."""
        now = self._clock()
        leaf = node
        while node is not None and node.parent is not None:
            node.pin_count -= 1
            if node.pin_count == 0:
                self.count(node, -node.num_blocks)
                if node.retired_block_ids:
                    self._free_retired(node)
            node.last_used_s = now
            node = node.parent
        if leaf is not None and leaf.is_evictable:
            self._lines.add(leaf)

    def count(self, node: Node, num_blocks: int) -> None:
        """Note that `num_blocks` more blocks of a node are pinned, or fewer if it is negative."""
        self.num_pinned_blocks += num_blocks
        node.owner.usage.num_pinned_blocks += num_blocks

    def _free_retired(self, node: Node) -> None:
        block_ids = np.frombuffer(node.retired_block_ids, dtype=np.int32)
        self._pool.release(block_ids)
        node.owner.usage.num_leased_blocks -= block_ids.size
        node.retired_block_ids = b""
