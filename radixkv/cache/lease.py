"""The lease of a prompt: the right to use, and to write, the blocks that hold its K/V."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType

import numpy as np

from radixkv.api.awaits import Awaits
from radixkv.api.retention import DEFAULT_PRIORITY
from radixkv.blocks import BlockCopy, BlockIds
from radixkv.cache.cache_state import CacheState
from radixkv.cache.node import Node, Session
from radixkv.cache.radix_tree import NO_ROOT_PREFIX, Insertion, RootPrefix
from radixkv.cache.tenants import TenantUsage
from radixkv.cache.windowed_layers import WindowLease
from radixkv.errors import InvalidRequest, InvariantViolation, LeaseClosed
from radixkv.namespace import PUBLIC_TENANT, Namespace, PromptKey
from radixkv.tokens import TOKEN_BYTES, require_tokens

_Names = tuple[str, str]  # adapter and salt
_UNKNOWN = Awaits.UNKNOWN  # a member of an enumeration is looked up slowly


class Lease:
    """Holds the blocks of a prompt. Reused blocks are read-only; the owner of the lease writes the new blocks.

        tokens      [0 .. public_tokens ........ cached_tokens ............ num_tokens)
        K/V          reused                         | the owner computes it
        block_ids    shared, read-only              | new, writable ..............
                                                    └ `copy` fills the beginning of the first new block, if it is set

    `PrefixCache.lease` opens leases. A lease is a context manager: leaving it closes it. Blocks move between the pool,
    the lease and the tree; the evictor moves them from the tree back to the pool:

        pool ── PrefixCache.lease, reserve, extend, reserve_private ──▶ lease ── commit ──▶ tree
          ▲                                                               │
          └────── close, release_last, leave_shared ──────────────────────┘
                  commit (the lease's own copies of blocks that the tree has already)

    A lease is in one of four states. `close` ends it in any of them:

        active ─┬────────────────────────────────────────────────────────────────────────────┬─ close ─▶ closed
                ├─ hold ───────────▶ held: only keeps its blocks, after its request ended ───┤
                └─ leave_shared ───▶ private: continues in blocks that are never published ──┘

    Args:
        leases: the open leases of the cache; the new lease adds itself.
        namespace: where blocks are published.
        usage: counters of the tenant.
        tokens: the prompt, little-endian uint32 bytes.
        cached_tokens: tokens whose K/V exist.
        block_ids: int32, all blocks of the tokens.
        num_published_blocks: number of blocks at the beginning of `block_ids` that belong to the tree.
        copy: a block copy to make before anything is written.
        node: the end of the path that is pinned for this lease; None if nothing is.
        node_used_s: time of the last use of `node` before this lease.
        root_prefix: the part of a public prefix above the tree; empty for most leases.
        public_tokens: tokens of `cached_tokens` that come from a public prefix.
        found_tokens: tokens that were cached; more than `cached_tokens` if there was no room to reuse all of them, if
            windowed layers lack the K/V of some, or if there is no snapshot of a recurrent state at their end.
        num_expected_tokens: length that the lease will probably reach; adjacent blocks are left free for that.
        num_nodes: nodes that were visited to find what is reused.
        is_resumed: whether the request had a lease of the same prompt before.
        is_prefetch: whether the lease only loads blocks for a later request and does not count as a use by its session.
        prior_use_s: time of the last use of the prompt, if the lease prepares for the next one and is no use itself;
            None if the lease counts as a use.
        session: the session that the request belongs to; None for none.
        windows: the lease of parts in each group of windowed layers.
        on_close: called when the lease no longer uses the public prefix.

    Attributes:
        tokens: the prompt and its extensions; a bytearray after the first extension or `leave_shared`, empty while the
            lease is held.
        block_ids: int32, all blocks of the tokens in order, and then reserved ones. `commit` may exchange some for
            equal ones. A held lease lists only the blocks that no tree has.
        num_dropped_tokens: tokens whose K/V are no longer in the blocks; only a private lease drops tokens.
        copy: the pending block copy; the owner sets it to None after making it.
        committed_tokens: tokens known to be matchable: the reused ones, and those published through this lease.
        written_from_tokens: position of the first token that this lease published; None until it publishes one.
        awaits: what the session of the request waits for when the lease closes; the owner sets it before it closes the
            lease.
        is_closed, is_held, is_private: whether the lease is in this state.
        is_revoked: whether the namespace was purged; if so, nothing more is published.
    """

    __slots__ = (
        "_leases",
        "_on_close",
        "_private_block_ids",
        "_state",
        "awaits",
        "block_ids",
        "cached_tokens",
        "committed_tokens",
        "copy",
        "found_tokens",
        "is_closed",
        "is_held",
        "is_prefetch",
        "is_private",
        "is_resumed",
        "is_revoked",
        "namespace",
        "node",
        "node_used_s",
        "num_dropped_tokens",
        "num_expected_tokens",
        "num_nodes",
        "num_published_blocks",
        "prior_use_s",
        "public_tokens",
        "root_prefix",
        "session",
        "tokens",
        "usage",
        "windows",
        "written_from_tokens",
    )

    def __init__(
        self,
        leases: OpenLeases,
        namespace: Namespace,
        usage: TenantUsage,
        tokens: bytes,
        cached_tokens: int,
        block_ids: BlockIds,
        num_published_blocks: int,
        *,
        copy: BlockCopy | None = None,
        node: Node | None = None,
        node_used_s: float = 0.0,
        root_prefix: RootPrefix = NO_ROOT_PREFIX,
        public_tokens: int = 0,
        found_tokens: int = 0,
        num_expected_tokens: int = 0,
        num_nodes: int = 0,
        is_resumed: bool = False,
        is_prefetch: bool = False,
        prior_use_s: float | None = None,
        session: Session | None = None,
        windows: Sequence[WindowLease] = (),
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._leases = leases
        self._state = leases.state
        self._on_close = on_close
        self.namespace = namespace
        self.usage = usage
        self.tokens: bytes | bytearray = tokens
        self.cached_tokens = cached_tokens
        self.block_ids = block_ids
        self.num_published_blocks = num_published_blocks
        self.copy = copy
        self.node = node
        self.node_used_s = node_used_s
        self.root_prefix = root_prefix
        self.public_tokens = public_tokens
        self.found_tokens = found_tokens
        self.num_expected_tokens = num_expected_tokens
        self.num_nodes = num_nodes
        self.is_resumed = is_resumed
        self.is_prefetch = is_prefetch
        self.prior_use_s = prior_use_s
        self.session = session
        self.windows = windows
        self.committed_tokens = cached_tokens
        self.written_from_tokens: int | None = None
        self.num_dropped_tokens = 0
        self.awaits = session.awaits if is_prefetch and session is not None else _UNKNOWN
        self.is_closed = False
        self.is_held = False
        self.is_private = False
        self.is_revoked = False
        self._private_block_ids: BlockIds | None = None
        leases.add(self)

    @property
    def num_tokens(self) -> int:
        """Length in tokens, extensions included."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def private_block_ids(self) -> BlockIds:
        """The blocks of `reserve_private`, int32."""
        if self.is_private:
            return self.block_ids
        return self.block_ids[:0] if self._private_block_ids is None else self._private_block_ids

    @property
    def owned_block_ids(self) -> BlockIds:
        """The blocks that belong to this lease and to no tree, int32."""
        own = self.block_ids[self.num_published_blocks :]
        return own if self._private_block_ids is None else np.concatenate((own, self._private_block_ids))

    def commit(self, upto_tokens: int) -> int:
        """Publish finished blocks: the K/V of all tokens before `upto_tokens` are written and final.

        Whole blocks become matchable, and at the end of the tokens the last one too. If another lease published the
        same tokens first, this lease adopts those blocks and releases its own. A private lease publishes nothing.

        Args:
            upto_tokens: 0 to `num_tokens`. Publishing the same tokens again changes nothing.

        Returns:
            The number of tokens that are matchable only because of this call.

        Raises:
            LeaseClosed: the lease is closed.
            InvalidRequest: `upto_tokens` is out of range.

        Complexity: O(upto_tokens) memory comparison and a dict look-up for each new node.

        Example:
            >>> from radixkv.cache.prefix_cache import PrefixCache
            >>> with PrefixCache(num_blocks=8, block_size=4).lease(Namespace("model"), bytes(40)) as lease:
            ...     lease.commit(7), lease.commit(10)  # one whole block; then the end of ten tokens
            (4, 6)
        """
        self._require_open()
        if not 0 <= upto_tokens <= self.num_tokens:
            raise InvalidRequest(f"upto_tokens: expected 0 to {self.num_tokens}, got {upto_tokens}")
        state, block_size = self._state, self._state.block_size
        whole_tokens = upto_tokens // block_size * block_size
        end = upto_tokens if upto_tokens == self.num_tokens else whole_tokens
        if end <= self.committed_tokens or self.is_revoked or self.is_private:
            return 0
        num_blocks = -(-end // block_size)
        tree = state.trees.get(self.namespace) or state.trees.create(self.namespace, self.usage, self.root_prefix)
        packed = self.block_ids[:num_blocks].tobytes()
        insertion = tree.insert(bytes(self.tokens[: end * TOKEN_BYTES]), packed, self._known_node())
        if not packed.startswith(insertion.known_block_ids):
            self._adopt(np.frombuffer(insertion.known_block_ids, dtype=np.int32))
        if insertion.split is not None:
            if self.prior_use_s is None:
                state.changes.split(insertion.split, self.node_used_s, state.clock())
            else:
                state.changes.cut(insertion.split)
        if insertion.is_covered:
            self.num_published_blocks = insertion.num_known_blocks
        else:
            if self.written_from_tokens is None:
                self.written_from_tokens = insertion.known_bytes // TOKEN_BYTES
            self._publish(self.block_ids[insertion.num_known_blocks : num_blocks], insertion)
            self.num_published_blocks = num_blocks
        previous_node = self.node
        self.node = insertion.node
        self.copy = None
        state.pins.pin(insertion.node)
        if previous_node is not None:
            # A lease whose node was split has used only the upper half.
            last_used_s = self.node_used_s if insertion.split is previous_node else None
            state.pins.unpin(previous_node, last_used_s=last_used_s)
        state.sessions.record_use(insertion.node, self.session)
        known_tokens = max(self.committed_tokens, insertion.known_bytes // TOKEN_BYTES)
        self.committed_tokens = end
        return max(0, end - known_tokens)

    def _known_node(self) -> Node | None:
        """Return the deepest pinned node that begins within the committed tokens, if there is one.

        Another lease may have split the node in which this lease ends; then this lease uses only the upper half.
        """
        node = self.node
        while node is not None and node.start_bytes > self.committed_tokens * TOKEN_BYTES:
            node = node.parent
        return node

    def _adopt(self, published_block_ids: BlockIds) -> None:
        """Replace the lease's own copies by blocks that were published first."""
        differing = np.flatnonzero(self.block_ids[: published_block_ids.size] != published_block_ids)
        self._state.windows.exchange(self.windows, self.block_ids[differing], published_block_ids[differing])
        self._state.pool.release(self.block_ids[differing])
        self.usage.take(-differing.size)
        self.block_ids[differing] = published_block_ids[differing]

    def _publish(self, block_ids: BlockIds, insertion: Insertion) -> None:
        """Transfer blocks to the tree, release the block that they replace, and notify the listeners."""
        state, node = self._state, insertion.node
        now_s = state.clock() if self.prior_use_s is None else self.prior_use_s
        replaced = np.frombuffer(insertion.replaced_block_ids, dtype=np.int32)
        num_more_blocks = block_ids.size - replaced.size
        num_old_blocks = node.num_blocks - num_more_blocks
        usage = node.owner.usage
        state.pool.publish(block_ids)
        usage.num_leased_blocks -= num_more_blocks
        usage.num_cached_blocks += num_more_blocks
        if replaced.size:
            state.pool.unpublish(replaced)
        if node.ref_count:  # the leases that use this leaf may also use the replaced block
            node.retired_block_ids += insertion.replaced_block_ids
            state.pins.count_pinned(node, num_more_blocks)
        elif replaced.size:
            state.pool.release(replaced)
            usage.take(-1)
        if num_old_blocks == 0:
            state.changes.inserted(node, now_s)
            state.queue.record_return(node, self.is_resumed)
            state.sessions.add_leaf(node, self.session)
            return
        state.changes.grown(node, num_more_blocks, now_s)
        if node.held_ref_count and num_more_blocks:
            state.held.end_after(node, num_old_blocks)
            if node.ref_count == 0:
                state.pins.count_pinned(node, -node.num_blocks)
            num_old_blocks = 0  # all blocks of the leaf are new
        if node.priority != DEFAULT_PRIORITY or node.has_expired:
            state.retained.reset_after(node, num_old_blocks)

    def reserve(self, num_tokens: int) -> None:
        """Allocate blocks for tokens that `extend` will add, or to replace blocks that `release_last` returned.

        A call that raises has changed nothing. If a commit then ends inside a block, the next token is written into a
        copy of that block, and this copy uses one of the reserved blocks. For a private lease the call does nothing,
        since the lease has all its blocks.

        Args:
            num_tokens: number of tokens for which to have blocks, including the present tokens.

        Raises:
            LeaseClosed: the lease is closed.
            OutOfBlocks, QuotaExceeded: free and evictable blocks together are too few.
        """
        self._require_open()
        block_size = self._state.block_size
        if self.is_private:
            return
        if num_tokens <= self.num_tokens and -(-num_tokens // block_size) <= self.block_ids.size:
            return
        kept_block_ids = self.block_ids
        # If the last block belongs to the tree, new tokens are written into a copy of it.
        last_index = self.num_tokens // block_size
        replaces_last = self.num_published_blocks > last_index
        if replaces_last:
            kept_block_ids = np.delete(kept_block_ids, last_index)
        num_new_blocks = max(0, -(-num_tokens // block_size) - kept_block_ids.size)
        if not num_new_blocks and not replaces_last:
            return
        self._require_takeable(num_new_blocks)
        after = int(self.block_ids[-1]) if self.block_ids.size else None
        room = self._state.num_room_blocks(self.num_expected_tokens, kept_block_ids.size + num_new_blocks)
        block_ids = np.concatenate((kept_block_ids, self._take(num_new_blocks, after, room)))
        if replaces_last:
            self.copy = BlockCopy(int(self.block_ids[last_index]), int(block_ids[last_index]))
            self.num_published_blocks -= 1
        self.block_ids = block_ids

    def _require_takeable(self, num_blocks: int) -> None:
        evictor, tenant = self._state.evictor, self.namespace.tenant
        num_missing_blocks = num_blocks - evictor.num_takeable_blocks(tenant, self.usage)
        if num_missing_blocks > 0:
            raise evictor.shortage_error(num_missing_blocks, tenant, self.usage)

    def _take(self, num_blocks: int, after: int | None = None, room: int = 0) -> BlockIds:
        """Take blocks from the pool, evicting if needed."""
        self._state.evictor.make_room(num_blocks, self.namespace.tenant, self.usage)
        block_ids = self._state.pool.acquire(num_blocks, after=after, room=room)
        self.usage.take(num_blocks)
        return block_ids

    def release_last(self, num_blocks: int) -> None:
        """Return the last blocks, which hold no K/V yet, to the pool. `reserve` allocates others in their place.

        Args:
            num_blocks: number of blocks, at least 1. None of them may belong to tokens that are computed or are being
                computed.

        Raises:
            LeaseClosed: the lease is closed.
        """
        self._require_open()
        self.block_ids, last_block_ids = np.split(self.block_ids, [-num_blocks])
        self._release(last_block_ids)

    def extend(self, tokens: bytes) -> None:
        """Append tokens to the prompt, and allocate the blocks they need. A call that raises has changed nothing.

        Committed blocks stay as they are. If they end inside a block, `copy` is set to copy that block, and the longer
        copy replaces it in the tree when it is committed:

            [abcd] [ef..]  both in the tree  ── extend by g ──▶  [abcd] [efg.]  the second is the lease's own

        Args:
            tokens: at least one token, little-endian uint32 bytes.

        Raises:
            LeaseClosed: the lease is closed.
            InvalidRequest: `tokens` is empty or not whole tokens.
            OutOfBlocks, QuotaExceeded: free and evictable blocks together are too few.
        """
        require_tokens(tokens)
        self.reserve(self.num_tokens + len(tokens) // TOKEN_BYTES)
        if isinstance(self.tokens, bytes):
            self.tokens = bytearray(self.tokens)  # appending to it does not copy the prompt for each token
        self.tokens += tokens

    def reserve_private(self, num_tokens: int) -> None:
        """Allocate blocks that are never published, for `leave_shared`. They count as leased blocks of the tenant.

        Args:
            num_tokens: number of tokens for which to allocate blocks.

        Raises:
            LeaseClosed: the lease is closed.
            OutOfBlocks, QuotaExceeded: free and evictable blocks together are too few. Nothing has changed.
        """
        self._require_open()
        num_blocks = -(-num_tokens // self._state.block_size)
        self._require_takeable(num_blocks)
        self._private_block_ids = self._take(num_blocks)

    def leave_shared(self, num_dropped_tokens: int) -> None:
        """Continue in the private blocks, to which the owner has copied the K/V that it keeps.

        All other blocks are released; committed blocks stay cached. From now on positions in `block_ids` do not follow
        from positions in the tokens: the blocks hold the K/V of all tokens except `num_dropped_tokens` of them.

        Args:
            num_dropped_tokens: tokens of the prompt whose K/V were not copied.

        Raises:
            LeaseClosed: the lease is closed.
        """
        self._require_open()
        private_block_ids = self.private_block_ids
        self._private_block_ids = None
        self.tokens = bytearray(self.tokens)
        self.num_dropped_tokens = num_dropped_tokens
        self._release_shared()
        self.is_private = True
        self.block_ids = private_block_ids
        self.num_published_blocks = 0

    def hold(self) -> None:
        """Only keep the blocks from now on, until `close`. The tokens are freed, since only writing needs them.

        `HeldBlocks` counts the blocks. Call `HeldBlocks.require_room` first.

        Raises:
            LeaseClosed: the lease is closed.
            InvariantViolation: the lease has private blocks, which end with their request.
        """
        self._require_open()
        if self.is_private or self._private_block_ids is not None:
            raise InvariantViolation("lease: a lease with private blocks cannot be held")
        self._shorten_path()
        for window in self.windows:
            window.keep()
        self.is_held = True
        self.tokens = b""
        self.copy = None
        self.block_ids = self.block_ids[self.num_published_blocks :].copy()
        self.num_published_blocks = 0
        self._state.held.hold(self)

    def _shorten_path(self) -> None:
        """Pin no more than the shared blocks that this lease uses: split the node in which they end.

        Blocks that were replaced in that node move to the upper half, since this lease may use them.
        """
        node = self.node
        if node is None or self.is_revoked:
            return
        path = self._state.trees.cut_range(node, 0, self.num_published_blocks)
        self.node = path[-1] if path else None
        if self.node is not node:
            if self.node is not None:
                self._state.pins.pin(self.node)
                self.node.retired_block_ids += node.retired_block_ids
                node.retired_block_ids = b""
            self._state.pins.unpin(node)

    def close(self, *, is_used: bool = True) -> None:
        """Release all blocks; committed blocks stay cached. Closing again does nothing.

        Args:
            is_used: False if no request has used the lease; it then counts neither as a hit nor as a miss.
        """
        if self.is_closed:
            return
        self.is_closed = True
        if not is_used:
            self.usage.num_hit_tokens -= self.cached_tokens
            self.usage.num_miss_tokens -= self.num_tokens - self.cached_tokens
        self._leases.remove(self)
        if self.is_held:
            self._state.held.release(self)
        if self.session is not None and self.session.has_ended:
            self.awaits = Awaits.NOTHING
        self._release_shared()
        if self.session is None:
            return
        if self.is_prefetch:
            self._state.sessions.leave_prefetch(self.session)
        else:
            prompt = None
            cached_bytes = min(self.committed_tokens * TOKEN_BYTES, len(self.tokens))
            if is_used and cached_bytes and self._state.sessions.remembers_prompts and not self.is_revoked:
                prompt = PromptKey(self.namespace._replace(public_prefix=""), bytes(self.tokens[:cached_bytes]))
            self._state.sessions.leave(self.session, self.awaits, self._state.clock(), prompt)

    def _release_shared(self) -> None:
        """Unpin the path and release all blocks that no tree has."""
        for window in self.windows:
            window.close()
        self.windows = ()
        own = self.owned_block_ids
        if own.size:
            self._release(own)
        node = self.node
        if node is not None:
            self.node = None
            is_deep = self._state.evictor.thin(node, self.num_nodes)
            session = None if self.session is None or self.session.has_ended else self.session
            self._state.pins.unpin_and_join(node, self.awaits, session, even_unlike=is_deep)
        if self._on_close is not None:
            on_close = self._on_close
            self._on_close = None
            on_close()

    def _release(self, block_ids: BlockIds) -> None:
        self._state.pool.release(block_ids)
        self.usage.take(-block_ids.size)

    def _require_open(self) -> None:
        if self.is_closed:
            raise LeaseClosed("lease: expected an open lease, got a closed one")

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class OpenLeases:
    """The open leases of a cache, by the names of their namespaces.

        acme   { ("", ""): { lease, lease }, ("", "salt"): { lease } }
        other  { ("", ""): { lease } }

    Args:
        state: the pool, the trees and the evictor, which all leases of the cache use.
    """

    def __init__(self, state: CacheState) -> None:
        self.state = state
        self._by_tenant: dict[str, dict[_Names, set[Lease]]] = {}

    def __iter__(self) -> Iterator[Lease]:
        for by_names in self._by_tenant.values():
            for leases in by_names.values():
                yield from leases

    def add(self, lease: Lease) -> None:
        """Add a lease. Complexity: O(1)."""
        namespace = lease.namespace
        by_names = self._by_tenant.setdefault(namespace.tenant, {})
        by_names.setdefault((namespace.adapter, namespace.salt), set()).add(lease)

    def remove(self, lease: Lease) -> None:
        """Remove a lease. Complexity: O(1)."""
        namespace = lease.namespace
        tenant, names = namespace.tenant, (namespace.adapter, namespace.salt)
        by_names = self._by_tenant[tenant]
        leases = by_names[names]
        leases.remove(lease)
        if not leases:
            del by_names[names]
            if not by_names:
                del self._by_tenant[tenant]

    def revoke(self, tenant: str | None, adapter: str | None, salt: str | None) -> None:
        """Stop leases of namespaces with these names from publishing; None matches any name.

        Leases of public prefixes are not affected, since no caller can name them.

        Complexity: O(leases revoked); with None for adapter or salt also O(namespaces of the tenant with open leases).
        """
        tenants = self._by_tenant if tenant is None else (tenant,)
        for each in tenants:
            if each != PUBLIC_TENANT:
                _revoke(self._by_tenant.get(each, {}), adapter, salt)


def _revoke(by_names: Mapping[_Names, set[Lease]], adapter: str | None, salt: str | None) -> None:
    """Revoke leases of one tenant."""
    if adapter is not None and salt is not None:
        revoked = [by_names.get((adapter, salt), set())]
    else:
        revoked = [
            leases
            for names, leases in by_names.items()
            if (adapter is None or adapter == names[0]) and (salt is None or salt == names[1])
        ]
    for leases in revoked:
        for lease in leases:
            lease.is_revoked = True
