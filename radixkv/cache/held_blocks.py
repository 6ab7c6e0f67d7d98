"""The blocks of held leases, which outlive their requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from radixkv.blocks import BlockIds
from radixkv.cache.changes import Listener
from radixkv.cache.namespace_trees import NamespaceTrees
from radixkv.cache.node import Node
from radixkv.cache.tenants import Tenants, TenantUsage
from radixkv.errors import Cause, OutOfBlocks, QuotaExceeded
from radixkv.tokens import TOKEN_BYTES


class PathOwner(Protocol):
    """The part of a lease that this module needs."""

    node: Node | None
    usage: TenantUsage
    block_ids: BlockIds
    num_published_blocks: int


class HeldPath(NamedTuple):
    """The blocks of a prompt that a held lease would keep.

    Attributes:
        node: the end of the cached path; None if nothing is cached.
        num_shared_blocks: whole blocks of the prompt that are cached.
        num_blocks: all blocks of the prompt.
    """

    node: Node | None
    num_shared_blocks: int
    num_blocks: int

    @classmethod
    def of(cls, lease: PathOwner) -> HeldPath:
        """Return the path of an open lease."""
        return cls(lease.node, lease.num_published_blocks, lease.block_ids.size)


class HeldBlocks(Listener):
    """Counts the blocks that held leases keep, and bounds them in total and per tenant. Shared blocks count once.

        root ── [held] ─┬─ [held] ◀─ held lease            a node is held if a held lease ends at or below it,
                        └─ [    ] ◀─ lease of a request     whether or not other leases pin it

    Args:
        max_blocks: blocks that may be held. A tenant without a bound in its quota may hold half of them.
        tenants: their quotas and counts.
        trees: the trees of the cache.

    Attributes:
        max_blocks: the argument.
        num_blocks: blocks that are held, including those that are in no tree.
    """

    def __init__(self, max_blocks: int, tenants: Tenants, trees: NamespaceTrees) -> None:
        self.max_blocks = max_blocks
        self._tenants = tenants
        self._trees = trees
        self.num_blocks = 0
        self._leases: dict[Node, set[PathOwner]] = {}  # by the node in which they end
        self._purged: dict[Node, int] = {}  # blocks of held nodes whose tree was purged

    def num_blocks_to_add(self, paths: Iterable[HeldPath]) -> int:
        """Count the additional blocks that would be held if the leases of all these paths were held.

        A block on several paths counts once.

        Complexity: O(nodes of all paths together that are not held yet).
        """
        num_more_blocks = 0
        num_blocks_of: dict[Node, int] = {}
        for node, num_shared_blocks, num_blocks in paths:
            num_more_blocks += num_blocks - num_shared_blocks
            while node is not None and node.parent is not None and node.held_ref_count == 0:
                num_blocks_before = node.start_bytes // (node.owner.block_size * TOKEN_BYTES)
                num_blocks_here = max(0, min(node.num_blocks, num_shared_blocks - num_blocks_before))
                if num_blocks_of.get(node, -1) >= num_blocks_here:
                    break  # its ancestors were counted together with it
                num_blocks_of[node] = num_blocks_here
                node = node.parent
        return num_more_blocks + sum(num_blocks_of.values())

    def require_room(self, tenant: str | None, num_more_blocks: int) -> None:
        """Raise if `num_more_blocks` may not be held in addition.

        Args:
            tenant: the tenant whose bound is checked; None for the bound of all tenants together.
            num_more_blocks: blocks to be held in addition.

        Raises:
            QuotaExceeded, OutOfBlocks: the tenant, or all tenants together, would hold too many.
        """
        if tenant is None:
            if self.num_blocks + num_more_blocks > self.max_blocks:
                raise OutOfBlocks(  # without the blocks that other tenants hold
                    f"hold_lease: expected at most {self.max_blocks} blocks in held leases of all tenants, got more "
                    f"with the {num_more_blocks} of this one",
                    cause=Cause.HOLD_LEASE,
                )
            return
        usage = self._tenants[tenant]
        tenant_max_blocks = usage.quota.max_held_blocks
        max_blocks = self.max_blocks // 2 if tenant_max_blocks is None else tenant_max_blocks
        if usage.num_held_blocks + num_more_blocks > max_blocks:
            raise QuotaExceeded(
                f"hold_lease: expected at most {max_blocks} blocks in held leases of this tenant, got "
                f"{usage.num_held_blocks} and {num_more_blocks} more",
                cause=Cause.HOLD_LEASE,
            )

    def hold(self, lease: PathOwner) -> None:
        """Count the blocks of a lease that becomes held. Complexity: O(nodes of its path that are not held yet)."""
        node, num_blocks = lease.node, 0
        if node is not None:
            self._leases.setdefault(node, set()).add(lease)
        while node is not None and node.parent is not None:
            node.held_ref_count += 1
            if node.held_ref_count > 1:
                break
            num_blocks += node.num_blocks
            node = node.parent
        self._count(lease.usage, num_blocks + lease.block_ids.size)

    def release(self, lease: PathOwner) -> None:
        """Undo `hold`. Complexity: O(nodes of its path that are no longer held)."""
        node, num_blocks = lease.node, 0
        if node is not None:
            self._leases[node].remove(lease)
            if not self._leases[node]:
                del self._leases[node]
        while node is not None and node.parent is not None:
            node.held_ref_count -= 1
            if node.held_ref_count:
                break
            num_blocks += self._purged.pop(node, node.num_blocks)
            node = node.parent
        self._count(lease.usage, -num_blocks - lease.block_ids.size)

    def end_after(self, leaf: Node, num_blocks: int) -> None:
        """Split a held leaf that has grown, so that only its first `num_blocks` are held.

        Held leases then end in the upper half, and all others in the lower half.

        Args:
            leaf: a leaf in which a held lease ends.
            num_blocks: its blocks before it grew.
        """
        upper = self._trees.cut(leaf, num_blocks)
        leases = self._leases.pop(leaf)
        for lease in leases:
            lease.node = upper
        self._leases[upper] = leases
        upper.held_ref_count, leaf.held_ref_count = len(leases), 0
        leaf.ref_count -= len(leases)
        upper.ref_count = len(leases) + int(leaf.ref_count > 0)
        upper.retired_block_ids, leaf.retired_block_ids = leaf.retired_block_ids, b""

    def purged(self, node: Node) -> None:
        """Remember how many blocks a held node had."""
        if node.held_ref_count:
            self._purged[node] = node.num_blocks

    def num_purged_blocks(self, node: Node) -> int:
        """Count the blocks of a held node whose tree was purged."""
        return self._purged.get(node, 0)

    def _count(self, usage: TenantUsage, num_blocks: int) -> None:
        usage.num_held_blocks += num_blocks
        self.num_blocks += num_blocks
