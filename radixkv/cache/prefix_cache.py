"""The prefix cache: radix trees over one block pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

from radixkv.api.miss_reason import MissReason
from radixkv.api.retention import Grant, Retention
from radixkv.cache.audit import audit
from radixkv.cache.block_pool import BlockPool
from radixkv.cache.cache_state import CacheState
from radixkv.cache.changes import Changes, Listener
from radixkv.cache.evicted_prefixes import EvictedPrefixes
from radixkv.cache.eviction_policy import EvictionPolicy
from radixkv.cache.evictor import Evictor
from radixkv.cache.held_blocks import HeldBlocks
from radixkv.cache.ledger import Ledger
from radixkv.cache.lines.probation import Probation
from radixkv.cache.lines.probation_lines import make_lines
from radixkv.cache.namespace_trees import NamespaceTrees
from radixkv.cache.node import Node
from radixkv.cache.pins import Pins
from radixkv.cache.prompt_lease import PromptLease
from radixkv.cache.public.places import Match, Places
from radixkv.cache.public.public_prefixes import PublicPrefixes
from radixkv.cache.purge import Purged, all_slices, purge, sweep
from radixkv.cache.retained_nodes import RetainedNodes
from radixkv.cache.segment_index import SegmentIndex
from radixkv.cache.tenants import Quota, Tenants
from radixkv.cache.windowed_layers import WindowedLayers
from radixkv.invocation import InvocationMarks
from radixkv.namespace import Namespace, PromptKey
from radixkv.tokens import TOKEN_BYTES, require_tokens


class PrefixCache:
    """Finds, leases, publishes, retains and evicts cached prompts. Not thread-safe: one thread owns it.

    Args:
        num_blocks: physical blocks.
        block_size: tokens a block.
        policy: decides which unused leaf is evicted first; serves this cache only. By default the least recently used.
        quotas: bounds on the blocks of some tenants. Their floors together must fit into the pool.
        default_quota: bounds on the blocks of each other tenant, without a floor.
        max_retained_blocks: blocks that may have a priority above the default; by default a fifth of the pool.
        max_kept_blocks: blocks that held leases may keep; by default half of the pool.
        max_public_blocks: blocks that public prefixes may take; by default a quarter of the pool.
        probation_share: part of the pool beyond which never reused leaves go first; with 1 the policy alone decides.
        evicted_prefixes: number of evicted prefixes to remember, to explain misses.
        listeners: are told of every change to the trees, after the cache's own parts.
        clock: seconds, never going back.
        marks: tell what invoked adapters computed.
        parts: of blocks, for layers that need less of a prompt; by default there are none.

    Attributes:
        pool, parts: the state of each block, and its parts.
        tenants: the bounds and the counters of each tenant.
        leases: the open leases.
        kept: the bounds and the counts of what held leases keep.
        max_retained_blocks: blocks that may be retained.
        segments: the nodes of all trees.
        probation: counts the blocks of leaves that were never reused.
        public: the prefixes that all tenants share.
        places: the trees in which prompts are looked up.

    Example:
        >>> cache = PrefixCache(num_blocks=8, block_size=4)
        >>> prompt = bytes(4 * 10)
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
        default_quota: Quota | None = None,
        max_retained_blocks: int | None = None,
        max_kept_blocks: int | None = None,
        max_public_blocks: int | None = None,
        probation_share: float = 1.0,
        evicted_prefixes: int = 65_536,
        listeners: Iterable[Listener] = (),
        clock: Callable[[], float] = time.monotonic,
        marks: InvocationMarks | None = None,
        parts: WindowedLayers | None = None,
    ) -> None:
        self.marks, self.block_size = marks or InvocationMarks(), block_size
        self.parts = parts or WindowedLayers()
        self.pool = BlockPool(num_blocks, self.parts.freed)
        self.tenants = Tenants(quotas or {}, default_quota)
        self._trees = NamespaceTrees(self.parts)
        self._lost = EvictedPrefixes(evicted_prefixes, self.marks)
        self.max_retained_blocks = num_blocks // 5 if max_retained_blocks is None else max_retained_blocks
        self._retained, self._clock = RetainedNodes(self.max_retained_blocks, self._cut), clock
        self.kept = HeldBlocks(num_blocks // 2 if max_kept_blocks is None else max_kept_blocks, self.tenants, self._cut)
        self.segments, policy = SegmentIndex(clock, self.marks), policy or EvictionPolicy()
        self.probation = probation = Probation(probation_share, num_blocks)
        self._lines, counting = make_lines(policy, self.tenants, probation)
        # Listeners still see the priority of what is evicted.
        self._changes = Changes((*listeners, self._retained, self.kept, policy, *counting, self._lost, self.segments))
        self._holdings = CacheState(
            block_size=block_size,
            trees=self._trees,
            pool=self.pool,
            parts=self.parts,
            tenants=self.tenants,
            policy=policy,
            lines=self._lines,
            probation=probation,
            retained=self._retained,
            kept=self.kept,
            changes=self._changes,
            clock=clock,
        )
        self._pins = Pins(self._holdings)
        self._evictor = Evictor(self._holdings, self._pins)
        self.leases = Ledger(self._holdings, self._pins, self._evictor)
        max_public = num_blocks // 4 if max_public_blocks is None else max_public_blocks
        self.public = PublicPrefixes(self._holdings, self._pins, self._evictor, self.leases, max_public)
        self.places = Places(self._holdings, self.public, self.leases)

    @property
    def num_evictable_blocks(self) -> int:
        """Published blocks that no lease keeps from eviction."""
        return self._evictor.num_evictable_blocks

    @property
    def num_pinned_blocks(self) -> int:
        """Published blocks that a lease keeps from eviction."""
        return self._pins.num_pinned_blocks

    @property
    def num_evicted_blocks(self) -> int:
        """Blocks evicted so far. Purged ones are not counted."""
        return self._evictor.num_evicted_blocks

    @property
    def num_retained_blocks(self) -> int:
        """Published blocks with a priority above the default, and those before them."""
        self._evictor.expire()
        return self._retained.num_blocks

    @property
    def num_namespaces(self) -> int:
        """Namespaces with at least one cached token."""
        return len(self._trees)

    def nodes(self) -> Iterator[Node]:
        """Iterate over the nodes of all trees, parents before children. They may not change meanwhile."""
        return (node for tree in self._trees.values() for node in tree.nodes())

    def match(self, namespace: Namespace, tokens: bytes) -> Match:
        """Find the longest prefix that can be reused, to the token. Changes nothing.

        The last token is never reused: its logits are the answer, and they are not cached.

        Raises:
            InvalidRequest: `tokens` is empty or not whole tokens.

        Complexity: about one memory comparison of the prompt.
        """
        return self.places.match(namespace, tokens)

    def explain(
        self, namespace: Namespace, tokens: bytes, cached_tokens: int, former: Sequence[PromptKey] = ()
    ) -> MissReason:
        """Tell why the tokens after the cached ones have to be computed. Complexity: O(tokens) for each namespace.

        ADAPTER_CHANGED is told of what is cached under a `former` key of the prompt, or was until that drained.
        """
        return self.places.explain(self._lost, PromptKey(namespace, tokens), cached_tokens, former)

    def lease(
        self,
        namespace: Namespace,
        tokens: bytes,
        *,
        read: bool = True,
        num_spared_blocks: int = 0,
        num_expected_tokens: int = 0,
        is_resumed: bool = False,
    ) -> PromptLease:
        """Take the right to a prompt's blocks: cached ones are kept, missing ones are allocated.

        Unused leaves are evicted if free blocks run short. If evicting would not suffice, nothing is evicted and
        nothing changes. Reuse never makes a lease fail that would succeed without it: in a full cache the block that is
        shared in part may be given up, so `cached_tokens` may be less than a match found.

        Args:
            namespace: where to look and to publish.
            tokens: the prompt, little-endian uint32 bytes; at least one token.
            read: reuse cached blocks.
            num_spared_blocks: blocks that must be free or evictable after this.
            num_expected_tokens: length that the lease will probably reach; adjacent blocks are left free for that.
            is_resumed: the prompt had a lease before, of which this one goes on; so what it finds is no reuse.

        Returns:
            A lease that the caller must close.

        Raises:
            InvalidRequest: `tokens` is empty or not whole tokens.
            OutOfBlocks, QuotaExceeded: free and evictable blocks together are too few.
        """
        return self.places.lease(namespace, tokens, read, num_spared_blocks, num_expected_tokens, is_resumed)

    def retain(self, namespace: Namespace, tokens: bytes, retention: Retention, *, only_raise: bool = False) -> Grant:
        """Give a cached range a priority: unused leaves of lower priority are evicted first, whatever the policy.

        The range is widened to whole blocks. Blocks above the default priority, and all blocks before them, count
        against `max_retained_blocks`; if the range does not fit, as much of its beginning is granted as does. A
        priority lasts until it expires, is replaced, or the block is evicted because nothing worth less is left.

        A node has one priority: a high one for a short time replaces a low one for a long time. A range that ends in a
        block covers one of the cached blocks that begin so. A path of hundreds of nodes is cut no further.

        Args:
            namespace: where to look.
            tokens: the prompt, little-endian uint32 bytes.
            retention: range, priority and time to live.
            only_raise: leave nodes that have a higher priority, the default included, or the same one for longer.

        Raises:
            InvalidRequest: `tokens` is not whole tokens, or a field of `retention` is out of range.

        Complexity: O(depth + log leaves) for each node of the range, and up to three cuts over the path's tokens.
        """
        self._evictor.expire()
        require_tokens(tokens)
        start, end = retention.range_in(len(tokens) // TOKEN_BYTES)
        place = self.places.of(namespace, tokens)
        first = place.start_tokens
        public = Grant(max(0, min(end, first) - start), 0, 0)  # which stays as long as the operator wishes
        start, end = max(0, start - first), max(0, end - first)
        expires_s = None if retention.ttl_s is None else self._clock() + retention.ttl_s
        own, nodes = self._retained.grant_tokens(
            self._trees.get(place.namespace), place.tokens, start, end, retention.priority, expires_s, only_raise
        )
        for node in nodes:
            self._lines.requeue(node)
        return public.joined(own)

    def expire(self) -> None:
        """End priorities whose time has come, 256 at most."""
        self._evictor.expire()

    def evict(self, num_blocks: int, *, tenant: str | None = None) -> int:
        """Free blocks of unused leaves, in the policy's order and from each leaf's end.

        Args:
            num_blocks: blocks to free.
            tenant: the tenant that needs them. Its own floor does not protect its leaves; the floors of others do.
                With None all floors hold.

        Returns:
            Blocks freed: `num_blocks`, or fewer if no more are evictable.

        Complexity: O(log leaves + tenants with a quota) a leaf, and a pass over the path of a shortened one.
        """
        return self._evictor.evict(num_blocks, tenant)

    def purge(self, *, tenant: str | None = None, adapter: str | None = None, salt: str | None = None) -> Purged:
        """Forget whole namespaces at once. No later request finds anything of them.

        Requests that use them go on with the blocks that they have, and publish nothing more. None matches any name.
        """
        return all_slices(self.purging(tenant=tenant, adapter=adapter, salt=salt))

    def purging(
        self, *, tenant: str | None = None, adapter: str | None = None, salt: str | None = None
    ) -> Generator[None, None, Purged]:
        """Forget whole namespaces, in slices between which the cache may be used; see `namespaces/purge.py`."""
        return purge(self._trees, self.leases.open, self._evictor, self.segments, tenant, adapter, salt)

    def draining(self, adapter: str) -> Generator[None, None, Purged]:
        """Forget what was cached with an adapter that no request has, and explain later misses of its names."""
        self.public.unregister_all(adapter)
        if self.marks.has(adapter):
            return self._lost.draining(adapter, sweep(self.segments, self._evictor, self.marks, adapter))
        return self._lost.draining(adapter, self.purging(adapter=adapter))

    def check(self) -> None:
        """Recount everything, and raise InvariantViolation if something does not add up. Complexity: O(everything)."""
        self._evictor.expire()
        audit(self._holdings, self.leases, self._pins)
        self.segments.check(self.nodes())
        self.public.check()

    def _cut(self, node: Node, num_blocks: int) -> Node:
        """Cut a node after its first `num_blocks` blocks for the cache's own purposes. Returns the upper half."""
        upper = self._trees[node.owner.namespace].cut(node, num_blocks)
        self._changes.cut(node)
        return upper
