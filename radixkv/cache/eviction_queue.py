"""The queue of leaves that may be evicted, in the order of their eviction.

Leaves of lower priority are evicted first; among leaves of equal priority the policy decides. Leaves that only an ended
session has used count as leaves of priority 0, unless they are retained with a priority above the default. Leaves that
were never reused can be on probation: while they take more than their share of the pool, they are evicted before all
others, except those of lower priority.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Any

from sortedcontainers import SortedList

from radixkv.api.awaits import Awaits
from radixkv.api.miss_reason import MissReason
from radixkv.api.retention import DEFAULT_PRIORITY
from radixkv.cache.changes import Listener
from radixkv.cache.eviction_policy import EvictionPolicy
from radixkv.cache.node import Node
from radixkv.cache.tenants import Tenants
from radixkv.tokens import TOKEN_BYTES

Entry = tuple[int, Any, int, int, Node]
"""Rank (mostly the priority), the policy's key, arrival, kind and node of a leaf; arrivals are distinct."""

# The newest leaf of a kind is evicted instead of the oldest leaf of a kind only if the oldest one is worth more than
# this factor times as much as the newest one. Evicting the newest leaf keeps a part of a cyclic access pattern that is
# larger than the cache. The factor prevents random differences from evicting what was just used.
_NEWEST_FACTOR = 1.3
# Seconds for which the first entries of all kinds are kept: leaves hardly age in that time.
_FIRST_ENTRIES_VALID_S = 0.1

_NOTHING = Awaits.NOTHING  # a member of an enumeration is looked up slowly


