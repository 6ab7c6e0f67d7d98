"""Who is in use and who may go: pins paths for leases, and takes blocks back from leaves that nobody uses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from radixkv.api.miss_reason import MissReason
from radixkv.blocks import BLOCK_ID_BYTES
from radixkv.cache.block_pool import BlockPool
from radixkv.cache.eviction_lines import EvictionLines
from radixkv.cache.lost_prefixes import LostPrefixes
from radixkv.cache.node import Node
from radixkv.cache.policies.policy import EvictionPolicy
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.retained_nodes import RetainedNodes
from radixkv.cache.tenants import Tenants, TenantUsage
from radixkv.namespace import Namespace


class Evictor:
    """Keeps every unused leaf in line, and evicts from the front.

        pinned ── unpin ──▶ unused leaf, in line ── evict ──▶ gone, its parent may be a leaf now
               ◀── pin ───

    Args:
        trees: by namespace; a tree that becomes empty is taken out.
        pool: where evicted blocks go.
        tenants: their bounds and counters.
        policy: orders the line.
        retained: nodes with a priority.
        lost: is told what went, and why.
        clock: seconds, never going back.

    Attributes:
        num_pinned_blocks: published blocks that a lease keeps from eviction.
        num_evicted_blocks: total.
        lines: the unused leaves in order.
    """

    def __init__(
        self,
        trees: dict[Namespace, RadixTree],
        pool: BlockPool,
        tenants: Tenants,
        policy: EvictionPolicy,
        retained: RetainedNodes,
        lost: LostPrefixes,
        clock: Callable[[], float],
    ) -> None:
        self.num_pinned_blocks = 0
        self.num_evicted_blocks = 0
        self.lines = EvictionLines(policy, tenants.with_quota)
        self._trees = trees
        self._pool = pool
        self._tenants = tenants
        self._policy = policy
        self._retained = retained
        self._lost = lost
        self._clock = clock

    @property
    def num_evictable_blocks(self) -> int:
        """Published blocks that no lease keeps from eviction."""
        return self._pool.num_published - self.num_pinned_blocks

    # -- in use ----------------------------------------------------------------------------------------------------

    def pin(self, node: Node | None) -> None:
        """Keep a path from eviction. Complexity: O(depth + log leaves)."""
        now = self._clock()
        if node is not None:
            self.lines.discard(node)
        while node is not None and node.parent is not None:
            if node.pin_count == 0:
                self.count_pinned(node, node.num_blocks)
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
                self.count_pinned(node, -node.num_blocks)
                if node.retired_block_ids:
                    self._free_retired(node)
            node.last_used_s = now
            node = node.parent
        if leaf is not None and is_evictable(leaf):
            self.lines.add(leaf)

    def count_pinned(self, node: Node, num_blocks: int) -> None:
        """Note that so many more of a node's blocks are pinned."""
        self.num_pinned_blocks += num_blocks
        node.tree.usage.num_pinned_blocks += num_blocks

    def forget_use(self, node: Node, last_used_s: float) -> None:
        """Make a node as old as it was before its last lease."""
        node.last_used_s = last_used_s
        self.requeue(node)

    def requeue(self, node: Node) -> None:
        """Give a node its place in line anew, if it has one. Complexity: O(log leaves)."""
        if node in self.lines:
            self.lines.discard(node)
            self.lines.add(node)

    def _free_retired(self, node: Node) -> None:
        block_ids = np.frombuffer(node.retired_block_ids, dtype=np.int32)
        self._pool.release(block_ids)
        node.tree.usage.num_leased_blocks -= block_ids.size
        node.retired_block_ids = b""

    # -- making room -----------------------------------------------------------------------------------------------

    def num_takeable_blocks(self, tenant: str, usage: TenantUsage, num_spared_blocks: int = 0) -> int:
        """Blocks that a tenant could have by evicting all that it may. Complexity: O(tenants with a quota).

        Args:
            tenant, usage: who.
            num_spared_blocks: so many must be free or evictable after that.
        """
        num_available = self._pool.num_free + self.num_evictable_blocks
        takeable = num_available - num_spared_blocks
        if self._tenants.with_quota:
            takeable = min(takeable, num_available - self._tenants.num_blocks_kept_from(tenant))
            if (to_ceiling := usage.num_blocks_to_ceiling) is not None:
                takeable = min(takeable, to_ceiling)
        return takeable

    def make_room(self, num_blocks: int, tenant: str, usage: TenantUsage) -> None:
        """Evict until a tenant can take `num_blocks`: first its own leaves above its ceiling, then what goes first."""
        ceiling = usage.quota.ceiling_blocks
        if ceiling is not None:
            self.expire()
            over = usage.num_cached_blocks + usage.num_leased_blocks + num_blocks - ceiling
            self._evict(over, lambda: self.lines.first_of(tenant), tenant)
        self.evict(num_blocks - self._pool.num_free, tenant)

    def evict(self, num_blocks: int, tenant: str | None) -> int:
        """Free blocks of unused leaves; see `PrefixCache.evict`."""
        self.expire()
        return self._evict(num_blocks, lambda: self.lines.first(spared=self._spared(tenant)), tenant)

    def expire(self) -> None:
        """Let priorities end whose time has come. Complexity: O(depth + log leaves) for each node."""
        for node in self._retained.expire(self._clock()):
            self.requeue(node)

    def _spared(self, tenant: str | None) -> set[str]:
        quotas = self._tenants.with_quota.items()
        return {other for other, usage in quotas if other != tenant and usage.num_blocks_for_others == 0}

    def _evict(self, num_blocks: int, next_leaf: Callable[[], Node | None], tenant: str | None) -> int:
        freed = 0
        runs: list[bytes] = []
        while freed < num_blocks and (leaf := next_leaf()) is not None:
            usage = leaf.tree.usage
            wanted = num_blocks - freed
            if leaf.tree.namespace.tenant != tenant:
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
        """Cut at most `num_blocks` blocks off a leaf's end. Returns their packed ids, still published."""
        num_offered_blocks = self._policy.num_offered_blocks(leaf)
        num_blocks = min(num_blocks, num_offered_blocks)
        self._policy.evicted(leaf, num_blocks, self._clock())
        reason = MissReason.EXPIRED if leaf.has_expired else MissReason.EVICTED
        self._retained.cut_off(leaf, num_blocks)
        if num_blocks == leaf.num_blocks:
            packed, fingerprint = leaf.block_ids, leaf.fingerprint
            self._remove(leaf)
        else:
            packed, fingerprint = leaf.tree.truncate(leaf, leaf.num_blocks - num_blocks)
            if num_blocks == num_offered_blocks:
                self.requeue(leaf)
        self._lost.remember(fingerprint, reason)
        return packed

    def _remove(self, leaf: Node) -> None:
        self.lines.discard(leaf)
        tree, parent = leaf.tree, leaf.parent
        tree.remove(leaf)
        assert parent is not None
        if is_evictable(parent):
            self.lines.add(parent)
        elif parent is tree.root and parent.is_leaf:
            del self._trees[tree.namespace]

    # -- forgetting at once ----------------------------------------------------------------------------------------

    def purge(self, tree: RadixTree) -> tuple[int, int]:
        """Take a whole tree out. What leases use is free when they are closed.

        Returns:
            Blocks freed now, and blocks that leases still use.

        Complexity: O(nodes * log leaves).
        """
        del self._trees[tree.namespace]
        free, used = [], []
        for node in tree.nodes():
            self.lines.discard(node)
            self._retained.purged(node)
            if node.pin_count:
                self.count_pinned(node, -node.num_blocks)
                node.retired_block_ids += node.block_ids
                used.append(node.block_ids)
            else:
                free.append(node.block_ids)
            node.block_ids = b""
        freed, kept = (np.frombuffer(b"".join(packed), dtype=np.int32) for packed in (free, used))
        self._pool.unpublish(np.concatenate((freed, kept)))
        self._pool.release(freed)
        tree.usage.num_cached_blocks -= freed.size + kept.size
        tree.usage.num_leased_blocks += kept.size
        return freed.size, kept.size


def is_evictable(node: Node) -> bool:
    """Whether a node is a leaf that no lease uses. The root holds no blocks, nor does a purged node."""
    return node.pin_count == 0 and node.is_leaf and node.num_blocks > 0
