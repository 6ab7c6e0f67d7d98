"""The blocks that leases keep after their requests have ended."""

from __future__ import annotations

from radixkv.cache.changes import Listener
from radixkv.cache.lease import Lease
from radixkv.cache.tenants import TenantUsage
from radixkv.cache.tree.node import Node
from radixkv.errors import QuotaExceeded
from radixkv.tokens import TOKEN_BYTES


class KeptBlocks(Listener):
    """Counts what kept leases keep from eviction, each block once, and bounds it in all and for each tenant.

        root ── [kept] ─┬─ [kept] ◀─ kept lease       a node is kept if a kept lease ends at or below it,
                        └─ [   ] ◀─ lease of a request     whatever else holds it

    Args:
        max_blocks: blocks that may be kept. A tenant whose quota names no bound may keep half of them.

    Attributes:
        max_blocks: the same.
        num_blocks: blocks that are kept, those that no tree has included.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.num_blocks = 0
        self._purged: dict[Node, int] = {}  # blocks of kept nodes whose tree is gone

    def num_more(self, lease: Lease) -> int:
        """Count the blocks that would be kept beyond those that are, if this lease were kept with all its tokens.

        Complexity: O(nodes of its path that are not kept yet).
        """
        node, num_kept = lease.node, 0
        while node is not None and node.parent is not None and node.num_keeps == 0:
            node = node.parent
        if node is not None and node.parent is not None:
            block_bytes = node.owner.block_size * TOKEN_BYTES
            num_kept = min(node.start_bytes // block_bytes + node.num_blocks, len(lease.tokens) // block_bytes)
        return max(0, lease.block_ids.size - num_kept)

    def require_room(self, usage: TenantUsage | None, num_more_blocks: int) -> None:
        """Refuse to keep `num_more_blocks` beyond those that are kept.

        Args:
            usage: whose bound it is; None for that of all tenants together.
            num_more_blocks: how many more would be kept.

        Raises:
            QuotaExceeded: too many would be kept.
        """
        if usage is None:
            whose, num_blocks, max_blocks = "all tenants", self.num_blocks, self.max_blocks
        else:
            own = usage.quota.max_kept_blocks
            whose, num_blocks = "this tenant", usage.num_kept_blocks
            max_blocks = self.max_blocks // 2 if own is None else own
        if num_blocks + num_more_blocks > max_blocks:
            raise QuotaExceeded(
                f"hold_lease: expected at most {max_blocks} blocks in held leases of {whose}, got {num_blocks} and "
                f"{num_more_blocks} more"
            )

    def keep(self, lease: Lease) -> None:
        """Count a lease that is kept from now on. Complexity: O(nodes of its path that are not kept yet)."""
        node, num_blocks = lease.node, 0
        while node is not None and node.parent is not None:
            node.num_keeps += 1
            if node.num_keeps > 1:
                break
            num_blocks += node.num_blocks
            node = node.parent
        self._count(lease.usage, num_blocks + lease.block_ids.size - lease.num_published_blocks)

    def release(self, lease: Lease) -> None:
        """Undo `keep`. Complexity: O(nodes of its path that are not kept any more)."""
        node, num_blocks = lease.node, 0
        while node is not None and node.parent is not None:
            node.num_keeps -= 1
            if node.num_keeps:
                break
            num_blocks += self._purged.pop(node, node.num_blocks)
            node = node.parent
        self._count(lease.usage, -num_blocks - (lease.block_ids.size - lease.num_published_blocks))

    def grown(self, leaf: Node, num_new_blocks: int, now_s: float) -> None:
        """Count the new blocks of a kept leaf."""
        if leaf.num_keeps:
            self._count(leaf.owner.usage, num_new_blocks)

    def purged(self, node: Node) -> None:
        """Remember how many blocks a kept node had."""
        if node.num_keeps:
            self._purged[node] = node.num_blocks

    def num_purged_blocks(self, node: Node) -> int:
        """Count the blocks of a kept node whose tree is gone."""
        return self._purged.get(node, 0)

    def _count(self, usage: TenantUsage, num_blocks: int) -> None:
        usage.num_kept_blocks += num_blocks
        self.num_blocks += num_blocks
