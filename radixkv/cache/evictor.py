"""Takes blocks back from leaves that no lease uses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from radixkv.api.miss_reason import MissReason
from radixkv.blocks import BLOCK_ID_BYTES
from radixkv.cache.holdings import Holdings
from radixkv.cache.pins import Pins
from radixkv.cache.tenants import TenantUsage
from radixkv.cache.tree.node import Node
from radixkv.cache.tree.radix_tree import RadixTree
from radixkv.errors import CapacityError, OutOfBlocks, QuotaExceeded


class Evictor:
    """Evicts from the front of the eviction lines, and purges whole trees.

        leaf in line ── evict ──▶ shorter, or gone; its parent may be a leaf in line now

    Attributes:
        num_evicted_blocks: all blocks evicted so far. Purged ones are not counted.
    """

    def __init__(self, holdings: Holdings, pins: Pins) -> None:
        self.num_evicted_blocks = 0
        self._trees = holdings.trees
        self._pool = holdings.pool
        self._tenants = holdings.tenants
        self._policy = holdings.policy
        self._lines = holdings.lines
        self._retained = holdings.retained
        self._changes = holdings.changes
        self._clock = holdings.clock
        self._pins = pins

    @property
    def num_evictable_blocks(self) -> int:
        """Published blocks that no lease keeps from eviction."""
        return self._pool.num_published - self._pins.num_pinned_blocks

    def num_takeable_blocks(self, tenant: str, usage: TenantUsage, num_spared_blocks: int = 0) -> int:
        """Count the blocks that a tenant could take if everything that may be evicted for it were evicted.

        Args:
            tenant: the tenant's name.
            usage: the tenant's counters.
            num_spared_blocks: blocks that must be free or evictable afterwards.

        Complexity: O(tenants with a quota).
        """
        num_available = self._pool.num_free + self.num_evictable_blocks
        takeable = num_available - num_spared_blocks
        if self._tenants.with_quota:
            takeable = min(takeable, num_available - self._tenants.num_blocks_kept_from(tenant))
        if (to_ceiling := usage.num_blocks_to_ceiling) is not None:
            takeable = min(takeable, to_ceiling)
        return takeable

    def shortage(
        self, num_missing_blocks: int, tenant: str, usage: TenantUsage, num_spared_blocks: int = 0
    ) -> CapacityError:
        """Make the error of a tenant that can't have `num_missing_blocks` blocks more."""
        to_ceiling = usage.num_blocks_to_ceiling
        num_kept_blocks = self._tenants.num_blocks_kept_from(tenant)
        to_others = max(num_kept_blocks, num_spared_blocks)
        if to_ceiling is not None and to_ceiling < self._pool.num_free + self.num_evictable_blocks - to_others:
            return QuotaExceeded(
                f"blocks: expected {num_missing_blocks} more, got a ceiling of {usage.quota.ceiling_blocks} for this "
                f"tenant, of which leases hold {usage.num_leased_blocks + usage.num_pinned_blocks}"
            )
        return OutOfBlocks(
            f"blocks: expected {num_missing_blocks} more, got {self._pool.num_free} free and "
            f"{self.num_evictable_blocks} evictable of {self._pool.num_blocks}, the reused ones among them"
            + (f", and {num_kept_blocks} that other tenants' floors keep" if num_kept_blocks else "")
        )

    def make_room(self, num_blocks: int, tenant: str, usage: TenantUsage) -> None:
        """Evict until a tenant can take `num_blocks`: first its own leaves, as far as it would pass its ceiling."""
        ceiling = usage.quota.ceiling_blocks
        if ceiling is not None:
            self.expire()
            over = usage.num_cached_blocks + usage.num_leased_blocks + num_blocks - ceiling
            self._evict(over, lambda: self._lines.first_of(tenant), tenant)
        self.evict(num_blocks - self._pool.num_free, tenant)

    def evict(self, num_blocks: int, tenant: str | None) -> int:
        """Free up to `num_blocks` blocks for a tenant, as `PrefixCache.evict` describes. Returns the blocks freed."""
        self.expire()
        return self._evict(num_blocks, lambda: self._lines.first(spared=self._spared(tenant)), tenant)

    def expire(self) -> None:
        """End the priorities whose time has come. Complexity: O(depth + log leaves) for each of their nodes."""
        for node in self._retained.expire(self._clock()):
            self._lines.requeue(node)

    def _spared(self, tenant: str | None) -> set[str]:
        """Other tenants whose floors protect all that they have."""
        quotas = self._tenants.with_quota.items()
        return {other for other, usage in quotas if other != tenant and usage.num_blocks_for_others == 0}

    def _evict(self, num_blocks: int, next_leaf: Callable[[], Node | None], tenant: str | None) -> int:
        freed = 0
        runs: list[bytes] = []
        while freed < num_blocks and (leaf := next_leaf()) is not None:
            usage = leaf.owner.usage
            wanted = num_blocks - freed
            if leaf.owner.namespace.tenant != tenant:
                wanted = min(wanted, usage.num_blocks_for_others)
            runs.append(self._evict_from(leaf, wanted))
            num_evicted = len(runs[-1]) // BLOCK_ID_BYTES
            usage.num_cached_blocks -= num_evicted
            usage.num_evicted_blocks += num_evicted
            freed += num_evicted
        if runs:  # all at once: a call costs as much as removing two leaves
            block_ids = np.frombuffer(b"".join(runs), dtype=np.int32)
            self._pool.unpublish(block_ids)
            self._pool.release(block_ids)
        self.num_evicted_blocks += freed
        return freed

    def _evict_from(self, leaf: Node, num_blocks: int) -> bytes:
        """Take at most `num_blocks` blocks off a leaf's end. Returns their packed ids, which are still published."""
        tree = self._trees[leaf.owner.namespace]
        num_offered_blocks = self._policy.num_offered_blocks(leaf)
        num_blocks = min(num_blocks, num_offered_blocks)
        num_kept_blocks = leaf.num_blocks - num_blocks
        fingerprint = tree.fingerprint_after(leaf, num_kept_blocks) if num_kept_blocks else leaf.fingerprint
        reason = MissReason.EXPIRED if leaf.has_expired else MissReason.EVICTED
        self._changes.evicted(leaf, num_blocks, fingerprint, reason, self._clock())
        if num_kept_blocks == 0:
            self._remove(tree, leaf)
            return leaf.block_ids
        packed = tree.truncate(leaf, num_kept_blocks)
        if num_blocks == num_offered_blocks:
            self._lines.requeue(leaf)
        return packed

    def _remove(self, tree: RadixTree, leaf: Node) -> None:
        self._lines.discard(leaf)
        parent = leaf.parent
        tree.remove(leaf)
        assert parent is not None
        if parent.is_evictable:
            self._lines.add(parent)
        elif parent is tree.root and parent.is_leaf:
            del self._trees[tree.owner.namespace]

    def purge(self, tree: RadixTree) -> tuple[int, int]:
        """Take a whole tree out. The blocks that leases use become free when those leases are closed.

        Returns:
            Blocks freed now, and blocks that leases still use.

        Complexity: O(nodes * log leaves).
        """
        del self._trees[tree.owner.namespace]
        free, used = [], []
        for node in list(tree.nodes()):
            self._lines.discard(node)
            self._changes.purged(node)
            if node.num_holds:
                self._pins.count(node, -node.num_blocks)
                node.retired_block_ids += node.block_ids
                used.append(node.block_ids)
            else:
                free.append(node.block_ids)
            node.block_ids = b""
            node.children = None  # parents and children hold each other; without this only a collection frees them
        freed, kept = (np.frombuffer(b"".join(packed), dtype=np.int32) for packed in (free, used))
        self._pool.unpublish(np.concatenate((freed, kept)))
        self._pool.release(freed)
        tree.root.children = None
        usage = tree.owner.usage
        usage.num_cached_blocks -= freed.size + kept.size
        usage.num_leased_blocks += kept.size
        return freed.size, kept.size
