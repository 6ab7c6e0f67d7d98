"""The open leases of a cache, and the blocks that move between pool, leases and trees."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from radixkv.api.retention import DEFAULT_PRIORITY
from radixkv.blocks import BlockCopy, BlockIds
from radixkv.cache.cache_state import CacheState
from radixkv.cache.evictor import Evictor
from radixkv.cache.lease import Lease
from radixkv.cache.node import Owner
from radixkv.cache.open_leases import OpenLeases
from radixkv.cache.pins import Pins
from radixkv.cache.radix_tree import Insertion, RadixTree
from radixkv.errors import InvalidRequest, LeaseClosed
from radixkv.namespace import Namespace
from radixkv.tokens import TOKEN_BYTES, require_tokens


class Ledger:
    """Moves blocks from the pool to leases, and from leases to trees. The evictor moves them back to the pool.

        pool ── lease, reserve, extend ──▶ lease ── commit ──▶ tree
          ▲                                  │                  │
          └────────────── close ─────────────┘◀──── adopt ──────┘

    Iterating over it yields the open leases.

    Attributes:
        open: the open leases.
    """

    def __init__(self, holdings: CacheState, pins: Pins, evictor: Evictor) -> None:
        self._block_size = holdings.block_size
        self._trees = holdings.trees
        self._pool = holdings.pool
        self._parts = holdings.parts
        self._tenants = holdings.tenants
        self._lines = holdings.lines
        self._probation = holdings.probation
        self._retained = holdings.retained
        self._kept = holdings.kept
        self._changes = holdings.changes
        self._clock = holdings.clock
        self._pins = pins
        self._evictor = evictor
        self.open = self._open = OpenLeases()

    def __iter__(self) -> Iterator[Lease]:
        """Iterate over the open leases."""
        return iter(self._open)

    def lease(
        self,
        namespace: Namespace,
        tokens: bytes,
        *,
        read: bool,
        num_spared_blocks: int,
        num_expected_tokens: int,
        is_resumed: bool,
        other: tuple[int, bytes] = (0, b""),
    ) -> Lease:
        """Open a lease, as `PrefixCache.lease` describes.

        `other` is a packed block of another tree, and how many tokens of the prompt it has: copied if these are more.
        """
        node, found_bytes, cached_tokens, packed, num_nodes = self._trees.find(namespace, tokens, read)
        found = min(found_bytes, len(tokens) - TOKEN_BYTES) // TOKEN_BYTES, cached_tokens
        is_other = cached_tokens < other[0]
        if is_other:
            node, (cached_tokens, packed) = None, other
        usage = self._tenants[namespace.tenant]
        num_new_blocks = -(-len(tokens) // (self._block_size * TOKEN_BYTES)) - cached_tokens // self._block_size
        num_takeable_blocks = self._evictor.num_takeable_blocks(namespace.tenant, usage, num_spared_blocks)
        num_spare_blocks = num_takeable_blocks - num_new_blocks
        while num_spare_blocks < self._pins.num_unheld_blocks(node, num_spare_blocks):
            node, cached_tokens, num_missing_blocks = self._pins.narrowed(node, cached_tokens, num_spare_blocks)
            if num_missing_blocks:
                raise self._evictor.shortage(num_missing_blocks, namespace.tenant, usage, num_spared_blocks)
            possible_tokens = self._parts.longest(packed, cached_tokens)  # less has other parts within reach
            if possible_tokens == cached_tokens:
                break
            num_more_blocks = cached_tokens // self._block_size - possible_tokens // self._block_size
            num_new_blocks, num_spare_blocks = num_new_blocks + num_more_blocks, num_spare_blocks - num_more_blocks
            cached_tokens = possible_tokens
        num_whole_blocks, shared_tokens = divmod(cached_tokens, self._block_size)
        node_used_s = 0.0
        if node is not None:
            node_used_s = node.last_used_s
            self._changes.used(node, found_bytes, self._clock())
            self._probation.found(node, found_bytes, is_resumed)
            self._pins.pin(node)
        self._evictor.make_room(num_new_blocks, namespace.tenant, usage)
        reused = np.frombuffer(packed, dtype=np.int32)
        num_reused_blocks = -(-cached_tokens // self._block_size)
        after = int(reused[num_reused_blocks - 1]) if num_reused_blocks else None
        room = self._room(num_expected_tokens, num_whole_blocks + num_new_blocks)
        new = self._pool.acquire(num_new_blocks, after=after, room=room)
        usage.num_leased_blocks += num_new_blocks
        if not is_resumed:
            self._parts.note_hit(*found)
        usage.num_hit_tokens += cached_tokens
        usage.num_miss_tokens += len(tokens) // TOKEN_BYTES - cached_tokens
        block_ids = np.concatenate((reused[:num_whole_blocks], new))
        copy = BlockCopy(int(reused[num_whole_blocks]), int(new[0])) if shared_tokens else None
        lease = Lease(
            self, namespace, usage, tokens, cached_tokens, block_ids, num_whole_blocks, copy, node, node_used_s,
            num_expected_tokens, num_nodes, cached_tokens if is_other else 0, is_resumed,
        )  # fmt: skip
        lease.found_tokens = found[0]
        self._open.add(lease)
        return lease

    def touch(self, namespace: Namespace, tokens: bytes) -> None:
        """Count what is cached of a prompt as used now, with or without its parts, so that others leave first."""
        tree = self._trees.get(namespace)
        node, found_bytes = (None, 0) if tree is None else tree.match(tokens)[:2]
        if node is not None:
            self._changes.used(node, found_bytes, self._clock())
            self._pins.pin(node)
            self._pins.unpin(node)

    def extend(self, lease: Lease, tokens: bytes) -> None:
        """Add tokens to a lease, as `Lease.extend` describes."""
        require_tokens(tokens)
        self.reserve(lease, lease.num_tokens + len(tokens) // TOKEN_BYTES)
        if isinstance(lease.tokens, bytes):
            lease.tokens = bytearray(lease.tokens)  # appending to it does not copy the prompt for each token
        lease.tokens += tokens

    def reserve(self, lease: Lease, num_tokens: int) -> None:
        """Take blocks for tokens to come, as `Lease.reserve` describes."""
        self._require_open(lease)
        if num_tokens <= lease.num_tokens and -(-num_tokens // self._block_size) <= lease.block_ids.size:
            return
        usage, kept = lease.usage, lease.block_ids
        # New tokens are not written into a block that belongs to the tree, but into a copy of it.
        last = lease.num_tokens // self._block_size
        replaces_last = lease.num_published_blocks > last
        if replaces_last:
            kept = np.delete(kept, last)
        num_new_blocks = max(0, -(-num_tokens // self._block_size) - kept.size)
        if not num_new_blocks and not replaces_last:
            return
        num_missing_blocks = num_new_blocks - self._evictor.num_takeable_blocks(lease.namespace.tenant, usage)
        if num_missing_blocks > 0:
            raise self._evictor.shortage(num_missing_blocks, lease.namespace.tenant, usage)
        self._evictor.make_room(num_new_blocks, lease.namespace.tenant, usage)
        after = int(lease.block_ids[-1]) if lease.block_ids.size else None
        room = self._room(lease.num_expected_tokens, kept.size + num_new_blocks)
        new = self._pool.acquire(num_new_blocks, after=after, room=room)
        block_ids = np.concatenate((kept, new))
        usage.num_leased_blocks += num_new_blocks
        if replaces_last:
            lease.copy = BlockCopy(int(lease.block_ids[last]), int(block_ids[last]))
            lease.num_published_blocks -= 1
        lease.block_ids = block_ids

    def give_up(self, lease: Lease, num_blocks: int) -> None:
        """Take a lease's last blocks back, as `Lease.give_up` describes."""
        self._require_open(lease)
        lease.block_ids, last = np.split(lease.block_ids, [-num_blocks])
        self._pool.release(last)
        lease.usage.num_leased_blocks -= num_blocks

    def _room(self, num_expected_tokens: int, num_blocks: int) -> int:
        """Count the blocks that a lease of `num_blocks` will probably take more, with the copy of its prompt's end."""
        num_expected_blocks = -(-num_expected_tokens // self._block_size)
        return num_expected_blocks + 1 - num_blocks if num_expected_blocks > num_blocks else 0

    def commit(self, lease: Lease, upto_tokens: int) -> int:
        """Publish finished blocks, as `Lease.commit` describes."""
        self._require_open(lease)
        if not 0 <= upto_tokens <= lease.num_tokens:
            raise InvalidRequest(f"upto_tokens: expected 0 to {lease.num_tokens}, got {upto_tokens}")
        whole_tokens = upto_tokens // self._block_size * self._block_size
        end = upto_tokens if upto_tokens == lease.num_tokens else whole_tokens
        if end <= lease.committed_tokens or lease.is_revoked:
            return 0
        num_blocks = -(-end // self._block_size)
        tokens = bytes(lease.tokens[: end * TOKEN_BYTES])
        tree = self._trees.get(lease.namespace)
        if tree is None:
            tree = self._trees[lease.namespace] = RadixTree(Owner(lease.namespace, lease.usage, self._block_size))
        packed = lease.block_ids[:num_blocks].tobytes()
        insertion = tree.insert(tokens, packed, lease.known_node)
        if not packed.startswith(insertion.known_block_ids):
            self._adopt(lease, np.frombuffer(insertion.known_block_ids, dtype=np.int32))
        if insertion.split is not None:
            self._changes.split(insertion.split, lease.node_used_s, self._clock())
        if insertion.is_covered:
            lease.num_published_blocks = insertion.num_known_blocks
        else:
            if lease.written_from_tokens is None:
                lease.written_from_tokens = insertion.known_bytes // TOKEN_BYTES
            self._publish(lease.block_ids[insertion.num_known_blocks : num_blocks], insertion, lease.is_resumed)
            lease.num_published_blocks = num_blocks
        before, lease.node, lease.copy = lease.node, insertion.node, None
        self._pins.pin(insertion.node)
        if before is not None:
            self._pins.unpin(before)
        if before is not None and insertion.split is before:
            before.last_used_s = lease.node_used_s  # what this lease used is the upper half
            self._lines.requeue(before)
        known_tokens = max(lease.committed_tokens, insertion.known_bytes // TOKEN_BYTES)
        lease.committed_tokens = end
        return max(0, end - known_tokens)

    def _require_open(self, lease: Lease) -> None:
        if lease not in self._open:
            raise LeaseClosed("lease: expected an open lease of this cache, got a closed or a foreign one")

    def _adopt(self, lease: Lease, known: BlockIds) -> None:
        """Exchange the lease's own copies for blocks that were published first."""
        differing = np.flatnonzero(lease.block_ids[: known.size] != known)
        self._parts.exchange(lease.parts, lease.block_ids[differing], known[differing])
        self._pool.release(lease.block_ids[differing])
        lease.usage.num_leased_blocks -= differing.size
        lease.block_ids[differing] = known[differing]

    def _publish(self, block_ids: BlockIds, insertion: Insertion, is_resumed: bool) -> None:
        """Hand a lease's blocks to the tree, take back the one that they replace, and tell of it."""
        node, replaced = insertion.node, np.frombuffer(insertion.replaced_block_ids, dtype=np.int32)
        num_more_blocks = block_ids.size - replaced.size
        num_old_blocks = node.num_blocks - num_more_blocks
        usage = node.owner.usage
        self._pool.publish(block_ids)
        usage.num_leased_blocks -= num_more_blocks
        usage.num_cached_blocks += num_more_blocks
        if replaced.size:
            self._pool.unpublish(replaced)
        if node.num_holds:  # the leases that use this leaf may also use the replaced block
            node.retired_block_ids += insertion.replaced_block_ids
            self._pins.count(node, num_more_blocks)
        elif replaced.size:
            self._pool.release(replaced)
            usage.num_leased_blocks -= 1
        if num_old_blocks == 0:
            self._changes.inserted(node, self._clock())
            self._probation.returned(node, is_resumed)
            return
        self._changes.grown(node, num_more_blocks, self._clock())
        if node.num_keeps and num_more_blocks:
            self._kept.end_after(node, num_old_blocks)
            if node.num_holds == 0:
                self._pins.count(node, -node.num_blocks)
            num_old_blocks = 0  # the leaf has only what is new
        if node.priority != DEFAULT_PRIORITY or node.has_expired:
            self._retained.end_after(node, num_old_blocks)

    def keep(self, lease: Lease) -> None:
        """Keep a lease's blocks only, as `Lease.keep` describes."""
        self._require_open(lease)
        self._end_path(lease)
        for holder in lease.parts:
            holder.keep()
        lease.is_kept = True
        lease.tokens, lease.copy = b"", None
        lease.block_ids, lease.num_published_blocks = lease.block_ids[lease.num_published_blocks :].copy(), 0
        self._kept.keep(lease)

    def _end_path(self, lease: Lease) -> None:
        """Let a lease pin no more than the shared blocks that it uses: cut the node in which they end.

        Those that were replaced in that node, which it may use as well, stay with the upper half.
        """
        node = lease.node
        if node is not None and not lease.is_revoked:
            path = self._retained.cut_range(node, 0, lease.num_published_blocks)
            lease.node = path[-1] if path else None
            if lease.node is not node:
                if lease.node is not None:
                    self._pins.pin(lease.node)
                    lease.node.retired_block_ids += node.retired_block_ids
                    node.retired_block_ids = b""
                self._pins.unpin(node)

    def close(self, lease: Lease) -> None:
        """Take a lease's blocks back, as `Lease.close` describes."""
        if lease.is_closed:
            return
        if lease not in self._open:
            raise LeaseClosed("lease: expected a lease of this cache, got a foreign one")
        lease.is_closed = True
        self._open.remove(lease)
        for holder in lease.parts:
            holder.close()
        if lease.is_kept:
            self._kept.release(lease)
        own = lease.block_ids[lease.num_published_blocks :]
        if own.size:
            self._pool.release(own)
            lease.usage.num_leased_blocks -= own.size
        if lease.node is not None:
            is_deep = self._evictor.thin(lease.node, lease.num_nodes)
            self._pins.unpin_and_join(lease.node, even_unlike=is_deep)
