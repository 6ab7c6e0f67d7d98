"""Frees blocks of leaves that no lease uses."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np

from radixkv.api.miss_reason import MissReason
from radixkv.api.retention import DEFAULT_PRIORITY
from radixkv.blocks import BLOCK_ID_BYTES
from radixkv.cache.block_pool import BlockPool
from radixkv.cache.changes import Changes
from radixkv.cache.evicted_prefixes import EvictedPrefixes
from radixkv.cache.eviction_policy import EvictionPolicy
from radixkv.cache.eviction_queue import EvictionQueue
from radixkv.cache.namespace_trees import NamespaceTrees
from radixkv.cache.node import Node
from radixkv.cache.pins import Pins
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.retained_nodes import RetainedNodes
from radixkv.cache.tenants import Tenants, TenantUsage
from radixkv.cache.windowed_layers import WindowedLayers, WindowLease
from radixkv.errors import CapacityError, OutOfBlocks, QuotaExceeded

# Branches of longer paths are evicted. Paths of real traffic have fewer than 20 nodes.
MAX_PATH_NODES = 512
_MAX_THINNED_AT_ONCE = 64
# Branches per node, and nodes per branch, that are examined to thin a path.
_MAX_EXAMINED = 8


class Evictor:
    """Evicts the first leaves of the eviction queue, and purges whole trees.

        leaf in the queue ── evict ──▶ shorter, or removed; then its parent may become a leaf in the queue

    Attributes:
        num_evicted_blocks: all blocks evicted so far. Purged ones are not counted.
    """

    def __init__(
        self,
        *,
        trees: NamespaceTrees,
        pool: BlockPool,
        tenants: Tenants,
        policy: EvictionPolicy,
        queue: EvictionQueue,
        retained: RetainedNodes,
        changes: Changes,
        evicted: EvictedPrefixes,
        pins: Pins,
        windows: WindowedLayers,
        clock: Callable[[], float],
    ) -> None:
        self.num_evicted_blocks = 0
        self._windows = windows
        self._trees = trees
        self._pool = pool
        self._tenants = tenants
        self._policy = policy
        self._queue = queue
        self._retained = retained
        self._changes = changes
        self._evicted = evicted
        self._pins = pins
        self._clock = clock

    @property
    def num_evictable_blocks(self) -> int:
        """Published blocks that no lease keeps from eviction."""
        return self._pool.num_published - self._pins.num_pinned_blocks

    @property
    def _num_available_blocks(self) -> int:
        """Blocks that are free, or would be if all leaves and parts that no lease uses were evicted."""
        num_blocks = self._pool.num_free + self.num_evictable_blocks
        if self._windows.shares_memory:
            num_blocks += self._windows.num_returnable_blocks
        return num_blocks

    def num_takeable_blocks(self, tenant: str, usage: TenantUsage, num_headroom_blocks: int = 0) -> int:
        """Count the blocks that a tenant could take if everything that may be evicted for it were evicted.

        Args:
            tenant: the tenant's name.
            usage: the tenant's counters.
            num_headroom_blocks: blocks that must be free or evictable afterwards.

        Complexity: O(tenants with a quota).
        """
        num_available_blocks = self._num_available_blocks
        num_takeable = num_available_blocks - num_headroom_blocks
        if self._tenants.with_quota:
            num_takeable = min(num_takeable, num_available_blocks - self._tenants.num_blocks_kept_from(tenant))
        if (num_to_ceiling := usage.num_blocks_to_ceiling) is not None:
            num_takeable = min(num_takeable, num_to_ceiling)
        return num_takeable

    def shortage_error(
        self, num_missing_blocks: int, tenant: str, usage: TenantUsage, num_headroom_blocks: int = 0
    ) -> CapacityError:
        """Return the error for a tenant for which `num_missing_blocks` blocks are missing.

        If other tenants have them, the message contains neither `num_missing_blocks` nor another count from which a
        tenant could tell how many blocks others use. Statistics and metrics have the counts for operators.
        """
        num_to_ceiling = usage.num_blocks_to_ceiling
        num_protected_blocks = self._tenants.num_blocks_kept_from(tenant)
        num_for_others = max(num_protected_blocks, num_headroom_blocks)
        if num_to_ceiling is not None and num_to_ceiling < self._num_available_blocks - num_for_others:
            return QuotaExceeded(
                f"blocks: expected {num_missing_blocks} more, got a ceiling of {usage.quota.ceiling_blocks} for this "
                f"tenant, of which leases hold {usage.num_leased_blocks + usage.num_pinned_blocks}"
            )
        return OutOfBlocks(
            f"blocks: expected enough of the pool's {self._pool.num_blocks} for this request, got too few; running "
            "requests, held leases, public prefixes and floors have the others"
        )

    def make_room(self, num_blocks: int, tenant: str, usage: TenantUsage, windows: Sequence[WindowLease] = ()) -> None:
        """Evict until a tenant can take `num_blocks`. Its own leaves are evicted first, down to its ceiling.

        Args:
            num_blocks: blocks that a lease takes.
            tenant, usage: the tenant of the lease, and its counters.
            windows: the window leases of the lease; room is made for the parts that they will reserve, too.
        """
        ceiling = usage.quota.ceiling_blocks
        if ceiling is not None:
            self.expire()
            num_excess_blocks = usage.num_cached_blocks + usage.num_leased_blocks + num_blocks - ceiling
            now_s = self._clock()
            self._evict(num_excess_blocks, lambda: self._queue.first_of(tenant, now_s), tenant)
        if self._windows.shares_memory:
            self._make_room_with_parts(num_blocks, windows, tenant)
        elif num_blocks > self._pool.num_free:
            self.evict(num_blocks - self._pool.num_free, tenant)

    def _make_room_with_parts(self, num_blocks: int, window_leases: Sequence[WindowLease], tenant: str) -> None:
        """Evict leaves and parts of windowed layers until `num_blocks` and the memory of the reserved parts are free.

        Room is also made for the parts of the new blocks, as long as passed parts do not exceed their share.
        """
        windows, pool = self._windows, self._pool
        self._queue.resize(pool.num_blocks - pool.num_withheld)
        while True:
            num_needed_blocks = num_blocks + windows.num_unreserved_blocks(window_leases)
            num_missing_blocks = num_needed_blocks - pool.num_free
            num_lacking_blocks = windows.num_lacking_blocks(num_blocks, pool.num_free - num_needed_blocks)
            if num_missing_blocks <= 0 and num_lacking_blocks <= 0:
                return
            if windows.has_excess and windows.evict_part(only_excess=True):
                continue
            num_to_evict = windows.num_blocks_to_evict(max(num_missing_blocks, num_lacking_blocks))
            if self.evict(num_to_evict, tenant, with_dead_ends=True):
                continue
            if num_missing_blocks <= 0 or not windows.evict_part(only_excess=False):
                return

    def evict(self, num_blocks: int, tenant: str | None, *, with_dead_ends: bool = False) -> int:
        """Free up to `num_blocks` blocks for a tenant, as `PrefixCache.evict` describes. Returns the blocks freed.

        With `with_dead_ends`, further blocks before these are freed if no prompt could continue after them.
        """
        self.expire()
        now_s = self._clock()
        return self._evict(
            num_blocks,
            lambda: self._queue.first(self._protected_tenants(tenant), now_s),
            tenant,
            with_dead_ends=with_dead_ends,
        )

    def thin(self, end: Node, num_nodes: int) -> bool:
        """Evict leaves of the branches of a path with too many nodes, the least recently used first, 64 at most.

        Nodes of the path without other branches can then be joined, so a prompt from which thousands of others diverged
        stays fast to match. Leaves that leases use, or that have a priority above the default, are not evicted.

        Args:
            end: the end of the path, which is pinned.
            num_nodes: nodes that a request visited on it.

        Returns:
            Whether the path had too many nodes.

        Complexity: O(1), or O(nodes of the path + 64 log leaves) if the path had too many nodes.
        """
        if num_nodes <= MAX_PATH_NODES:
            return False
        leaves = heapq.nsmallest(_MAX_THINNED_AT_ONCE, _leaves_off_path(end), key=lambda leaf: leaf.last_used_s)
        self._free([self._take(leaf, leaf.num_blocks, by_self=True) for leaf in leaves])
        return True

    def expire(self) -> None:
        """Reset expired priorities, 256 at most. Complexity: O(depth + log leaves) for each of their nodes."""
        for node in self._retained.expire(self._clock()):
            self._queue.requeue(node)

    def _protected_tenants(self, tenant: str | None) -> set[str]:
        """Return the other tenants of which no block may be evicted now."""
        quotas = self._tenants.with_quota.items()
        return {other for other, usage in quotas if other != tenant and usage.num_blocks_for_others == 0}

    def _evict(
        self,
        num_blocks: int,
        next_leaf: Callable[[], Node | None],
        tenant: str | None,
        *,
        with_dead_ends: bool = False,
    ) -> int:
        num_freed = 0
        taken: list[bytes] = []  # packed block ids
        while num_freed < num_blocks and (leaf := next_leaf()) is not None:
            usage = leaf.owner.usage
            num_needed = num_blocks - num_freed
            if leaf.owner.namespace.tenant != tenant:
                num_needed = min(num_needed, usage.num_blocks_for_others)
            num_offered_blocks = self._policy.num_offered_blocks(leaf)
            num_taken = min(num_needed, num_offered_blocks)
            if with_dead_ends:
                num_taken = self._num_blocks_with_dead_end(leaf, num_taken)
                if leaf.owner.namespace.tenant != tenant:
                    num_taken = min(num_taken, usage.num_blocks_for_others)
            taken.append(self._take(leaf, num_taken, by_self=leaf.owner.namespace.tenant == tenant))
            if num_needed >= num_offered_blocks:
                self._queue.requeue(leaf)
            num_freed += len(taken[-1]) // BLOCK_ID_BYTES
        self._free(taken)
        return num_freed

    def _free(self, taken: list[bytes]) -> None:
        """Free blocks that were taken from leaves. Call it once for many leaves: it takes as long as `_take` twice."""
        if taken:
            block_ids = np.frombuffer(b"".join(taken), dtype=np.int32)
            self._pool.unpublish(block_ids)
            self._pool.release(block_ids)

    def _num_blocks_with_dead_end(self, leaf: Node, num_blocks: int) -> int:
        """Return how many blocks to take off a leaf's end, so that prompts can continue after the remaining ones.

        These are `num_blocks`, and the blocks before them after which no prompt can continue, because windowed layers
        lack the K/V that it would need.
        """
        size = leaf.owner.block_size
        num_kept_tokens = self._windows.num_reusable_tokens(leaf.block_ids, (leaf.num_blocks - num_blocks) * size)
        return leaf.num_blocks - -(-num_kept_tokens // size)

    def _take(self, leaf: Node, num_blocks: int, *, by_self: bool) -> bytes:
        """Take blocks off a leaf's end. Returns their packed ids, which are still published.

        Args:
            leaf: the leaf.
            num_blocks: blocks to take.
            by_self: whether they are evicted for their own tenant.
        """
        tree, usage = self._trees[leaf.owner.namespace], leaf.owner.usage
        num_kept_blocks = leaf.num_blocks - num_blocks
        usage.evict(num_blocks, by_self=by_self)
        self.num_evicted_blocks += num_blocks
        fingerprint = tree.fingerprint_after(leaf, num_kept_blocks) if num_kept_blocks else leaf.fingerprint
        reason = MissReason.EXPIRED if leaf.has_expired else MissReason.EVICTED
        self._changes.evicted(leaf, num_blocks, fingerprint, reason, self._clock())
        if not by_self:
            self._evicted.record_eviction_for_others(fingerprint)
        if num_kept_blocks == 0:
            self._remove(tree, leaf)
            return leaf.block_ids
        return tree.truncate(leaf, num_kept_blocks)

    def _remove(self, tree: RadixTree, leaf: Node) -> None:
        self._queue.discard(leaf)
        parent = leaf.parent
        tree.remove(leaf)
        assert parent is not None
        if parent.is_evictable:
            self._queue.add(parent)
        elif parent is tree.root and parent.is_leaf:
            del self._trees[tree.owner.namespace]

    def purge_leaves(
        self, tree: RadixTree, max_nodes: int, *, top: Node | None = None, evicts: bool = False
    ) -> tuple[int, int]:
        """Remove unused leaves from a tree, and then the nodes that become unused leaves, perhaps the whole tree.

        Args:
            tree: the tree.
            max_nodes: maximum number of nodes to remove.
            top: remove only this node and those below it; None for the whole tree.
            evicts: evict them, so that tiers save their blocks, instead of purging them.

        Returns:
            The number of removed nodes, which is less than `max_nodes` only if no more can be removed; and the number
            of freed blocks.

        Complexity: O(max_nodes * log leaves + children of the nodes on the way).
        """
        taken: list[bytes] = []
        top = top or tree.root
        stack = [(top, _children_of(top))]
        while stack and len(taken) < max_nodes:
            node, children = stack[-1]
            child = next(children, None)
            if child is not None:
                stack.append((child, _children_of(child)))
                continue
            stack.pop()
            if node.is_evictable:
                taken.append(self._take(node, node.num_blocks, by_self=True) if evicts else self._purge(tree, node))
        self._free(taken)
        return len(taken), sum(map(len, taken)) // BLOCK_ID_BYTES

    def purge_end(self, leaf: Node, num_kept_blocks: int) -> int:
        """Remove all but the first `num_kept_blocks` blocks of an unused leaf. Returns the number of freed blocks.

        Complexity: O(log leaves), and a pass over the path of the leaf if blocks are kept.
        """
        if num_kept_blocks:
            self._trees.cut(leaf, num_kept_blocks)
        self._free([self._purge(self._trees[leaf.owner.namespace], leaf)])
        return leaf.num_blocks

    def _purge(self, tree: RadixTree, leaf: Node) -> bytes:
        """Remove a leaf that no lease uses. Returns its packed block ids, which are still published."""
        self._retained.set(leaf, DEFAULT_PRIORITY, None)
        self._changes.purged(leaf)
        leaf.owner.usage.drop(leaf.num_blocks)
        self._remove(tree, leaf)
        return leaf.block_ids

    def purge(self, tree: RadixTree) -> tuple[int, int]:
        """Remove a whole tree, after `purge_leaves`. Its blocks become free when the leases that use them are closed.

        Returns:
            Nodes removed, and the blocks that leases still use.

        Complexity: O(nodes).
        """
        del self._trees[tree.owner.namespace]
        num_blocks = 0
        nodes = list(tree.nodes())
        for node in nodes:
            self._changes.purged(node)
            self._pins.count_pinned(node, -node.num_blocks)
            self._pool.unpublish(np.frombuffer(node.block_ids, dtype=np.int32))
            node.retired_block_ids += node.block_ids
            num_blocks += node.num_blocks
            node.set_block_ids(b"")
            node.children = None  # otherwise only the garbage collector frees nodes that reference each other
        tree.root.children = None
        usage = tree.owner.usage
        usage.num_cached_blocks -= num_blocks
        usage.num_leased_blocks += num_blocks
        return len(nodes), num_blocks


def _children_of(node: Node) -> Iterator[Node]:
    return iter(list(node.children.values()) if node.children else ())


def _leaves_off_path(end: Node) -> Iterator[Node]:
    """Yield leaves that may be evicted to reduce the branches of a path, a few per node.

    A purged path has no branches.
    """
    below, node = end, end.parent
    while node is not None and node.parent is not None and node.children is not None:
        for child in islice(node.children.values(), _MAX_EXAMINED):
            if child is below:
                continue
            leaf = child
            for _ in range(_MAX_EXAMINED):
                if leaf.children:
                    leaf = next(iter(leaf.children.values()))
            if leaf.is_evictable and leaf.priority <= DEFAULT_PRIORITY:
                yield leaf
        below, node = node, node.parent