class EvictionQueue(Listener):
    """The unused leaves of a cache. The first one is evicted next.

    Tenants whose floor protects them are skipped, and a tenant at its ceiling evicts its own leaves first. So each
    tenant with a quota has a queue of its own. All other tenants share one, and if there is a default ceiling, each of
    them also has its own.

    **Probation.** A leaf is on probation until another request finds one of its blocks. Later chunks of the same
    request do not count as reuse, and neither do the blocks that a request finds when it resumes after a preemption. If
    a reused leaf has grown and is split, the half that no request has found is on probation again. A leaf is not put on
    probation if it is published again soon after its eviction: before as many blocks were evicted as the pool has.

    While leaves on probation take more than their share, the first of them is evicted, unless another leaf has a lower
    priority. Otherwise the first of all leaves is evicted. If a tenant at its ceiling needs room, the share is computed
    from its ceiling instead of the pool.

    Memory: the fingerprints of the last evicted leaves, which together had as many blocks as the pool.

    Complexity: O(log leaves) to add, discard and requeue; O(tenants with a quota x kinds of the policy) to find the
    first leaf; O(1), amortized, for each change, and a requeue for some splits; O(nodes whose probation ends) when a
    lease finds blocks.

    Source: Johnson, Shasha: "2Q", VLDB 1994. In contrast to 2Q, the policy orders all leaves while those on probation
    take no more than their share.

    Args:
        policy: orders the leaves.
        tenants: their quotas and counts.
        probation_share: share of the pool that leaves on probation may take; 1 switches probation off.
        num_pool_blocks: blocks of the pool.

    Attributes:
        has_probation: whether leaves can be on probation. If not, the queue need not listen to changes.
        num_probation_blocks: blocks of unused leaves on probation.
        num_evicted_probation_blocks: blocks evicted from such leaves so far.
    """

    def __init__(
        self, policy: EvictionPolicy, tenants: Tenants, probation_share: float = 1.0, num_pool_blocks: int = 0
    ) -> None:
        arrivals = itertools.count()
        self.has_probation = probation_share < 1
        self.num_probation_blocks = 0
        self.num_evicted_probation_blocks = 0
        self._tenants = tenants
        self._probation_share = probation_share
        self._reused = TenantEvictionQueues(policy, tenants, arrivals)
        self._on_probation = TenantEvictionQueues(policy, tenants, arrivals)
        self._num_evicted_blocks = 0
        self._evicted: OrderedDict[int, int] = OrderedDict()  # leaf fingerprint -> total evicted blocks at that time
        self.resize(num_pool_blocks)

    def resize(self, num_pool_blocks: int) -> None:
        """Set the number of blocks of the pool, which changes if windowed layers share its memory."""
        self._num_pool_blocks = num_pool_blocks
        self._max_probation_blocks = int(self._probation_share * num_pool_blocks)

    def __len__(self) -> int:
        return len(self._reused) + len(self._on_probation)

    def __contains__(self, node: Node) -> bool:
        return node.eviction_entry is not None

    def add(self, leaf: Node) -> None:
        """Add a leaf, unless it is in the queue already."""
        if leaf.eviction_entry is not None:
            return
        if self.is_on_probation(leaf):
            self._on_probation.add(leaf)
            self._count_probation(leaf, leaf.num_blocks)
        else:
            self._reused.add(leaf)

    def discard(self, leaf: Node) -> None:
        """Remove a leaf, if it is in the queue."""
        if leaf.eviction_entry is None:
            return
        if leaf.num_probation_blocks:
            self._on_probation.remove(leaf)
            self._count_probation(leaf, -leaf.num_probation_blocks)
        else:
            self._reused.remove(leaf)

    def requeue(self, leaf: Node) -> None:
        """Move a leaf to its new position, if it is in the queue."""
        if leaf.eviction_entry is not None:
            self.discard(leaf)
            self.add(leaf)

    def first(self, protected: Collection[str], now_s: float) -> Node | None:
        """Return the leaf to evict next, except those of protected tenants; None if there is none."""
        reused = self._reused.first(protected, now_s)
        if not self.has_probation:
            return None if reused is None else reused[-1]
        num_unprotected_blocks = self.num_probation_blocks
        num_unprotected_blocks -= sum(self._tenants[each].num_probation_blocks for each in protected)
        on_probation = self._on_probation.first(protected, now_s)
        return _first_leaf(on_probation, reused, is_over=num_unprotected_blocks > self._max_probation_blocks)

    def first_of(self, tenant: str, now_s: float) -> Node | None:
        """Return the next leaf to evict of a tenant with a ceiling; None if the tenant has no unused leaf."""
        usage = self._tenants[tenant]
        max_blocks = self._probation_share * (usage.quota.ceiling_blocks or 0)
        is_over = usage.num_probation_blocks > max_blocks
        on_probation, reused = self._on_probation.first_of(tenant, now_s), self._reused.first_of(tenant, now_s)
        return _first_leaf(on_probation, reused, is_over=is_over)

    def is_on_probation(self, node: Node) -> bool:
        """Return whether no other request has found a block of a node yet."""
        return self.has_probation and node.num_reused_blocks == 0

    def record_hit(self, node: Node, num_bytes: int, is_resumed: bool) -> None:
        """End the probation of the nodes on a path of which a lease found at least one whole block.

        Args:
            node: the end of the path.
            num_bytes: bytes of the path that the lease found.
            is_resumed: whether the request had a lease before; if so, no probation ends.
        """
        if is_resumed or not self.has_probation:
            return
        block_bytes = node.owner.block_size * TOKEN_BYTES
        while node.parent is not None and node.num_reused_blocks < node.num_blocks:
            num_bytes_here = num_bytes - node.start_bytes
            is_whole = num_bytes_here >= len(node.tokens)
            num_found_blocks = node.num_blocks if is_whole else num_bytes_here // block_bytes
            node.num_reused_blocks = max(node.num_reused_blocks, num_found_blocks)
            node = node.parent

    def record_return(self, leaf: Node, is_resumed: bool) -> None:
        """End the probation of a new leaf that was evicted recently, unless a resumed request published it."""
        if not is_resumed and self._evicted.pop(leaf.fingerprint, None) is not None:
            leaf.num_reused_blocks = 1

    def grown(self, leaf: Node, num_new_blocks: int, now_s: float) -> None:
        """Count the new blocks of a leaf on probation."""
        self._recount_probation(leaf)

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        """End the probation of the upper half."""
        self._divide_reused_blocks(lower)
        assert lower.parent is not None
        lower.parent.num_reused_blocks = lower.parent.num_blocks
        self._requeue_half(lower)

    def cut(self, lower: Node) -> None:
        """Divide the count of reused blocks between both halves."""
        self._divide_reused_blocks(lower)
        self._requeue_half(lower)

    def joined(self, uppers: list[Node], lower: Node) -> None:
        """Add up the counts of reused blocks."""
        lower.num_reused_blocks += sum(upper.num_reused_blocks for upper in uppers)
        self._recount_probation(lower)

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        """Count evicted blocks, and remember a leaf that is evicted as a whole, which is discarded afterwards."""
        self._num_evicted_blocks += num_blocks
        leaf.num_reused_blocks = min(leaf.num_reused_blocks, leaf.num_blocks - num_blocks)
        if num_blocks == leaf.num_blocks:
            self._evicted[leaf.fingerprint] = self._num_evicted_blocks
            self._evicted.move_to_end(leaf.fingerprint)
        while self._evicted and self._num_evicted_blocks - next(iter(self._evicted.values())) >= self._num_pool_blocks:
            self._evicted.popitem(last=False)
        if leaf.num_probation_blocks:
            self.num_evicted_probation_blocks += num_blocks
            if num_blocks < leaf.num_blocks:
                self._count_probation(leaf, -num_blocks)

    def _divide_reused_blocks(self, lower: Node) -> None:
        upper = lower.parent
        assert upper is not None
        upper.num_reused_blocks = min(lower.num_reused_blocks, upper.num_blocks)
        lower.num_reused_blocks -= upper.num_reused_blocks

    def _requeue_half(self, lower: Node) -> None:
        """Count the lower half of a leaf that was split, which may be on probation now, or no longer."""
        self._recount_probation(lower)
        if (lower.num_probation_blocks > 0) is not self.is_on_probation(lower):
            self.requeue(lower)

    def _recount_probation(self, leaf: Node) -> None:
        if leaf.num_probation_blocks:
            self._count_probation(leaf, leaf.num_blocks - leaf.num_probation_blocks)

    def _count_probation(self, leaf: Node, num_blocks: int) -> None:
        leaf.num_probation_blocks += num_blocks
        leaf.owner.usage.num_probation_blocks += num_blocks
        self.num_probation_blocks += num_blocks


