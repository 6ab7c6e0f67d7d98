"""The prefix cache: radix trees over one block pool."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from radixkv.api.awaits import Awaits
from radixkv.api.explanation import Divergence, NamedBranch
from radixkv.api.miss_reason import MissReason
from radixkv.api.retention import Grant, Retention
from radixkv.blocks import BlockCopy, BlockIds
from radixkv.cache.audit import audit
from radixkv.cache.block_pool import BlockPool
from radixkv.cache.branches import MAX_BRANCHES, branches_through, find_divergence
from radixkv.cache.cache_state import CacheState
from radixkv.cache.changes import Changes, Listener
from radixkv.cache.evicted_prefixes import EvictedPrefixes
from radixkv.cache.eviction_policy import EvictionPolicy
from radixkv.cache.eviction_queue import EvictionQueue
from radixkv.cache.evictor import Evictor
from radixkv.cache.held_blocks import HeldBlocks, HeldPath
from radixkv.cache.lease import Lease, OpenLeases
from radixkv.cache.namespace_trees import NamespaceTrees
from radixkv.cache.node import NO_NUMBER, Node, Session
from radixkv.cache.pins import Pins
from radixkv.cache.public_prefixes import PublicPrefix, PublicPrefixes, PublicRoot
from radixkv.cache.purge import Purged, all_slices, drop_unused, purge, purge_invoked
from radixkv.cache.radix_tree import NO_ROOT_PREFIX, RootPrefix
from radixkv.cache.recurrent_states import StateSlots
from radixkv.cache.retained_nodes import RetainedNodes
from radixkv.cache.segment_index import SegmentIndex
from radixkv.cache.sessions import Sessions
from radixkv.cache.tenant_ledger import TenantLedger
from radixkv.cache.tenants import Quota, Tenants
from radixkv.cache.windowed_layers import WindowedLayers, WindowLease
from radixkv.errors import CapacityError
from radixkv.invocation import InvocationMarks
from radixkv.namespace import PUBLIC_TENANT, Namespace, PromptKey
from radixkv.tokens import TOKEN_BYTES, prefix_fingerprint, require_tokens

_MAX_DROPPED_NODES = 1024
_MIN_WAIT_RATIO = 3  # a session loses blocks to another one only if its expected wait is longer by this factor
_MAX_SESSION_ENDS = 2  # ends of branches of a session with which its next prompt is compared
_MAX_CHANGED_NODES = 128  # in one slice of a retention, which takes about 2 ms


class Match(NamedTuple):
    """The part of a prompt that is cached. Valid until the cache changes.

    Attributes:
        cached_tokens: tokens that can be reused; at most all but the last one.
        block_ids: int32 ids of the `ceil(cached_tokens / block_size)` blocks that hold them. Read-only.
        num_nodes: nodes that were visited.
    """

    cached_tokens: int
    block_ids: BlockIds
    num_nodes: int


class _TreeMatch(NamedTuple):
    """The part of a prompt that is cached in one tree, and where the prompt is published.

    Attributes:
        namespace: namespace of the tree.
        cached_tokens: tokens that can be reused, those of a public prefix above the tree included.
        public_prefix: the public prefix above the tree; None for most trees.
        root_prefix: the tokens and blocks of the public prefix that are above the tree; empty for most trees.
        root_tokens: number of tokens in `root_prefix`.
        node: the deepest node of the tree that shares a reused token; None if none does.
        found_bytes: bytes of the prompt that are in the tree, or in the public prefix above it, whether or not all of
            them can be reused.
        packed_block_ids: the blocks that hold the cached tokens, and perhaps more.
        num_nodes: nodes that were visited.
    """

    namespace: Namespace
    cached_tokens: int
    public_prefix: PublicPrefix | None
    root_prefix: RootPrefix
    root_tokens: int
    node: Node | None
    found_bytes: int
    packed_block_ids: bytes
    num_nodes: int


class PrefixCache:
    """Finds, leases, publishes, retains and evicts cached prompts. Not thread-safe: one thread owns it.

    Args:
        num_blocks: physical blocks.
        block_size: tokens per block.
        policy: decides which unused leaf is evicted first; serves this cache only. By default the least recently used.
        quotas: bounds on the blocks of some tenants. Their floors together must fit into the pool.
        default_quota: bounds on the blocks of each other tenant, without a floor.
        max_retained_blocks: blocks that may have a priority above the default; by default a fifth of the pool.
        max_held_blocks: blocks that held leases may keep; by default half of the pool.
        max_public_blocks: blocks that public prefixes may take; by default a quarter of the pool.
        probation_share: share of the pool beyond which leaves that were never reused are evicted first; with 1 only the
            policy decides.
        max_evicted_prefixes: number of evicted prefixes to remember, to explain misses.
        max_session_prompt_bytes: memory of the last prompts of sessions to remember, to load them from tiers; see
            `Sessions`.
        listeners: notified of every change to the trees, before the cache's own listeners, so that they still see the
            priority of an evicted node.
        clock: seconds, monotonic.
        marks: mark the tokens that an invoked adapter computes (an adapter that applies only from some position of the
            prompt on); see `radixkv.invocation`.
        windows: pools for windowed layers; by default there are none.
        state_slots: the slots of recurrent states and of their snapshots; None for a model without them.
        ledger: accounts what each tenant uses; None without statements.

    Attributes:
        pool: the state of each block.
        windows, state_slots, ledger: see above.
        tenants: the bounds and the counters of each tenant.
        leases: the open leases, held ones included.
        held: the bounds and the counts of blocks that held leases keep.
        max_retained_blocks: blocks that may be retained.
        segments: an index of the nodes of all trees.
        sessions: the sessions of all tenants.
        public: the prefixes that all tenants share.

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
        max_held_blocks: int | None = None,
        max_public_blocks: int | None = None,
        probation_share: float = 1.0,
        max_evicted_prefixes: int = 65_536,
        max_session_prompt_bytes: int = 0,
        listeners: Iterable[Listener] = (),
        clock: Callable[[], float] = time.monotonic,
        marks: InvocationMarks | None = None,
        windows: WindowedLayers | None = None,
        state_slots: StateSlots | None = None,
        ledger: TenantLedger | None = None,
    ) -> None:
        self.block_size = block_size
        self.marks = marks or InvocationMarks()
        self.windows = windows or WindowedLayers()
        self.state_slots = state_slots
        has_extensions = bool(self.windows.pools) or state_slots is not None
        self.pool = BlockPool(num_blocks, self._free_parts_and_snapshots if has_extensions else None)
        self.windows.connect(self.pool)
        self.ledger = ledger
        self.tenants = Tenants(quotas or {}, default_quota, ledger)
        self.max_retained_blocks = num_blocks // 5 if max_retained_blocks is None else max_retained_blocks
        self._trees = NamespaceTrees(block_size, lambda lower: self._changes.cut(lower))
        max_held_blocks = num_blocks // 2 if max_held_blocks is None else max_held_blocks
        self.held = HeldBlocks(max_held_blocks, self.tenants, self._trees)
        self.segments = SegmentIndex(clock, self.marks)
        self.sessions = Sessions(max_session_prompt_bytes)
        self._clock = clock
        self._evicted = EvictedPrefixes(max_evicted_prefixes, self.marks)
        self._retained = RetainedNodes(self.max_retained_blocks, self._trees)
        self._policy = policy = policy or EvictionPolicy()
        self._queue = EvictionQueue(policy, self.tenants, probation_share, num_blocks)
        part_shares = [pool.share for pool in self.windows.pools if pool.share is not None]
        probation_listeners = [self._queue] if self._queue.has_probation else []
        # `RetainedNodes` resets the priority of an evicted node, so listeners that read the priority come before it.
        own_listeners = (
            self._retained,
            self.held,
            policy,
            *probation_listeners,
            self._evicted,
            self.segments,
            self.sessions,
        )
        self._changes = Changes((*listeners, *own_listeners, *part_shares))
        self._pins = Pins(
            block_size=block_size,
            trees=self._trees,
            pool=self.pool,
            policy=policy,
            queue=self._queue,
            changes=self._changes,
            clock=clock,
        )
        self._evictor = Evictor(
            trees=self._trees,
            pool=self.pool,
            tenants=self.tenants,
            policy=policy,
            queue=self._queue,
            retained=self._retained,
            changes=self._changes,
            evicted=self._evicted,
            pins=self._pins,
            windows=self.windows,
            clock=clock,
        )
        self._state = CacheState(
            block_size=block_size,
            trees=self._trees,
            pool=self.pool,
            windows=self.windows,
            state_slots=state_slots,
            tenants=self.tenants,
            queue=self._queue,
            retained=self._retained,
            held=self.held,
            sessions=self.sessions,
            changes=self._changes,
            pins=self._pins,
            evictor=self._evictor,
            clock=clock,
        )
        self.leases = OpenLeases(self._state)
        max_public_blocks = num_blocks // 4 if max_public_blocks is None else max_public_blocks
        self.public = PublicPrefixes(self._state, self.leases, max_public_blocks)

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
    def num_probation_blocks(self) -> int:
        """Published blocks of leaves that were never reused and that no lease uses."""
        return self._queue.num_probation_blocks

    @property
    def num_evicted_probation_blocks(self) -> int:
        """Blocks evicted so far from leaves that were never reused."""
        return self._queue.num_evicted_probation_blocks

    @property
    def num_retained_blocks(self) -> int:
        """Published blocks with a priority above the default, and the blocks before them on their paths."""
        self._evictor.expire()
        return self._retained.num_blocks

    @property
    def num_namespaces(self) -> int:
        """Trees with at least one cached token: one per namespace, and further ones below public prefixes."""
        return len(self._trees)

    def nodes(self) -> Iterator[Node]:
        """Iterate over the nodes of all trees, parents before children. The trees must not change meanwhile."""
        return (node for tree in self._trees.values() for node in tree.nodes())

    def match(self, namespace: Namespace, tokens: bytes) -> Match:
        """Find the longest prefix that can be reused; it may end within a block. Changes nothing.

        The last token is never reused: its logits are the answer, and they are not cached.

        Raises:
            InvalidRequest: `tokens` is empty or not whole tokens.

        Complexity: about one memory comparison of the prompt.
        """
        match = self._find(namespace, tokens)
        num_blocks = -(-match.cached_tokens // self.block_size)
        block_ids = np.frombuffer(match.packed_block_ids, np.int32, num_blocks)
        return Match(match.cached_tokens, block_ids, match.num_nodes)

    def _find(self, namespace: Namespace, tokens: bytes) -> _TreeMatch:
        """Return the longest match of `_find_all`."""
        return self._find_all(namespace, tokens)[0]

    def _find_all(self, namespace: Namespace, tokens: bytes, read: bool = True) -> Sequence[_TreeMatch]:
        """Look a prompt up in the tree of its namespace, and below the public prefixes that it begins with.

        A prompt that begins with a public prefix may have more tokens in the tree of its own namespace than in the tree
        below the prefix, because it was cached there before the prefix was registered.

        Args:
            namespace, tokens: the prompt.
            read: if False, the trees are not searched, and the result has no cached tokens.

        Returns:
            The match in each tree, the longest first. At least one.

        Raises:
            InvalidRequest: `tokens` is empty or not whole tokens.
        """
        require_tokens(tokens)
        own = self._find_in_tree(namespace, tokens, None, read)
        if not read or not self.public.are_any_computed:
            return (own,)
        rooted = [self._find_in_tree(root.namespace, tokens, root) for root in self.public.roots(namespace, tokens)]
        return sorted((*rooted, own), key=lambda each: (each.cached_tokens, each.root_tokens), reverse=True)

    def _find_in_tree(
        self, namespace: Namespace, tokens: bytes, root: PublicRoot | None, read: bool = True
    ) -> _TreeMatch:
        """Look a prompt up in the tree of a namespace, if it exists, and in the public prefix above that tree."""
        root_prefix, public_prefix = (NO_ROOT_PREFIX, None) if root is None else (root.root_prefix, root.prefix)
        root_tokens = len(root_prefix.tokens) // TOKEN_BYTES
        tree = self._trees.get(namespace) if read else None
        if tree is None:
            node, found_bytes, packed, num_nodes = None, len(root_prefix.tokens), root_prefix.block_ids, 0
        else:
            node, found_bytes, packed, num_nodes = tree.match(tokens)
        cached_tokens = min(found_bytes, len(tokens) - TOKEN_BYTES) // TOKEN_BYTES
        if self.windows.pools or self.state_slots is not None:
            cached_tokens = self._num_reusable_tokens(packed, cached_tokens)
        if root is not None and cached_tokens < root_tokens + root.num_more_tokens:
            # The public prefix itself has more of this prompt than the tree below it: copy its next block.
            cached_tokens = root_tokens + root.num_more_tokens
            packed = root_prefix.block_ids + root.next_block
            node = None
        elif cached_tokens == root_tokens:
            node = None  # the tree has nothing that can be reused, so a lease pins none of its nodes
        return _TreeMatch(
            namespace, cached_tokens, public_prefix, root_prefix, root_tokens, node, found_bytes, packed, num_nodes
        )

    def _num_reusable_tokens(self, packed_block_ids: bytes, num_tokens: int) -> int:
        """Return how many cached tokens can be reused: all, unless windowed layers or states lack something."""
        if self.state_slots is None:
            return self.windows.num_reusable_tokens(packed_block_ids, num_tokens)
        block_ids = np.frombuffer(packed_block_ids, dtype=np.int32)
        previous_num_tokens = -1
        # A prefix that is shortened for windows may end where there is no snapshot, and vice versa.
        while previous_num_tokens != num_tokens:
            previous_num_tokens = num_tokens
            num_tokens = self.windows.num_reusable_tokens(packed_block_ids, num_tokens)
            num_tokens = self.state_slots.num_reusable_tokens(block_ids, num_tokens)
        return num_tokens

    def num_found_tokens(self, namespace: Namespace, tokens: bytes) -> int:
        """Count the tokens before the last one that are cached in the namespace, whether or not they can be reused.

        Cached tokens cannot be reused if the K/V of windowed layers were evicted, or if there is no snapshot of a
        recurrent state. Tokens of public prefixes are not counted.
        """
        return min(self._find_node(namespace, tokens)[1], len(tokens) - TOKEN_BYTES) // TOKEN_BYTES

    def _find_node(self, namespace: Namespace, tokens: bytes) -> tuple[Node | None, int]:
        """Return the deepest node that shares a token with a prompt, and how many bytes are cached, reusable or not."""
        tree = self._trees.get(namespace)
        return (None, 0) if tree is None else tree.match(tokens)[:2]

    def found_blocks(self, namespace: Namespace, tokens: bytes) -> BlockIds:
        """Return the ids of the whole blocks among the tokens that `num_found_tokens` counts, int32."""
        tree = self._trees.get(namespace)
        if tree is None:
            return np.empty(0, np.int32)
        _, num_bytes, packed, _ = tree.match(tokens)
        num_tokens = min(num_bytes, len(tokens) - TOKEN_BYTES) // TOKEN_BYTES
        return np.frombuffer(packed, np.int32, num_tokens // self.block_size)

    def num_root_tokens(self, namespace: Namespace, tokens: bytes, *, read: bool = True) -> int:
        """Return the maximum number of tokens, in whole blocks, that a prompt can reuse from a public prefix."""
        return max(match.root_tokens for match in self._find_all(namespace, tokens, read))

    def explain(
        self, namespace: Namespace, tokens: bytes, cached_tokens: int, former: Sequence[PromptKey] = ()
    ) -> MissReason:
        """Return why the tokens after the cached ones have to be computed. Complexity: O(tokens) for each namespace.

        Args:
            namespace, tokens: the prompt.
            cached_tokens: tokens of the prompt that are reused.
            former: the keys of the same prompt with the adapters that had the requested name earlier, the latest first.
                The reason is ADAPTER_CHANGED if more of the prompt is cached under one of these keys, or was cached
                there until that adapter was purged.
        """
        if self.state_slots is not None:
            found_tokens = self.num_found_tokens(namespace, tokens)
            if cached_tokens < found_tokens // self.block_size * self.block_size:
                return MissReason.NO_STATE
            cached_tokens = found_tokens
        if cached_tokens >= len(tokens) // TOKEN_BYTES - 1:
            return MissReason.NONE
        match = self._find(namespace, tokens)
        if match.public_prefix is not None:
            former = [PromptKey(match.namespace, each.tokens) for each in former if each.namespace == namespace]
            cached_tokens = max(match.root_tokens, cached_tokens)
        if self.windows.pools and match.found_bytes > cached_tokens * TOKEN_BYTES:
            return MissReason.NO_WINDOW
        next_end = (cached_tokens // self.block_size + 1) * self.block_size * TOKEN_BYTES
        reason = self._evicted.reason(prefix_fingerprint(match.namespace.seed, tokens, next_end))
        if reason is not None:  # an adapter that was unloaded and loaded again with the same weights has not changed
            return MissReason.EVICTED if reason is MissReason.ADAPTER_CHANGED else reason
        for key in former:
            reason = self._evicted.reason(prefix_fingerprint(key.namespace.seed, key.tokens, next_end))
            if reason is MissReason.ADAPTER_CHANGED:
                return reason
            if self._find_in_tree(key.namespace, key.tokens, None).cached_tokens > cached_tokens:
                return MissReason.ADAPTER_CHANGED
        return MissReason.DIVERGED if cached_tokens > match.root_tokens else MissReason.COLD

    def is_evicted_by_self(self, namespace: Namespace, tokens: bytes, cached_tokens: int) -> bool | None:
        """Return whether the tokens after the cached ones were evicted for their own tenant.

        True if they were evicted to make room for other blocks of this tenant, or at its request; False if they were
        evicted for another tenant; None if that is unknown.

        Args:
            namespace, tokens: the prompt.
            cached_tokens: tokens that are reused.

        Complexity: that of `match`.
        """
        match = self._find(namespace, tokens)
        end = (cached_tokens // self.block_size + 1) * self.block_size * TOKEN_BYTES
        return self._evicted.is_by_self(prefix_fingerprint(match.namespace.seed, tokens, end))

    def divergence(self, namespace: Namespace, tokens: bytes) -> Divergence:
        """Find where a prompt diverges from the cached branches of its namespace, and these branches. Changes nothing.

        Branches are what the tenant itself has cached, without the tokens of public prefixes before them.

        Raises:
            InvalidRequest: `tokens` is empty or not whole tokens.

        Complexity: see `find_divergence`.
        """
        match = self._find(namespace, tokens)
        tree = self._trees.get(match.namespace)
        shared_tokens = max(match.cached_tokens, match.found_bytes // TOKEN_BYTES)
        if tree is None or match.found_bytes < match.cached_tokens * TOKEN_BYTES:  # it diverges within a public prefix
            return Divergence(shared_tokens)
        return find_divergence(tree, tokens, self._clock(), self.marks)

    def branches_at(
        self, segment_numbers: Iterable[int], tenant: str, session_id: str = "", max_branches: int = MAX_BRANCHES
    ) -> list[NamedBranch]:
        """Return branches of a tenant through given segments, with the tokens of public prefixes before them.

        Changes nothing.

        Args:
            segment_numbers: numbers of segments, the most important one first; those of other tenants are left out.
            tenant: the tenant.
            session_id: a session of the tenant; the two branches that it used last come first. Empty for none.
            max_branches: maximum number of branches to return.

        Complexity: see `branches_through`; in addition, all nodes that only the session has used are visited.
        """
        session = self.sessions.get(tenant, session_id) if session_id else None
        nodes = [] if session is None else session.ends
        nodes = heapq.nlargest(_MAX_SESSION_ENDS, nodes, key=lambda each: each.last_used_s)
        for number in segment_numbers:
            node = self.segments.node_with(number)
            if node is not None and node.owner.namespace.tenant == tenant:
                nodes.append(node)
        return branches_through(nodes, max_branches, self._clock())

    def lease(
        self,
        namespace: Namespace,
        tokens: bytes,
        *,
        read: bool = True,
        num_headroom_blocks: int = 0,
        num_private_blocks: int = 0,
        num_expected_tokens: int = 0,
        is_resumed: bool = False,
        is_prefetch: bool = False,
        prior_use_s: float | None = None,
        session_id: str = "",
        require_path: Callable[[HeldPath, int], None] | None = None,
    ) -> Lease:
        """Open a lease of a prompt: cached blocks are pinned, missing blocks are allocated.

        Unused leaves are evicted if there are too few free blocks. If that would not suffice, nothing is evicted and
        nothing changes. A lease that would succeed without reuse also succeeds with it. Therefore `cached_tokens` may
        be less than `match` finds: in a full cache, a partly matched block may not be reused, and a prompt that begins
        with a public prefix may be leased below the prefix although the tenant's own tree has more of it, because
        pinning the copy of the prefix in that tree would leave too little room.

        Args:
            namespace: where to look and to publish.
            tokens: the prompt, little-endian uint32 bytes; at least one token.
            read: reuse cached blocks.
            num_headroom_blocks: blocks that must still be free or evictable after the lease is opened, for the other
                running requests.
            num_private_blocks: blocks that the caller reserves next with `Lease.reserve_private`, which then succeeds.
            num_expected_tokens: length that the lease will probably reach; adjacent blocks are left free for that.
            is_resumed: the request had a lease of this prompt before, so the tokens it finds do not count as reuse.
            is_prefetch: the lease only loads blocks for a later request. It does not count as a use by its session:
                the session's waits and its last prompt stay as recorded, and no session is created. If the
                session is unknown, the lease belongs to the session of the last cached node of the prompt, if any.
            prior_use_s: time of the last use of the prompt, if the policy should not count the lease as a use: it then
                continues to wait for the next use as if no block had been evicted. None if the lease counts.
            session_id: the conversation that the request belongs to, a name chosen by the tenant; empty for none.
            require_path: for a lease that will be held after its request; called before the lease is opened, with the
                blocks that the held lease would keep, and the number of nodes that were visited to find them. Raises
                OutOfBlocks or QuotaExceeded if these blocks may not be held.

        Returns:
            A lease that the caller must close.

        Raises:
            InvalidRequest: `tokens` is empty or not whole tokens.
            OutOfBlocks, QuotaExceeded: free and evictable blocks together are too few, too many parts of windowed
                layers are reserved, or `require_path` raised the error.
        """
        num_tokens = len(tokens) // TOKEN_BYTES
        max_tokens = max(num_expected_tokens, num_tokens)
        keeps_all = namespace.tenant == PUBLIC_TENANT
        if self.windows.pools:
            self.windows.require_room(max_tokens, keeps_all=keeps_all)
        matches = self._find_all(namespace, tokens, read)
        tenant = namespace.tenant
        usage = self.tenants[tenant]
        num_blocks = -(-num_tokens // self.block_size)
        num_reserved_blocks = 0
        if self.windows.shares_memory:
            num_reserved_blocks = self.windows.num_blocks_to_reserve(max_tokens, keeps_all=keeps_all)
        num_takeable_blocks = self._evictor.num_takeable_blocks(tenant, usage, num_headroom_blocks)
        num_takeable_blocks -= num_private_blocks + num_reserved_blocks

        # Use the longest match with which the lease fits.
        shortages: list[int] = []
        refusals: list[CapacityError] = []
        for match in matches:
            node, cached_tokens, num_missing_blocks = self._fit(match, num_blocks, num_takeable_blocks)
            try:
                if require_path is not None:
                    require_path(HeldPath(node, cached_tokens // self.block_size, num_blocks), match.num_nodes)
            except CapacityError as error:
                refusals.append(error)
                continue
            if not num_missing_blocks:
                break
            shortages.append(num_missing_blocks)
        else:
            if shortages:
                raise self._evictor.shortage_error(min(shortages), tenant, usage, num_headroom_blocks)
            raise refusals[0]

        # From here on, the call succeeds and changes the cache. First record the use of the matched path, and pin it.
        packed_block_ids = match.packed_block_ids
        found_tokens = min(match.found_bytes, len(tokens) - TOKEN_BYTES) // TOKEN_BYTES
        num_new_blocks = num_blocks - cached_tokens // self.block_size
        if self.windows.pools and read and not is_resumed:
            self.windows.record_lookup(match.namespace, tokens, packed_block_ids, found_tokens, match.cached_tokens)
        now_s = self._clock()
        session = None
        if is_prefetch:
            end_node, _ = self._find_node(match.namespace, tokens)  # `node` is None if nothing can be reused
            session = self.sessions.enter_prefetch(tenant, session_id, end_node)
        elif session_id:
            session = self.sessions.enter(tenant, session_id, now_s)
        node_used_s = 0.0
        if node is not None:
            node_used_s = node.last_used_s
            if self.sessions.num_nodes:
                is_whole = node.start_bytes + len(node.tokens) <= match.found_bytes
                self.sessions.record_use(node if is_whole else node.parent, session)
            if prior_use_s is None:
                self._changes.used(node, match.found_bytes, now_s)
                self._queue.record_hit(node, match.found_bytes, is_resumed)
                self._retained.renew(node, match.found_bytes, now_s)
            else:
                self._policy.loaded_ahead(node, match.found_bytes)
            self._pins.pin(node)

        # Allocate the other blocks.
        num_shared_blocks, num_copied_tokens = divmod(cached_tokens, self.block_size)
        reused_block_ids = np.frombuffer(packed_block_ids, np.int32, num_shared_blocks + (num_copied_tokens > 0))
        windows: Sequence[WindowLease] = ()
        if self.windows.pools:  # first, so that `make_room` evicts no K/V of windowed layers that is reused
            windows = self.windows.pin(
                reused_block_ids, cached_tokens, max_tokens, keeps_all=keeps_all, found_tokens=found_tokens
            )
        self._evictor.make_room(num_new_blocks, tenant, usage, windows)
        self.windows.reserve(windows)
        last_reused_id = int(reused_block_ids[-1]) if reused_block_ids.size else None
        room = self._state.num_room_blocks(num_expected_tokens, num_shared_blocks + num_new_blocks)
        new_block_ids = self.pool.acquire(num_new_blocks, after=last_reused_id, room=room)
        copy = None
        if num_copied_tokens:
            copy = BlockCopy(source=int(reused_block_ids[num_shared_blocks]), target=int(new_block_ids[0]))
        usage.take(num_new_blocks)
        usage.num_hit_tokens += cached_tokens
        usage.num_miss_tokens += num_tokens - cached_tokens

        on_close = None
        public_prefix = match.public_prefix
        if public_prefix is not None:
            self.public.enter(public_prefix)
            on_close = partial(self.public.leave, public_prefix)
        # If no node of the tree is reused, all reused tokens are public, also those of the copied block.
        is_hit_all_public = public_prefix is not None and node is None
        return Lease(
            self.leases,
            match.namespace,
            usage,
            tokens,
            cached_tokens,
            np.concatenate((reused_block_ids[:num_shared_blocks], new_block_ids)),
            num_shared_blocks,
            copy=copy,
            node=node,
            node_used_s=node_used_s,
            root_prefix=match.root_prefix,
            public_tokens=cached_tokens if is_hit_all_public else match.root_tokens,
            found_tokens=max(found_tokens, matches[0].cached_tokens),
            num_expected_tokens=num_expected_tokens,
            num_nodes=match.num_nodes,
            is_resumed=is_resumed,
            is_prefetch=is_prefetch,
            prior_use_s=prior_use_s,
            session=session,
            windows=windows,
            on_close=on_close,
        )

    def _fit(self, match: _TreeMatch, num_blocks: int, num_takeable_blocks: int) -> tuple[Node | None, int, int]:
        """Decide how much of a match a lease reuses, given the blocks that it could take.

        A lease takes a block for each block of the prompt that it does not reuse. The surplus is the number of blocks
        that it could take in addition. Pinning the path takes its unpinned blocks from the evictable ones, so the
        surplus must be at least the number of these.
        If it does not, a shorter path is pinned.

        Args:
            match: a part of the prompt that is cached.
            num_blocks: blocks of the whole prompt.
            num_takeable_blocks: blocks that are free or can be evicted for the lease, the reused ones included.

        Returns:
            The end of the path to pin, the tokens to reuse, and the number of missing blocks. If any are missing, the
            lease does not fit, and the first two are those of the match.
        """
        node, cached_tokens = match.node, match.cached_tokens
        num_surplus_blocks = num_takeable_blocks - num_blocks + cached_tokens // self.block_size
        while num_surplus_blocks < self._pins.num_unpinned_blocks(node, num_surplus_blocks):
            node, cached_tokens, num_missing_blocks = self._pins.narrow(
                node, cached_tokens, num_surplus_blocks, match.root_tokens
            )
            if num_missing_blocks:
                return match.node, match.cached_tokens, num_missing_blocks
            # It may not be possible to continue after the shorter prefix, if its window was evicted.
            fewer_tokens = self._num_reusable_tokens(match.packed_block_ids, cached_tokens)
            if fewer_tokens == cached_tokens:
                break
            num_surplus_blocks -= cached_tokens // self.block_size - fewer_tokens // self.block_size
            cached_tokens = fewer_tokens
        return node, cached_tokens, 0

    def touch(self, namespace: Namespace, tokens: bytes) -> None:
        """Record a use of the cached part of a prompt, even if it cannot be reused now, so that it is evicted later."""
        node, found_bytes = self._find_node(namespace, tokens)
        if node is not None:
            self._changes.used(node, found_bytes, self._clock())
            self._pins.pin(node)
            self._pins.unpin(node)

    def retain(self, namespace: Namespace, tokens: bytes, retention: Retention, *, only_raise: bool = False) -> Grant:
        """Give a cached range a priority: unused leaves of lower priority are evicted first, whatever the policy.

        The range is widened to whole blocks. Blocks above the default priority, and all blocks before them, count
        against `max_retained_blocks`; if the range does not fit, its beginning is granted, as much of it as fits. A
        priority lasts until it expires or is replaced, or the block is evicted because no lower priority is left.

        A node has one priority: a high one for a short time replaces a low one for a long time. If the range ends
        inside a block and several cached blocks begin with these tokens, one of them gets the priority. On a path of
        more than 256 nodes, only whole nodes get the priority.

        Args:
            namespace: where to look.
            tokens: the prompt, little-endian uint32 bytes.
            retention: range, priority and time to live.
            only_raise: do not change nodes that have a higher priority (even if it is only the default), or that have
                the same priority for at least as long.

        Raises:
            InvalidRequest: `tokens` is empty or not whole tokens, or a field of `retention` is out of range.

        Complexity: O(depth + log leaves) for each node of the range, and up to three splits of nodes, each O(tokens of
        the path).
        """
        self._evictor.expire()
        require_tokens(tokens)
        start, end = retention.range_in(len(tokens) // TOKEN_BYTES)
        match = self._find(namespace, tokens)
        root_tokens = match.root_tokens
        public_grant = Grant(max(0, min(end, root_tokens) - start), 0, 0)  # public blocks are never evicted
        start = max(start, root_tokens)
        end = max(end, root_tokens)
        expires_s = None if retention.ttl_s is None else self._clock() + retention.ttl_s
        renew_s = retention.ttl_s if retention.renew else None
        own_grant, nodes = self._retained.grant_tokens(
            self._trees.get(match.namespace), tokens, start, end, retention.priority, expires_s, only_raise, renew_s
        )
        for node in nodes:
            self._queue.requeue(node)
        return public_grant.joined(own_grant)

    def has_idle_blocks(self, num_blocks: int, session: Session) -> bool:
        """Return whether blocks of a session can be loaded without evicting blocks that are probably used before them.

        That is true if enough blocks are free. It is also true if enough blocks are evictable, and the session that
        last used the next leaf to be evicted does not wait for a tool, is `session` itself, or is expected to return
        much later than `session`. Further leaves are not examined.
        """
        if self.pool.num_free >= num_blocks:
            return True
        now_s = self._clock()
        next_victim = self._queue.first((), now_s)
        if next_victim is None or self.num_evictable_blocks < num_blocks:
            return False
        owner = next_victim.session
        if next_victim.awaits is not Awaits.TOOL or owner is session:
            return True
        return owner is not None and owner.remaining_s(now_s) > _MIN_WAIT_RATIO * session.remaining_s(now_s)

    def drop(self, namespace: Namespace, tokens: bytes, start: int = 0, *, evicts: bool) -> tuple[int, int]:
        """Drop what is cached of a prompt after `start`, and everything that continues it.

        Blocks that leases use, the blocks before them, and public prefixes stay.

        Args:
            namespace, tokens: the prompt.
            start: the first token to drop, rounded up to a whole block.
            evicts: whether tiers save the blocks, as they do when blocks are evicted.

        Returns:
            The number of tokens that were dropped, in whole blocks, and the number of cached tokens of the prompt after
            `start` that stay.

        Raises:
            InvalidRequest: `tokens` is empty or not whole tokens.

        Complexity: O(log leaves) for each of at most 1,024 nodes; further nodes stay.
        """
        num_dropped_tokens = num_left_tokens = 0
        for match in self._find_all(namespace, tokens):
            dropped_tokens, left_tokens = self._drop(match, tokens, start, evicts=evicts)
            num_dropped_tokens += dropped_tokens
            num_left_tokens = max(num_left_tokens, left_tokens)
        return num_dropped_tokens, num_left_tokens

    def _drop(self, match: _TreeMatch, tokens: bytes, start: int, *, evicts: bool) -> tuple[int, int]:
        """Drop what is cached of a prompt in one tree; see `drop`."""
        tree, size = self._trees.get(match.namespace), self.block_size
        node, num_bytes = self._find_node(match.namespace, tokens)  # `match.node` is None if nothing can be reused
        first_block = -(-max(start, match.root_tokens) // size)
        if tree is None or node is None or num_bytes // TOKEN_BYTES <= first_block * size:
            return 0, 0
        num_path_blocks = node.start_bytes // (size * TOKEN_BYTES) + node.num_blocks
        top = self._trees.cut_range(node, first_block, num_path_blocks)[0]
        _, num_blocks = self._evictor.purge_leaves(tree, _MAX_DROPPED_NODES, top=top, evicts=evicts)
        _, num_left_bytes = self._find_node(match.namespace, tokens)
        return num_blocks * size, max(0, num_left_bytes // TOKEN_BYTES - first_block * size)

    def drop_session(self, session: Session, *, evicts: bool) -> int:
        """Drop the blocks that only a session has used and that no lease needs, 1,024 nodes at most; see `drop`.

        Returns:
            The number of blocks that were dropped.
        """
        num_blocks = 0
        for node in sorted(session.nodes, key=lambda each: -each.start_bytes)[:_MAX_DROPPED_NODES]:
            if node.is_evictable:
                tree = self._trees[node.owner.namespace]
                num_blocks += self._evictor.purge_leaves(tree, 1, top=node, evicts=evicts)[1]
        return num_blocks

    def drop_in_slices(
        self, tenant: str, *, adapter: str | None = None, salt: str | None = None, evicts: bool
    ) -> Generator[None, None, tuple[int, bool]]:
        """Drop what a tenant has cached in some namespaces and no lease uses, in slices; see `purge.drop_unused`.

        Sessions whose last prompt is in one of these namespaces are not loaded before their next turn.

        Args:
            tenant: the tenant.
            adapter: digest of the adapter of the namespaces; None for any.
            salt: their salt; None for any.
            evicts: as in `drop`.

        Returns:
            The number of tokens that were dropped, in whole blocks, and whether any stay because leases use them.
        """
        yield from self.sessions.expect_none_in_slices(tenant, adapter, salt)
        num_blocks, are_any_left = yield from drop_unused(
            self._trees, self._evictor, tenant, adapter, salt, evicts=evicts
        )
        return num_blocks * self.block_size, are_any_left

    def retain_in_slices(
        self, tenant: str, retention: Retention, *, adapter: str | None = None, salt: str | None = None
    ) -> Generator[None, None, Grant]:
        """Give all cached tokens of some namespaces of a tenant a priority, as `retain` does, in slices.

        Each slice examines at most 2,048 nodes, changes at most 128, and ends with a `yield`. Nodes that change between
        slices may be counted twice or not at all. If not everything may be retained, it is undefined which part is.

        Args:
            tenant: the tenant.
            retention: priority and time to live; its range is not used.
            adapter: digest of the adapter of the namespaces; None for any.
            salt: their salt; None for any.

        Raises:
            InvalidRequest: a field of `retention` is out of range.

        Complexity: O(nodes of the cache), and O(depth + log leaves) for each node of the namespaces.
        """
        retention.require_valid()
        self._evictor.expire()
        expires_s = None if retention.ttl_s is None else self._clock() + retention.ttl_s
        renew_s = retention.ttl_s if retention.renew else None
        granted_tokens = refused_tokens = num_changed = 0
        for nodes in self.segments.slices():
            for node in nodes:
                if node.segment_number == NO_NUMBER or not node.owner.namespace.is_among(tenant, adapter, salt):
                    continue
                num_tokens = len(node.tokens) // TOKEN_BYTES
                granted = None
                if not refused_tokens:
                    granted = self._retained.grant(node, retention.priority, expires_s, renew_s=renew_s)
                if granted is not None:
                    self._queue.requeue(granted)
                    granted_tokens += len(granted.tokens) // TOKEN_BYTES
                    num_tokens -= len(granted.tokens) // TOKEN_BYTES
                refused_tokens += num_tokens
                num_changed += 1
                if num_changed % _MAX_CHANGED_NODES == 0:
                    yield
            yield
        return Grant(granted_tokens, refused_tokens, 0, expires_s)

    def share(self, namespace: Namespace, tokens: bytes) -> int:
        """Record that several sessions will use a prompt: its cached blocks belong to no session, and count as reused.

        So they are not evicted first when a session ends, and are not on probation. The end is rounded up to a whole
        block. On a path of more than 256 nodes, a node of which only a part is in the prompt does not change.

        Returns:
            The number of tokens that are shared now, those of public prefixes included.

        Raises:
            InvalidRequest: `tokens` is empty or not whole tokens.

        Complexity: O(nodes of the path), and a split of a node.
        """
        match = self._find(namespace, tokens)
        node, num_bytes = self._find_node(match.namespace, tokens)
        if node is None:
            return match.root_tokens
        block_bytes = self.block_size * TOKEN_BYTES
        nodes = self._trees.nodes_in_range(node, match.root_tokens // self.block_size, -(-num_bytes // block_bytes))
        for each in nodes:
            self._share(each)
        end_bytes = nodes[-1].start_bytes + len(nodes[-1].tokens) if nodes else match.root_tokens * TOKEN_BYTES
        return min(num_bytes, end_bytes) // TOKEN_BYTES

    def share_session(self, session: Session) -> int:
        """Share what only a session has used, 1,024 nodes at most; see `share`. Returns the number of tokens."""
        nodes = sorted(session.nodes, key=lambda each: each.start_bytes)[:_MAX_DROPPED_NODES]
        for node in nodes:
            self._share(node)
        return sum(len(node.tokens) for node in nodes) // TOKEN_BYTES

    def _share(self, node: Node) -> None:
        self.sessions.record_use(node, None)
        self._queue.record_hit(node, node.start_bytes + len(node.tokens), is_resumed=False)
        if node.awaits is Awaits.NOTHING:
            self._pins.set_awaits(node, Awaits.UNKNOWN)
        self._queue.requeue(node)

    def set_awaits(self, namespace: Namespace, tokens: bytes, awaits: Awaits, start: int = 0) -> int:
        """Set what the session of a prompt waits for, as if the prompt's last lease had been closed with this value.

        Args:
            namespace, tokens: the prompt.
            awaits: what its session waits for.
            start: nodes that begin before this token stay unchanged.

        Returns:
            The number of cached tokens after `start`.

        Complexity: that of `match`, and O(log leaves) for each node of the path that no lease uses.
        """
        match = self._find(namespace, tokens)
        node, _ = self._find_node(match.namespace, tokens)  # `match.node` is None if nothing can be reused
        if node is not None:
            self._pins.set_awaits_of_path(node, awaits, start * TOKEN_BYTES)
        return max(0, match.found_bytes // TOKEN_BYTES - start)

    def end_session(self, tenant: str, session_id: str) -> int | None:
        """End a session: the blocks that only it has used are evicted before all others, until they are used again.

        Open leases of the session continue, and count as ended when they close.

        Returns:
            The number of blocks that only this session has used; None if the session is unknown: it has no such block,
            no open lease and no remembered prompt.

        Complexity: O(log leaves) for each node of the session.
        """
        session = self.sessions.get(tenant, session_id)
        if session is None:
            return None
        num_blocks = session.num_blocks
        for node in self.sessions.end(session):
            self._pins.set_awaits(node, Awaits.NOTHING)
        return num_blocks

    def expire(self) -> None:
        """Reset priorities that have expired, at most 256 per call."""
        self._evictor.expire()

    def evict(self, num_blocks: int, *, tenant: str | None = None) -> int:
        """Free blocks of unused leaves, in the policy's order and from each leaf's end.

        Args:
            num_blocks: blocks to free.
            tenant: the tenant that needs them. Its own floor does not protect its leaves; the floors of other tenants
                do. None applies all floors.

        Returns:
            Blocks freed: `num_blocks`, or fewer if no more are evictable.

        Complexity: O(log leaves + tenants with a quota) per leaf, and a pass over the path of a leaf of which only a
        part is evicted.
        """
        return self._evictor.evict(num_blocks, tenant)

    def purge(self, *, tenant: str | None = None, adapter: str | None = None, salt: str | None = None) -> Purged:
        """Remove whole namespaces in one call. No later request finds anything of them.

        Requests that use these namespaces continue with the blocks that they have, and publish nothing more. A filter
        that is None matches any name. Public prefixes stay.
        """
        return all_slices(self.purge_in_slices(tenant=tenant, adapter=adapter, salt=salt))

    def purge_in_slices(
        self, *, tenant: str | None = None, adapter: str | None = None, salt: str | None = None
    ) -> Generator[None, None, Purged]:
        """Remove whole namespaces, in slices between which the cache may be used; see `purge.py`."""
        purged = yield from purge(self._trees, self.leases, self._evictor, self.segments, tenant, adapter, salt)
        yield from self.sessions.forget_prompts_in_slices(tenant, adapter, salt)
        return purged

    def purge_adapter_in_slices(self, adapter: str) -> Generator[None, None, Purged]:
        """Purge, in slices, what an adapter has computed, and remember it to explain misses.

        Args:
            adapter: digest of the adapter, which no unfinished request uses.
        """
        self.public.unregister_all(adapter)
        if self.marks.has(adapter):
            return self._evicted.remember_purged(
                adapter, purge_invoked(self.segments, self._evictor, self.marks, adapter)
            )
        return self._evicted.remember_purged(adapter, self.purge_in_slices(adapter=adapter))

    def check(self) -> None:
        """Recount everything, and raise InvariantViolation if anything is inconsistent. Complexity: O(everything)."""
        self._evictor.expire()
        audit(self._state, self.leases)
        self.segments.check(self.nodes())
        self.sessions.check(self.nodes())
        self.public.check()

    def _free_parts_and_snapshots(self, block_ids: BlockIds) -> None:
        """Free the memory of windowed layers and of state snapshots that belongs to blocks that are free now."""
        self.windows.free_parts(block_ids)
        if self.state_slots is not None:
            self.state_slots.free_snapshots(block_ids)
