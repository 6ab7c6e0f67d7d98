"""The prefix cache: the only place that changes trees and block pool, and keeps the two in step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from radixkv.block_pool import BlockIds, BlockPool
from radixkv.errors import InvalidRequest, InvariantViolation, LeaseClosed, OutOfBlocks, QuotaExceeded
from radixkv.eviction import EvictionLines, EvictionPolicy
from radixkv.lease import BlockCopy, Lease
from radixkv.miss_reason import LostPrefixes, MissReason, prefix_fingerprint
from radixkv.namespace import Namespace
from radixkv.radix_tree import BLOCK_ID_BYTES, Insertion, Node, RadixTree
from radixkv.tenants import Quota, Tenants, TenantUsage
from radixkv.token_bytes import TOKEN_BYTES


class Match(NamedTuple):
    """What of a prompt is cached now. Valid until the cache changes.

    Attributes:
        namespace: where was looked.
        tokens: the prompt, little-endian uint32 bytes.
        cached_tokens: reusable tokens; at most all but the last one.
        block_ids: int32 ids of the `ceil(cached_tokens / block_size)` blocks that hold them. Read-only.
    """

    namespace: Namespace
    tokens: bytes
    cached_tokens: int
    block_ids: BlockIds


class PrefixCache:
    """Radix trees over one block pool. Not thread-safe: one thread owns it.

    Args:
        num_blocks: physical blocks.
        block_size: tokens a block.
        policy: which unused leaf goes first, for this cache alone; without one, the one unused for longest.
        quotas: bounds on the blocks of some tenants. Their floors together must fit into the pool.
        evicted_prefixes: how many evicted prefixes are remembered to explain misses.
        clock: seconds, never going back.

    Example:
        >>> cache = PrefixCache(num_blocks=8, block_size=4)
        >>> prompt = np.arange(10, dtype="<u4").tobytes()
        >>> with cache.lease(Namespace("model"), prompt) as lease:
        ...     lease.cached_tokens, lease.commit(10)
        (0, 10)
        >>> cache.match(Namespace("model"), prompt).cached_tokens
        9
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        policy: EvictionPolicy | None = None,
        quotas: Mapping[str, Quota] | None = None,
        evicted_prefixes: int = 65_536,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.num_evicted_blocks = 0
        self.num_pinned_blocks = 0
        self._trees: dict[Namespace, RadixTree] = {}
        self._leases: set[Lease] = set()
        self.tenants = Tenants(quotas or {})
        self._policy = policy or EvictionPolicy()
        self._evictable = EvictionLines(self._policy, self.tenants.with_quota)
        self._lost = LostPrefixes(evicted_prefixes)
        self._clock = clock

    @property
    def num_evictable_blocks(self) -> int:
        """Published blocks that no lease keeps from eviction."""
        return self.pool.num_published - self.num_pinned_blocks

    @property
    def num_namespaces(self) -> int:
        """Namespaces with at least one cached token."""
        return len(self._trees)

    @property
    def num_segments(self) -> int:
        """Nodes of all trees. Complexity: O(nodes)."""
        return sum(1 for tree in self._trees.values() for _ in tree.nodes())

    # -- looking ---------------------------------------------------------------------------------------------------

    def match(self, namespace: Namespace, tokens: bytes) -> Match:
        """Find the longest reusable prefix, to the token. Changes nothing.

        At least the last token is never reused: its logits are the answer, and they are not cached.

        Complexity: about one memory comparison of the prompt.
        """
        _, _, cached_tokens, packed = self._find(namespace, tokens)
        return Match(
            namespace, tokens, cached_tokens, np.frombuffer(packed, np.int32, -(-cached_tokens // self.block_size))
        )

    def explain(self, namespace: Namespace, tokens: bytes, cached_tokens: int) -> MissReason:
        """Say why the tokens after the cached ones have to be computed. Complexity: O(cached_tokens) hashing."""
        if cached_tokens >= len(tokens) // TOKEN_BYTES - 1:
            return MissReason.NONE
        next_block_end = (cached_tokens // self.block_size + 1) * self.block_size * TOKEN_BYTES
        lost = self._lost.reason(prefix_fingerprint(namespace.seed, tokens, next_block_end))
        return lost or (MissReason.DIVERGED if cached_tokens else MissReason.COLD)

    def _find(self, namespace: Namespace, tokens: bytes, read: bool = True) -> tuple[Node | None, int, int, bytes]:
        """The deepest node that shares tokens, bytes found, tokens reusable, and the packed ids of their blocks."""
        if not tokens or len(tokens) % TOKEN_BYTES:
            raise InvalidRequest(f"tokens: expected one or more uint32 token ids, got {len(tokens)} bytes")
        tree = self._trees.get(namespace) if read else None
        if tree is None:
            return None, 0, 0, b""
        node, num_bytes, packed = tree.match(tokens)
        cached_tokens = min(num_bytes, len(tokens) - TOKEN_BYTES) // TOKEN_BYTES
        return node if cached_tokens else None, num_bytes, cached_tokens, packed

    # -- leasing ---------------------------------------------------------------------------------------------------

    def lease(self, namespace: Namespace, tokens: bytes, *, read: bool = True) -> Lease:
        """Take the right to a prompt's blocks: what is cached stays, what is missing is allocated.

        Unused leaves are evicted if free blocks run short. If they would not suffice, nothing is evicted and nothing
        changes. Reuse never makes a lease fail that would succeed without it: in a full cache the block that is
        shared in part may be given up, so that `cached_tokens` is less than a match found.

        Args:
            namespace: where to look and to publish.
            tokens: the prompt, little-endian uint32 bytes; at least one token.
            read: reuse cached blocks.

        Returns:
            A lease that the caller must close.

        Raises:
            InvalidRequest: `tokens` is empty or not whole tokens.
            OutOfBlocks: free and evictable blocks together are too few.
        """
        node, found_bytes, cached_tokens, packed = self._find(namespace, tokens, read)
        usage = self.tenants[namespace.tenant]
        num_new_blocks = -(-len(tokens) // (self.block_size * TOKEN_BYTES)) - cached_tokens // self.block_size
        num_spare_blocks = self._num_takeable_blocks(namespace.tenant, usage) - num_new_blocks
        if num_spare_blocks < _num_unpinned_blocks(node):
            node, cached_tokens = self._narrow(node, cached_tokens, num_spare_blocks, usage)
        num_whole_blocks, shared_tokens = divmod(cached_tokens, self.block_size)
        node_used_s = 0.0
        if node is not None:
            node_used_s = node.last_used_s
            self._policy.reused(node, found_bytes, self._clock())
        self._pin(node)
        self._make_room(num_new_blocks, namespace.tenant, usage)
        new = self.pool.acquire(num_new_blocks)
        usage.num_leased_blocks += num_new_blocks
        usage.num_hit_tokens += cached_tokens
        usage.num_miss_tokens += len(tokens) // TOKEN_BYTES - cached_tokens
        reused = np.frombuffer(packed, dtype=np.int32)
        block_ids = np.concatenate((reused[:num_whole_blocks], new))
        copy = BlockCopy(int(reused[num_whole_blocks]), int(new[0])) if shared_tokens else None
        lease = Lease(
            self, namespace, usage, tokens, cached_tokens, block_ids, num_whole_blocks, copy, node, node_used_s
        )
        self._leases.add(lease)
        return lease

    def _num_takeable_blocks(self, tenant: str, usage: TenantUsage) -> int:
        """Blocks that a tenant could have by evicting all that it may. Complexity: O(tenants with a quota)."""
        takeable = self.pool.num_free + self.num_evictable_blocks
        if self.tenants.with_quota:
            takeable -= self.tenants.num_blocks_kept_from(tenant)
            if (to_ceiling := usage.num_blocks_to_ceiling) is not None:
                takeable = min(takeable, to_ceiling)
        return takeable

    def _make_room(self, num_blocks: int, tenant: str, usage: TenantUsage) -> None:
        """Evict until a tenant can take `num_blocks`: first its own leaves above its ceiling, then what goes first."""
        ceiling = usage.quota.ceiling_blocks
        if ceiling is not None:
            over = usage.num_cached_blocks + usage.num_leased_blocks + num_blocks - ceiling
            self._evict(over, lambda: self._evictable.first_of(tenant), tenant)
        self.evict(num_blocks - self.pool.num_free, tenant=tenant)

    def _narrow(
        self, node: Node | None, cached_tokens: int, num_spare_blocks: int, usage: TenantUsage
    ) -> tuple[Node | None, int]:
        """Pin less of a path that stands in its own way, and if need be reuse less of it.

        First what lies beyond the reused blocks is cut off; then the block that is reused in part is given up. Whole
        blocks never are: computing one anew takes a block too.

        Args:
            node: the deepest node that shares tokens.
            cached_tokens: tokens that could be reused.
            num_spare_blocks: blocks that the tenant could have, less those that the suffix takes.
            usage: the tenant's.

        Returns:
            The node where the path to pin ends, and the tokens to reuse.

        Raises:
            OutOfBlocks, QuotaExceeded: the whole blocks can't be held beside the suffix either. Nothing has changed.
        """
        num_path_blocks = _num_path_blocks(node)
        num_pinned_blocks = num_path_blocks - _num_unpinned_blocks(node)
        num_held_blocks = -(-cached_tokens // self.block_size)
        if num_spare_blocks < num_held_blocks - num_pinned_blocks:
            num_held_blocks = cached_tokens // self.block_size
            cached_tokens = num_held_blocks * self.block_size
        num_available_blocks = num_spare_blocks - max(0, num_held_blocks - num_pinned_blocks)
        if num_available_blocks < 0:
            to_ceiling = usage.num_blocks_to_ceiling
            if to_ceiling is not None and to_ceiling < self.pool.num_free + self.num_evictable_blocks:
                raise QuotaExceeded(
                    f"blocks: expected {-num_available_blocks} more, got a ceiling of {usage.quota.ceiling_blocks} for "
                    f"this tenant, of which leases hold {usage.num_leased_blocks + usage.num_pinned_blocks}"
                )
            raise OutOfBlocks(
                f"blocks: expected {-num_available_blocks} more, got {self.pool.num_free} free and "
                f"{self.num_evictable_blocks} evictable of {self.pool.num_blocks}, the reused ones among them"
            )
        if node is None or not cached_tokens:
            return None, 0
        while num_path_blocks - node.num_blocks >= num_held_blocks:
            num_path_blocks -= node.num_blocks
            assert node.parent is not None
            node = node.parent
        if num_path_blocks > num_held_blocks:
            node = node.tree.cut(node, node.num_blocks - (num_path_blocks - num_held_blocks))
        return node, cached_tokens

    def commit(self, lease: Lease, upto_tokens: int) -> int:
        """Publish a lease's finished blocks; see `Lease.commit`."""
        if lease not in self._leases:
            raise LeaseClosed("lease: expected an open lease of this cache, got a closed or a foreign one")
        if not 0 <= upto_tokens <= lease.num_tokens:
            raise InvalidRequest(f"upto_tokens: expected 0 to {lease.num_tokens}, got {upto_tokens}")
        whole_tokens = upto_tokens // self.block_size * self.block_size
        end = upto_tokens if upto_tokens == lease.num_tokens else whole_tokens
        if end <= lease.committed_tokens:
            return 0
        num_blocks = -(-end // self.block_size)
        tokens = lease.tokens[: end * TOKEN_BYTES]
        tree = self._trees.get(lease.namespace)
        if tree is None:
            tree = self._trees[lease.namespace] = RadixTree(self.block_size, lease.namespace, lease.usage)
        packed = lease.block_ids[:num_blocks].tobytes()
        insertion = tree.insert(tokens, packed)
        if not packed.startswith(insertion.known_block_ids):
            self._adopt(lease, np.frombuffer(insertion.known_block_ids, dtype=np.int32))
        if insertion.split is not None:
            self._policy.split(insertion.split, lease.node_used_s, self._clock())
        if insertion.is_covered:
            lease.num_published_blocks = insertion.num_known_blocks
        else:
            self._policy.inserted(insertion.node, self._clock())
            self._publish(lease.block_ids[insertion.num_known_blocks : num_blocks], insertion)
            lease.num_published_blocks = num_blocks
        before, lease.node, lease.copy = lease.node, insertion.node, None
        self._pin(insertion.node)
        self._unpin(before)
        if before is not None and insertion.split is before:
            self._forget_use(before, lease.node_used_s)
        known_tokens = max(lease.committed_tokens, insertion.known_bytes // TOKEN_BYTES)
        lease.committed_tokens = end
        return max(0, end - known_tokens)

    def _adopt(self, lease: Lease, known: BlockIds) -> None:
        """Exchange the lease's own copies for blocks that were published first."""
        differing = np.flatnonzero(lease.block_ids[: known.size] != known)
        self.pool.release(lease.block_ids[differing])
        lease.usage.num_leased_blocks -= differing.size
        lease.block_ids[differing] = known[differing]

    def _publish(self, block_ids: BlockIds, insertion: Insertion) -> None:
        """Hand a lease's blocks to the tree, and take back the one that they replace."""
        self.pool.publish(block_ids)
        usage = insertion.node.tree.usage
        usage.num_leased_blocks -= block_ids.size
        usage.num_cached_blocks += block_ids.size
        node, replaced = insertion.node, np.frombuffer(insertion.replaced_block_ids, dtype=np.int32)
        if replaced.size:
            self.pool.unpublish(replaced)
            usage.num_cached_blocks -= 1
            usage.num_leased_blocks += 1
        if node.pin_count:  # a leaf has grown that leases use: they may hold the replaced block, too
            node.retired_block_ids += insertion.replaced_block_ids
            self.num_pinned_blocks += block_ids.size - replaced.size
            usage.num_pinned_blocks += block_ids.size - replaced.size
        elif replaced.size:
            self.pool.release(replaced)
            usage.num_leased_blocks -= 1

    def close(self, lease: Lease) -> None:
        """Give a lease's blocks back; see `Lease.close`."""
        if lease.is_closed:
            return
        if lease not in self._leases:
            raise LeaseClosed("lease: expected a lease of this cache, got a foreign one")
        lease.is_closed = True
        self._leases.remove(lease)
        own = lease.block_ids[lease.num_published_blocks :]
        if own.size:
            self.pool.release(own)
            lease.usage.num_leased_blocks -= own.size
        self._unpin(lease.node)

    def _pin(self, node: Node | None) -> None:
        """Keep a path from eviction. Complexity: O(depth)."""
        now = self._clock()
        if node is not None:
            self._evictable.discard(node)
        while node is not None and node.parent is not None:
            if node.pin_count == 0:
                self.num_pinned_blocks += node.num_blocks
                node.tree.usage.num_pinned_blocks += node.num_blocks
            node.pin_count += 1
            node.last_used_s = now
            node = node.parent

    def _unpin(self, node: Node | None) -> None:
        """Undo one `_pin` of the same node. Complexity: O(depth + log leaves)."""
        now = self._clock()
        leaf = node
        while node is not None and node.parent is not None:
            node.pin_count -= 1
            if node.pin_count == 0:
                self.num_pinned_blocks -= node.num_blocks
                node.tree.usage.num_pinned_blocks -= node.num_blocks
                if node.retired_block_ids:
                    self._free_retired(node)
            node.last_used_s = now
            node = node.parent
        if leaf is not None and _is_evictable(leaf):
            self._evictable.add(leaf)

    def _forget_use(self, lower: Node, last_used_s: float) -> None:
        """Make the half of a node that its last lease turned out not to share as old as it was before."""
        lower.last_used_s = last_used_s
        if lower in self._evictable:
            self._evictable.discard(lower)
            self._evictable.add(lower)

    def _free_retired(self, node: Node) -> None:
        block_ids = np.frombuffer(node.retired_block_ids, dtype=np.int32)
        self.pool.release(block_ids)
        node.tree.usage.num_leased_blocks -= block_ids.size
        node.retired_block_ids = b""

    # -- forgetting ------------------------------------------------------------------------------------------------

    def evict(self, num_blocks: int, *, tenant: str | None = None) -> int:
        """Free blocks of unused leaves, in the policy's order and from each leaf's end.

        Args:
            num_blocks: how many are wanted.
            tenant: for whom: its own floor does not protect its leaves, all others' do. None is nobody, and every
                floor holds.

        Returns:
            Blocks freed: `num_blocks`, or fewer if no more are evictable.

        Complexity: O(log leaves + tenants with a quota) for each leaf, and one pass over the path's tokens if the last
        is only shortened.
        """
        return self._evict(num_blocks, lambda: self._evictable.first(spared=self._spared(tenant)), tenant)

    def _spared(self, tenant: str | None) -> set[str]:
        quotas = self.tenants.with_quota.items()
        return {other for other, usage in quotas if other != tenant and usage.num_blocks_for_others == 0}

    def _evict(self, num_blocks: int, next_leaf: Callable[[], Node | None], tenant: str | None = None) -> int:
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
            self.pool.unpublish(block_ids)
            self.pool.release(block_ids)
        self.num_evicted_blocks += freed
        return freed

    def _evict_from(self, leaf: Node, num_blocks: int) -> bytes:
        """Cut at most `num_blocks` blocks off a leaf's end. Returns their packed ids, still published."""
        num_offered_blocks = self._policy.num_offered_blocks(leaf)
        num_blocks = min(num_blocks, num_offered_blocks)
        self._policy.evicted(leaf, num_blocks, self._clock())
        if num_blocks == leaf.num_blocks:
            packed, fingerprint = leaf.block_ids, leaf.fingerprint
            self._remove(leaf)
        else:
            packed, fingerprint = leaf.tree.truncate(leaf, leaf.num_blocks - num_blocks)
            if num_blocks == num_offered_blocks:
                self._evictable.discard(leaf)
                self._evictable.add(leaf)
        self._lost.remember(fingerprint, MissReason.EVICTED)
        return packed

    def _remove(self, leaf: Node) -> None:
        self._evictable.discard(leaf)
        tree, parent = leaf.tree, leaf.parent
        tree.remove(leaf)
        assert parent is not None
        if _is_evictable(parent):
            self._evictable.add(parent)
        elif parent is tree.root and parent.is_leaf:
            del self._trees[tree.namespace]

    # -- proof -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Recount everything from the open leases and the trees. Complexity: O(everything).

        Raises:
            InvariantViolation: the message names what does not add up.
        """
        pins: dict[Node, int] = {}
        leased = []
        held: dict[str, Counter[str]] = {tenant: Counter() for tenant, _ in self.tenants.items()}
        for lease in self._leases:
            leased.append(lease.block_ids[lease.num_published_blocks :].tobytes())
            held[lease.namespace.tenant]["leased"] += lease.block_ids.size - lease.num_published_blocks
            node = lease.node
            while node is not None and node.parent is not None:
                pins[node] = pins.get(node, 0) + 1
                node = node.parent
        published = []
        num_pinned_blocks = num_evictable = 0
        for tree in self._trees.values():
            tree.check()
            _require(not tree.root.is_leaf, "an empty tree is kept")
            for node in tree.nodes():
                published.append(node.block_ids)
                leased.append(node.retired_block_ids)
                _require(node.pin_count > 0 or not node.retired_block_ids, "an unused node keeps a retired block")
                _require(node.pin_count == pins.pop(node, 0), "a pin count is not its number of leases")
                _require(
                    (node in self._evictable) == _is_evictable(node), "the eviction index is not the unused leaves"
                )
                num_pinned_blocks += node.num_blocks if node.pin_count else 0
                blocks = held[tree.namespace.tenant]
                blocks["cached"] += node.num_blocks
                blocks["pinned"] += node.num_blocks if node.pin_count else 0
                blocks["leased"] += len(node.retired_block_ids) // BLOCK_ID_BYTES
                num_evictable += _is_evictable(node)
        _require(not pins, "a lease pins a node outside every tree")
        _require(self.num_pinned_blocks == num_pinned_blocks, "the number of pinned blocks drifted")
        _require(len(self._evictable) == num_evictable, "the eviction index holds a node outside every tree")
        for tenant, usage in self.tenants.items():
            counted = (usage.num_cached_blocks, usage.num_pinned_blocks, usage.num_leased_blocks)
            blocks = held[tenant]
            _require(counted == (blocks["cached"], blocks["pinned"], blocks["leased"]), "a tenant's usage drifted")
        self.pool.check(
            np.frombuffer(b"".join(leased), dtype=np.int32), np.frombuffer(b"".join(published), dtype=np.int32)
        )


def _num_path_blocks(node: Node | None) -> int:
    """Blocks from the root to the end of a node. Complexity: O(depth)."""
    num_blocks = 0
    while node is not None:
        num_blocks += node.num_blocks
        node = node.parent
    return num_blocks


def _num_unpinned_blocks(node: Node | None) -> int:
    """Blocks of a path that no lease pins yet. Complexity: O(depth)."""
    num_blocks = 0
    while node is not None and node.pin_count == 0:
        num_blocks += node.num_blocks
        node = node.parent
    return num_blocks


def _is_evictable(node: Node) -> bool:
    return node.pin_count == 0 and node.is_leaf and node.parent is not None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantViolation(f"prefix cache: {message}")