def _first_leaf(on_probation: Entry | None, reused: Entry | None, *, is_over: bool) -> Node | None:
    if on_probation is None or reused is None:
        entry = on_probation or reused
        return None if entry is None else entry[-1]
    on_probation_priority, reused_priority = on_probation[0], reused[0]
    if is_over and on_probation_priority <= reused_priority:
        return on_probation[-1]
    return min(on_probation, reused)[-1]


class TenantEvictionQueues:
    """A queue for each tenant with a quota, and one for all other tenants together.

    If tenants without a quota have a default ceiling, each of them has its own queue as well.

    Args:
        policy: orders all queues.
        tenants: their quotas.
        arrivals: distinct numbers, ascending.
    """

    def __init__(self, policy: EvictionPolicy, tenants: Tenants, arrivals: Iterator[int]) -> None:
        self._policy = policy
        self._arrivals = arrivals
        self._with_quota = {tenant: LeafQueue(policy) for tenant in tenants.with_quota}
        self._shared = LeafQueue(policy)
        self._has_ceiling = tenants.default_quota.ceiling_blocks is not None
        self._by_tenant: dict[str, LeafQueue] = {}  # of tenants without a quota, if they have a ceiling

    def __len__(self) -> int:
        return len(self._shared) + sum(map(len, self._with_quota.values()))

    def add(self, leaf: Node) -> None:
        """Add a leaf that is in no queue. Leaves of an ended session are first, unless they are retained."""
        policy, priority = self._policy, leaf.priority
        if leaf.awaits is _NOTHING and priority <= DEFAULT_PRIORITY:
            priority = 0
        kind = policy.kind(leaf) if policy.has_kinds else 0
        leaf.eviction_entry = (priority, policy.key(leaf), next(self._arrivals), kind, leaf)
        tenant = leaf.owner.namespace.tenant
        self._with_quota.get(tenant, self._shared).add(leaf.eviction_entry)
        if self._has_ceiling and tenant not in self._with_quota:
            queue = self._by_tenant.get(tenant)
            if queue is None:
                queue = self._by_tenant[tenant] = LeafQueue(policy)
            queue.add(leaf.eviction_entry)

    def remove(self, leaf: Node) -> None:
        """Remove a leaf that is in its tenant's queue."""
        tenant = leaf.owner.namespace.tenant
        assert leaf.eviction_entry is not None
        self._with_quota.get(tenant, self._shared).remove(leaf.eviction_entry)
        queue = self._by_tenant.get(tenant)
        if queue is not None:
            queue.remove(leaf.eviction_entry)
            if not queue:
                del self._by_tenant[tenant]
        leaf.eviction_entry = None

    def first_of(self, tenant: str, now_s: float) -> Entry | None:
        """Return the first leaf of a tenant that has its own queue; None if that queue is empty."""
        queue = self._with_quota.get(tenant) or self._by_tenant.get(tenant)
        return None if queue is None else queue.first(now_s)

    def first(self, protected: Collection[str], now_s: float) -> Entry | None:
        """Return the first leaf of all tenants except the protected ones; None if there is none."""
        first = self._shared.first(now_s)
        for tenant, queue in self._with_quota.items():
            if tenant not in protected:
                entry = queue.first(now_s)
                if first is None or (entry is not None and entry < first):
                    first = entry
        return first


