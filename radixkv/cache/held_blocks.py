"""The blocks that leases keep after their requests have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from radixkv.cache.changes import Listener
from radixkv.cache.lease import Lease
from radixkv.cache.node import Node
from radixkv.cache.tenants import Tenants, TenantUsage
from radixkv.errors import CapacityError, Cause, OutOfBlocks, QuotaExceeded
from radixkv.tokens import TOKEN_BYTES


class Path(NamedTuple):
    """The blocks of a prompt that might be kept.

    Attributes:
        node: the end of the path that it shares; None if it shares nothing.
        num_shared_blocks: whole blocks of that path that it uses.
        num_blocks: all its blocks.
    """

    node: Node | None
    num_shared_blocks: int
    num_blocks: int

    @classmethod
    def of(cls, lease: Lease) -> Path:
        """Return that of an open lease."""
        return cls(lease.node, lease.num_published_blocks, lease.block_ids.size)


class HeldBlocks(Listener):
    """Counts what kept leases keep from eviction, each block once, and bounds it in all and for each tenant.

        root ── [kept] ─┬─ [kept] ◀─ kept lease       a node is kept if a kept lease ends at or below it,
                        └─ [   ] ◀─ lease of a request     whatever else holds it

    Args:
        max_blocks: blocks that may be kept. A tenant whose quota names no bound may keep half of them.
        tenants: their quotas and counts.
        cut: cuts a node after its first blocks, tells the listeners, and returns the upper half.

    Attributes:
        max_blocks: the same.
        num_blocks: blocks that are kept, those that no tree has included.
    """

    def __init__(self, max_blocks: int, tenants: Tenants, cut: Callable[[Node, int], Node]) -> None:
        self.max_blocks = max_blocks
        self._tenants = tenants
        self._cut = cut
        self.num_blocks = 0
        self._leases: dict[Node, set[Lease]] = {}  # by the node that they end in
        self._purged: dict[Node, int] = {}  # blocks of kept nodes whose tree is gone

    def num_more(self, paths: Iterable[Path]) -> int:
        """Count the blocks that would be kept beyond those that are, if all these were. Shared ones count once.

        Complexity: O(nodes of all paths together that are not kept yet).
        """
        num_more_blocks = 0
        used: dict[Node, int] = {}  # blocks of each node
        for node, num_shared_blocks, num_blocks in paths:
            num_more_blocks += num_blocks - num_shared_blocks
            while node is not None and node.parent is not None and node.num_keeps == 0:
                first = node.start_bytes // (node.owner.block_size * TOKEN_BYTES)
                part = max(0, min(node.num_blocks, num_shared_blocks - first))
                if used.get(node, -1) >= part:
                    break  # those before it were counted with it
                used[node] = part
                node = node.parent
        return num_more_blocks + sum(used.values())

    def require_room(self, tenant: str | None, num_more_blocks: int) -> None:
        """Refuse to keep `num_more_blocks` beyond those that are kept.

        Args:
            tenant: whose bound it is; None for that of all tenants together.
            num_more_blocks: how many more would be kept.

        Raises:
            QuotaExceeded, OutOfBlocks: too many would be kept, of the tenant's or of all.
        """
        kind: type[CapacityError] = QuotaExceeded
        if tenant is None:
            whose, num_blocks, max_blocks, kind = "all tenants", self.num_blocks, self.max_blocks, OutOfBlocks
        else:
            usage = self._tenants[tenant]
            own = usage.quota.max_kept_blocks
            whose, num_blocks = "this tenant", usage.num_kept_blocks
            max_blocks = self.max_blocks // 2 if own is None else own
        if num_blocks + num_more_blocks > max_blocks:
            raise kind(
                f"hold_lease: expected at most {max_blocks} blocks in held leases of {whose}, got {num_blocks} and "
                f"{num_more_blocks} more",
                cause=Cause.HOLD_LEASE,
            )

    def keep(self, lease: Lease) -> None:
        """Count a lease that is kept from now on. Complexity: O(nodes of its path that are not kept yet)."""
        node, num_blocks = lease.node, 0
        if node is not None:
            self._leases.setdefault(node, set()).add(lease)
        while node is not None and node.parent is not None:
            node.num_keeps += 1
            if node.num_keeps > 1:
                break
            num_blocks += node.num_blocks
            node = node.parent
        self._count(lease.usage, num_blocks + lease.block_ids.size)

    def release(self, lease: Lease) -> None:
        """Undo `keep`. Complexity: O(nodes of its path that are not kept any more)."""
        node, num_blocks = lease.node, 0
        if node is not None:
            self._leases[node].remove(lease)
            if not self._leases[node]:
                del self._leases[node]
        while node is not None and node.parent is not None:
            node.num_keeps -= 1
            if node.num_keeps:
                break
            num_blocks += self._purged.pop(node, node.num_blocks)
            node = node.parent
        self._count(lease.usage, -num_blocks - lease.block_ids.size)

    def end_after(self, leaf: Node, num_blocks: int) -> None:
        """Cut a kept leaf that has grown, so that only its first `num_blocks` are kept.

        The leases that are kept there end in the upper half then. What else holds the leaf holds the lower half.

        Args:
            leaf: a leaf that a kept lease ends in.
            num_blocks: its blocks before it grew.
        """
        upper = self._cut(leaf, num_blocks)
        leases = self._leases.pop(leaf)
        for lease in leases:
            lease.node = upper
        self._leases[upper] = leases
        upper.num_keeps, leaf.num_keeps = len(leases), 0
        leaf.num_holds -= len(leases)
        upper.num_holds = len(leases) + int(leaf.num_holds > 0)
        upper.retired_block_ids, leaf.retired_block_ids = leaf.retired_block_ids, b""

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
