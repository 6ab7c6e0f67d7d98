"""The prefix cache: the only place that changes trees and block pool, and keeps the two in step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from radixkv.block_pool import BlockIds, BlockPool
from radixkv.cache_audit import audit
from radixkv.errors import CapacityError, InvalidRequest, LeaseClosed, OutOfBlocks, QuotaExceeded
from radixkv.eviction import EvictionPolicy
from radixkv.evictor import Evictor
from radixkv.lease import BlockCopy, Lease
from radixkv.miss_reason import LostPrefixes, MissReason, prefix_fingerprint
from radixkv.namespace import Namespace
from radixkv.node import DEFAULT_PRIORITY, Node, path_to
from radixkv.radix_tree import Insertion, RadixTree
from radixkv.retention import Grant, RetainedNodes, Retention
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


class Purged(NamedTuple):
    """What a purge took out.

    Attributes:
        freed_blocks: are free now.
        pinned_blocks: nobody finds them any more; they are free when the leases that use them are closed.
    """

    freed_blocks: int
    pinned_blocks: int


class PrefixCache:
    """Radix trees over one block pool. Not thread-safe: one thread owns it.

    Args:
        num_blocks: physical blocks.
        block_size: tokens a block.
        policy: which unused leaf goes first, for this cache alone; without one, the one unused for longest.
        quotas: bounds on the blocks of some tenants. Their floors together must fit into the pool.
        max_retained_blocks: how many blocks may have a priority above the default; a fifth of the pool, if not said.
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
        max_retained_blocks: int | None = None,
        evicted_prefixes: int = 65_536,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.tenants = Tenants(quotas or {})
        self._trees: dict[Namespace, RadixTree] = {}
        self._leases: set[Lease] = set()
        self._policy = policy or EvictionPolicy()
        self._lost = LostPrefixes(evicted_prefixes)
        self._clock = clock
        self._retained = RetainedNodes(
            num_blocks // 5 if max_retained_blocks is None else max_retained_blocks, on_cut=self._policy.cut
        )
        self._evictor = Evictor(self._trees, self.pool, self.tenants, self._policy, self._retained, self._lost, clock)

    @property
    def num_evictable_blocks(self) -> int:
        """Published blocks that no lease keeps from eviction."""
        return self._evictor.num_evictable_blocks

    @property
    def num_pinned_blocks(self) -> int:
        """Published blocks that a lease keeps from eviction."""
        return self._evictor.num_pinned_blocks

    @property
    def num_evicted_blocks(self) -> int:
        """Total."""
        return self._evictor.num_evicted_blocks

    @property
    def num_retained_blocks(self) -> int:
        """Published blocks with a priority above the default, and those before them."""
        self._evictor.expire()
        return self._retained.num_blocks

    @property
    def max_retained_blocks(self) -> int:
        """How many blocks may be retained."""
        return self._retained.max_blocks

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
            raise _no_tokens(tokens)
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
            OutOfBlocks, QuotaExceeded: free and evictable blocks together are too few.
        """
        node, found_bytes, cached_tokens, packed = self._find(namespace, tokens, read)
        usage = self.tenants[namespace.tenant]
        num_new_blocks = -(-len(tokens) // (self.block_size * TOKEN_BYTES)) - cached_tokens // self.block_size
        num_spare_blocks = self._evictor.num_takeable_blocks(namespace.tenant, usage) - num_new_blocks
        if num_spare_blocks < _num_unpinned_blocks(node):
            node, cached_tokens = self._narrow(node, cached_tokens, num_spare_blocks, namespace.tenant, usage)
        num_whole_blocks, shared_tokens = divmod(cached_tokens, self.block_size)
        node_used_s = 0.0
        if node is not None:
            node_used_s = node.last_used_s
            self._policy.reused(node, found_bytes, self._clock())
        self._evictor.pin(node)
        self._evictor.make_room(num_new_blocks, namespace.tenant, usage)
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

    def _narrow(
        self, node: Node | None, cached_tokens: int, num_spare_blocks: int, tenant: str, usage: TenantUsage
    ) -> tuple[Node | None, int]:
        """Pin less of a path that stands in its own way, and if need be reuse less of it.

        First what lies beyond the reused blocks is cut off; then the block that is reused in part is given up. Whole
        blocks never are: computing one anew takes a block too.

        Args:
            node: the deepest node that shares tokens.
            cached_tokens: tokens that could be reused.
            num_spare_blocks: blocks that the tenant could have, less those that the suffix takes.
            tenant, usage: whose lease it will be.

        Returns:
            The node where the path to pin ends, and the tokens to reuse.

        Raises:
            OutOfBlocks, QuotaExceeded: the whole blocks can't be held beside the suffix either. Nothing has changed.
        """
        num_pinned_blocks = sum(above.num_blocks for above in path_to(node) if above.pin_count)
        num_held_blocks = -(-cached_tokens // self.block_size)
        if num_spare_blocks < num_held_blocks - num_pinned_blocks:
            num_held_blocks = cached_tokens // self.block_size
            cached_tokens = num_held_blocks * self.block_size
        num_available_blocks = num_spare_blocks - max(0, num_held_blocks - num_pinned_blocks)
        if num_available_blocks < 0:
            raise self._shortage(-num_available_blocks, tenant, usage)
        if node is None or not cached_tokens:
            return None, 0
        return self._retained.cut_range(node, 0, num_held_blocks)[-1], cached_tokens

    def _shortage(self, num_missing_blocks: int, tenant: str, usage: TenantUsage) -> CapacityError:
        to_ceiling = usage.num_blocks_to_ceiling
        to_others = self.tenants.num_blocks_kept_from(tenant)
        if to_ceiling is not None and to_ceiling < self.pool.num_free + self.num_evictable_blocks - to_others:
            return QuotaExceeded(
                f"blocks: expected {num_missing_blocks} more, got a ceiling of {usage.quota.ceiling_blocks} for this "
                f"tenant, of which leases hold {usage.num_leased_blocks + usage.num_pinned_blocks}"
            )
        return OutOfBlocks(
            f"blocks: expected {num_missing_blocks} more, got {self.pool.num_free} free and "
            f"{self.num_evictable_blocks} evictable of {self.pool.num_blocks}, the reused ones among them"
        )

    def extend(self, lease: Lease, tokens: bytes) -> None:
        """Let a lease go on; see `Lease.extend`."""
        self._require_open(lease)
        if not tokens or len(tokens) % TOKEN_BYTES:
            raise _no_tokens(tokens)
        usage = lease.usage
        kept = lease.block_ids
        # What comes is not written into a block that the tree has, but into a copy of it.
        replaces_last = lease.num_published_blocks == kept.size and lease.num_tokens % self.block_size > 0
        if replaces_last:
            kept = kept[:-1]
        num_new_blocks = -(-(len(lease.tokens) + len(tokens)) // (self.block_size * TOKEN_BYTES)) - kept.size
        if num_new_blocks:
            num_missing_blocks = num_new_blocks - self._evictor.num_takeable_blocks(lease.namespace.tenant, usage)
            if num_missing_blocks > 0:
                raise self._shortage(num_missing_blocks, lease.namespace.tenant, usage)
            self._evictor.make_room(num_new_blocks, lease.namespace.tenant, usage)
            new = self.pool.acquire(num_new_blocks)
            usage.num_leased_blocks += num_new_blocks
            if replaces_last:
                lease.copy = BlockCopy(int(lease.block_ids[-1]), int(new[0]))
                lease.num_published_blocks -= 1
            lease.block_ids = np.concatenate((kept, new))
        lease.tokens += tokens

    def commit(self, lease: Lease, upto_tokens: int) -> int:
        """Publish a lease's finished blocks; see `Lease.commit`."""
        self._require_open(lease)
        if not 0 <= upto_tokens <= lease.num_tokens:
            raise InvalidRequest(f"upto_tokens: expected 0 to {lease.num_tokens}, got {upto_tokens}")
        whole_tokens = upto_tokens // self.block_size * self.block_size
        end = upto_tokens if upto_tokens == lease.num_tokens else whole_tokens
        if end <= lease.committed_tokens or lease.is_revoked:
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
            self._retained.split(insertion.split)
            self._policy.split(insertion.split, lease.node_used_s, self._clock())
        if insertion.is_covered:
            lease.num_published_blocks = insertion.num_known_blocks
        else:
            self._policy.inserted(insertion.node, self._clock())
            if lease.written_from_tokens is None:
                lease.written_from_tokens = insertion.known_bytes // TOKEN_BYTES
            self._publish(lease.block_ids[insertion.num_known_blocks : num_blocks], insertion)
            lease.num_published_blocks = num_blocks
        before, lease.node, lease.copy = lease.node, insertion.node, None
        self._evictor.pin(insertion.node)
        self._evictor.unpin(before)
        if before is not None and insertion.split is before:
            self._evictor.forget_use(before, lease.node_used_s)
        known_tokens = max(lease.committed_tokens, insertion.known_bytes // TOKEN_BYTES)
        lease.committed_tokens = end
        return max(0, end - known_tokens)

    def _require_open(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise LeaseClosed("lease: expected an open lease of this cache, got a closed or a foreign one")

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
            self._evictor.count_pinned(node, block_ids.size - replaced.size)
        elif replaced.size:
            self.pool.release(replaced)
            usage.num_leased_blocks -= 1
        num_old_blocks = node.num_blocks - block_ids.size + replaced.size
        if num_old_blocks and (node.priority != DEFAULT_PRIORITY or node.has_expired):
            self._retained.grown(node, block_ids.size - replaced.size)
            if node.num_blocks > num_old_blocks:  # what was granted ends where the leaf did
                self._retained.cut(node, num_old_blocks)
                self._retained.set(node, DEFAULT_PRIORITY, None)

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
        self._evictor.unpin(lease.node)

    # -- keeping ---------------------------------------------------------------------------------------------------

    def retain(self, namespace: Namespace, tokens: bytes, retention: Retention, *, only_raise: bool = False) -> Grant:
        """Keep a cached range longer than the rest of the cache, or less long.

        Unused leaves of lower priority are evicted first, whatever the policy. The range is widened to whole blocks.
        Blocks above the default priority, and all before them, count against `max_retained_blocks`; if the range does
        not fit, as much of its beginning is granted as does. A priority lasts until it expires, is replaced, or the
        block is evicted for want of anything less worth keeping.

        Args:
            namespace: where to look.
            tokens: the prompt, little-endian uint32 bytes.
            retention: range, priority and time to live.
            only_raise: leave what has a higher priority, the default included, and what has the same for longer.

        Raises:
            InvalidRequest: `tokens` is not whole tokens, or a field of `retention` is out of range.

        A range that ends inside a block is widened by one of the blocks that begin like that. A shorter high priority
        replaces a longer low one; when it ends, both have.

        Complexity: O(depth + log leaves) for each node of the range, and up to three cuts, each a pass over the path's
        tokens. Nodes that were cut are not joined again.
        """
        self._evictor.expire()
        if not tokens or len(tokens) % TOKEN_BYTES:
            raise _no_tokens(tokens)
        start, end = retention.range_in(len(tokens) // TOKEN_BYTES)
        tree = self._trees.get(namespace)
        node, num_bytes, _ = tree.match(tokens[: end * TOKEN_BYTES]) if tree else (None, 0, b"")
        reached = num_bytes // TOKEN_BYTES
        if node is None or reached <= start:
            return Grant(0, 0, end - start)
        expires_s = None if retention.ttl_s is None else self._clock() + retention.ttl_s
        num_blocks = start // self.block_size
        ends_s: list[float] = []
        for part in self._retained.cut_range(node, num_blocks, -(-reached // self.block_size)):
            granted = self._retained.grant(part, retention.priority, expires_s, only_raise=only_raise)
            if granted is not None:
                self._evictor.requeue(granted)
                num_blocks += granted.num_blocks
                if granted.expiry_entry is not None:
                    ends_s.append(granted.expiry_entry[0])
            if granted is not part:
                break
        granted_tokens = max(0, min(reached, num_blocks * self.block_size) - start)
        refused_tokens = reached - start - granted_tokens
        return Grant(granted_tokens, refused_tokens, end - reached, min(ends_s, default=None))

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
        return self._evictor.evict(num_blocks, tenant)

    def purge(self, *, tenant: str | None = None, adapter: str | None = None, salt: str | None = None) -> Purged:
        """Forget whole namespaces at once. Nothing of them is found afterwards.

        Requests that use them go on with the blocks that they have, and publish nothing more.

        Args:
            tenant, adapter, salt: which; None is any.

        Complexity: O(namespaces + open leases + nodes purged * log leaves).
        """
        for lease in self._leases:
            lease.is_revoked = lease.is_revoked or lease.namespace.is_among(tenant, adapter, salt)
        trees = [tree for tree in self._trees.values() if tree.namespace.is_among(tenant, adapter, salt)]
        purged = [self._evictor.purge(tree) for tree in trees]
        return Purged(sum(freed for freed, _ in purged), sum(pinned for _, pinned in purged))

    # -- proof -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Recount everything from the open leases and the trees. Complexity: O(everything).

        Raises:
            InvariantViolation: the message names what does not add up.
        """
        self._evictor.expire()
        audit(self._trees.values(), self._leases, self.pool, self.tenants, self._retained, self._evictor)


def _no_tokens(tokens: bytes) -> InvalidRequest:
    return InvalidRequest(f"tokens: expected one or more uint32 token ids, got {len(tokens)} bytes")


def _num_unpinned_blocks(node: Node | None) -> int:
    """Blocks of a path that no lease pins yet. Complexity: O(depth)."""
    num_blocks = 0
    while node is not None and node.pin_count == 0:
        num_blocks += node.num_blocks
        node = node.parent
    return num_blocks