class LeafQueue:
    """Leaves sorted by priority, and then by the policy's key, in one list for each kind.

    The first entry of each kind is kept for a tenth of a second, in which leaves hardly age.

    Complexity: O(log n) to add and to remove; O(kinds) to find the first.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._by_kind: dict[int, SortedList] = {} if policy.has_kinds else {0: SortedList()}
        self._first_entries: dict[int, Entry] = {}  # by kind; kinds that changed since `_first_entries_s` are missing
        self._first_entries_s = 0.0
        self._num_leaves = 0

    def __len__(self) -> int:
        return self._num_leaves

    def add(self, entry: Entry) -> None:
        """Add the entry of a leaf."""
        kind = entry[3]
        entries = self._by_kind.get(kind)
        if entries is None:
            entries = self._by_kind[kind] = SortedList()
        entries.add(entry)
        self._num_leaves += 1
        if self._policy.has_kinds:
            self._first_entries.pop(kind, None)

    def remove(self, entry: Entry) -> None:
        """Remove an entry that is in this queue."""
        kind = entry[3]
        entries = self._by_kind[kind]
        entries.remove(entry)
        self._num_leaves -= 1
        if self._policy.has_kinds:
            self._first_entries.pop(kind, None)
            if not entries:
                del self._by_kind[kind]

    def first(self, now_s: float) -> Entry | None:
        """Return the entry of the leaf to evict next; None if there is no leaf.

        If the policy has kinds, the key in the returned entry is what the leaf is worth, followed by its key.
        """
        if not self._policy.has_kinds:
            return self._by_kind[0][0] if self._num_leaves else None
        first_entries = self._first_entries
        if not self._first_entries_s <= now_s < self._first_entries_s + _FIRST_ENTRIES_VALID_S:
            self._first_entries_s = now_s
            first_entries.clear()
        if len(first_entries) < len(self._by_kind):
            for kind, entries in self._by_kind.items():
                if kind not in first_entries:
                    first_entries[kind] = self._first_of_kind(kind, entries, now_s)
        return min(first_entries.values()) if first_entries else None

    def _first_of_kind(self, kind: int, entries: SortedList, now_s: float) -> Entry:
        """Return the oldest leaf of a kind, or the newest one if that is worth less."""
        worth_of = self._policy.worth
        priority, key, arrival, _, leaf = entries[0]
        oldest = priority, (worth_of(kind, key, now_s), key), arrival, kind, leaf
        newest_priority, key, arrival, _, leaf = entries[-1]
        if newest_priority != priority or len(entries) == 1:
            return oldest
        return min(oldest, (priority, (_NEWEST_FACTOR * worth_of(kind, key, now_s), key), arrival, kind, leaf))
