"""The prefix cache: trees and block pool, kept in step. Only what it is made of changes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from radixkv.api.miss_reason import MissReason
from radixkv.api.retention import Grant, Retention
from radixkv.blocks import BlockIds
from radixkv.cache.audit import audit
from radixkv.cache.block_pool import BlockPool
from radixkv.cache.evictor import Evictor
from radixkv.cache.lease import Lease
from radixkv.cache.ledger import Leases
from radixkv.cache.lost_prefixes import LostPrefixes
from radixkv.cache.policies.policy import EvictionPolicy
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.retained_nodes import RetainedNodes
from radixkv.cache.tenants import Quota, Tenants
from radixkv.namespace import Namespace
from radixkv.tokens import TOKEN_BYTES, prefix_fingerprint, require_tokens


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

    Attributes:
        block_size: as given.
        pool: who has which block.
        tenants: what each has, and may have.
        leases: those that are open.

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
        self._policy = policy or EvictionPolicy()
        self._lost = LostPrefixes(evicted_prefixes)
        self._clock = clock
        self._retained = RetainedNodes(
            num_blocks // 5 if max_retained_blocks is None else max_retained_blocks, on_cut=self._policy.cut
        )
        self._evictor = Evictor(self._trees, self.pool, self.tenants, self._policy, self._retained, self._lost, clock)
        self.leases = Leases(
            self._trees, block_size, self.pool, self.tenants, self._policy, self._retained, self._evictor, clock
        )

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
        _, _, cached_tokens, packed = self.leases.find(namespace, tokens)
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

    # -- leasing ---------------------------------------------------------------------------------------------------

    def lease(self, namespace: Namespace, tokens: bytes, *, read: bool = True, num_spared_blocks: int = 0) -> Lease:
        """Take the right to a prompt's blocks: what is cached stays, what is missing is allocated.

        Unused leaves are evicted if free blocks run short. If they would not suffice, nothing is evicted and nothing
        changes. Reuse never makes a lease fail that would succeed without it: in a full cache the block that is
        shared in part may be given up, so that `cached_tokens` is less than a match found.

        Args:
            namespace: where to look and to publish.
            tokens: the prompt, little-endian uint32 bytes; at least one token.
            read: reuse cached blocks.
            num_spared_blocks: so many must be free or evictable after this.

        Returns:
            A lease that the caller must close.

        Raises:
            InvalidRequest: `tokens` is empty or not whole tokens.
            OutOfBlocks, QuotaExceeded: free and evictable blocks together are too few.
        """
        return self.leases.lease(namespace, tokens, read=read, num_spared_blocks=num_spared_blocks)

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
        require_tokens(tokens)
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
        for lease in self.leases:
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
        audit(self._trees.values(), self.leases, self.pool, self.tenants, self._retained, self._evictor)
