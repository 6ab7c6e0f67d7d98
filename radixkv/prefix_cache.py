"""The prefix cache: the only place that changes trees and block pool, and keeps the two in step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from radixkv.block_pool import BlockIds, BlockPool
from radixkv.errors import InvalidRequest, InvariantViolation, LeaseClosed, OutOfBlocks
from radixkv.eviction import EvictionIndex, EvictionPolicy
from radixkv.lease import BlockCopy, Lease
from radixkv.miss_reason import LostPrefixes, MissReason, prefix_fingerprint
from radixkv.namespace import Namespace
from radixkv.radix_tree import BLOCK_ID_BYTES, TOKEN_BYTES, Node, RadixTree, TreeMatch


@dataclass(frozen=True, slots=True)
class Match:
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
        evicted_prefixes: int = 65_536,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.num_evicted_blocks = 0
        self.num_pinned_blocks = 0
        self._trees: dict[Namespace, RadixTree] = {}
        self._leases: set[Lease] = set()
        self._policy = policy or EvictionPolicy()
        self._evictable = EvictionIndex(self._policy)
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
        _require_tokens(tokens)
        found = self._find(namespace, tokens)
        cached_tokens = _reusable_tokens(found, tokens)
        block_ids = np.frombuffer(found.block_ids, dtype=np.int32)[: -(-cached_tokens // self.block_size)]
        return Match(namespace, tokens, cached_tokens, block_ids)

    def explain(self, namespace: Namespace, tokens: bytes, cached_tokens: int) -> MissReason:
        """Say why the tokens after the cached ones have to be computed. Complexity: O(cached_tokens) hashing."""
        if cached_tokens >= len(tokens) // TOKEN_BYTES - 1:
            return MissReason.NONE
        next_block_end = (cached_tokens // self.block_size + 1) * self.block_size * TOKEN_BYTES
        lost = self._lost.reason(prefix_fingerprint(namespace.seed, tokens, next_block_end))
        return lost or (MissReason.DIVERGED if cached_tokens else MissReason.COLD)

    def _find(self, namespace: Namespace, tokens: bytes) -> TreeMatch:
        tree = self._trees.get(namespace)
        return _NO_MATCH if tree is None else tree.match(tokens)

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
        _require_tokens(tokens)
        found = self._find(namespace, tokens) if read else _NO_MATCH
        cached_tokens = _reusable_tokens(found, tokens)
        num_new_blocks = -(-len(tokens) // (self.block_size * TOKEN_BYTES)) - cached_tokens // self.block_size
        num_spare_blocks = self.pool.num_free + self.num_evictable_blocks - num_new_blocks
        node = found.node if cached_tokens else None
        if num_spare_blocks < _num_unpinned_blocks(node):
            node, cached_tokens = self._narrow(node, cached_tokens, num_spare_blocks)
        num_whole_blocks, shared_tokens = divmod(cached_tokens, self.block_size)
        node_used_s = 0.0 if node is None else node.last_used_s
        if node is not None:
            self._policy.reused(node, found.num_bytes, self._clock())
        self._pin(node)
        self.evict(num_new_blocks - self.pool.num_free)
        new = self.pool.acquire(num_new_blocks)
        reused = np.frombuffer(found.block_ids, dtype=np.int32)
        shared = reused[num_whole_blocks : num_whole_blocks + 1] if shared_tokens else reused[:0]
        self.pool.retain(reused[: num_whole_blocks + shared.size])
        lease = Lease(
            self,
            namespace,
            tokens,
            cached_tokens,
            np.concatenate((reused[:num_whole_blocks], new)),
            BlockCopy(int(shared[0]), int(new[0])) if shared.size else None,
            node,
            node_used_s,
        )
        self._leases.add(lease)
        return lease

    def _narrow(self, node: Node | None, cached_tokens: int, num_spare_blocks: int) -> tuple[Node | None, int]:
        """Pin less of a path that stands in its own way, and if need be reuse less of it.

        First what lies beyond the reused blocks is cut off; then the block that is reused in part is given up. Whole
        blocks never are: computing one anew takes a block too.

        Args:
            node: the deepest node that shares tokens.
            cached_tokens: tokens that could be reused.
            num_spare_blocks: free and unpinned blocks, less those that the suffix takes.

        Returns:
            The node where the path to pin ends, and the tokens to reuse.

        Raises:
            OutOfBlocks: the whole blocks can't be held beside the suffix either. Nothing has changed.
        """
        num_path_blocks = _num_path_blocks(node)
        num_pinned_blocks = num_path_blocks - _num_unpinned_blocks(node)
        num_held_blocks = -(-cached_tokens // self.block_size)
        if num_spare_blocks < num_held_blocks - num_pinned_blocks:
            num_held_blocks = cached_tokens // self.block_size
            cached_tokens = num_held_blocks * self.block_size
        num_available_blocks = num_spare_blocks - max(0, num_held_blocks - num_pinned_blocks)
        if num_available_blocks < 0:
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
            tree = self._trees[lease.namespace] = RadixTree(self.block_size, lease.namespace)
        insertion = tree.insert(tokens, lease.block_ids[:num_blocks].tobytes())
        self._adopt(lease, np.frombuffer(insertion.known_block_ids, dtype=np.int32))
        if insertion.split is not None:
            self._policy.split(insertion.split, lease.node_used_s, self._clock())
        if not insertion.is_covered:
            self._policy.inserted(insertion.node, self._clock())
            published = lease.block_ids[insertion.num_known_blocks : num_blocks]
            replaced = np.frombuffer(insertion.replaced_block_ids, dtype=np.int32)
            self.pool.publish(published)
            self.pool.unpublish(replaced)
            if insertion.node.pin_count:  # a leaf that others use has grown
                self.num_pinned_blocks += published.size - replaced.size
        before, lease.node = lease.node, insertion.node
        self._pin(insertion.node)
        self._unpin(before)
        if before is not None and insertion.split is before:
            self._forget_use(before, lease.node_used_s)
        self._drop_copy_source(lease)
        known_tokens = max(lease.committed_tokens, insertion.known_bytes // TOKEN_BYTES)
        lease.committed_tokens = end
        return max(0, end - known_tokens)

    def _adopt(self, lease: Lease, known: BlockIds) -> None:
        """Exchange the lease's own copies for blocks that were published first."""
        mine = lease.block_ids[: known.size]
        if not np.array_equal(mine, known):
            differing = np.flatnonzero(mine != known)
            self.pool.retain(known[differing])
            self.pool.release(mine[differing])
            lease.block_ids[differing] = known[differing]

    def close(self, lease: Lease) -> None:
        """Give a lease's blocks back; see `Lease.close`."""
        if lease.is_closed:
            return
        if lease not in self._leases:
            raise LeaseClosed("lease: expected a lease of this cache, got a foreign one")
        lease.is_closed = True
        self._leases.remove(lease)
        self._drop_copy_source(lease)
        self.pool.release(lease.block_ids)
        self._unpin(lease.node)

    def _drop_copy_source(self, lease: Lease) -> None:
        if lease.copy is not None:
            self.pool.release(np.array([lease.copy.source], dtype=np.int32))
            lease.copy = None

    def _pin(self, node: Node | None) -> None:
        """Keep a path from eviction. Complexity: O(depth)."""
        now = self._clock()
        if node is not None:
            self._evictable.discard(node)
        while node is not None and node.parent is not None:
            if node.pin_count == 0:
                self.num_pinned_blocks += node.num_blocks
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

    # -- forgetting ------------------------------------------------------------------------------------------------

    def evict(self, num_blocks: int) -> int:
        """Free blocks of unused leaves, in the policy's order and from each leaf's end.

        Returns:
            Blocks freed: `num_blocks`, or fewer if no more are evictable.

        Complexity: O(log leaves) for each leaf, and one pass over the path's tokens if the last is only shortened.
        """
        freed = 0
        runs: list[bytes] = []
        while freed < num_blocks and len(self._evictable):
            runs.append(self._evict_from(self._evictable.first(), num_blocks - freed))
            freed += len(runs[-1]) // BLOCK_ID_BYTES
        if runs:  # all at once: a call costs as much as removing two leaves
            self.pool.unpublish(np.frombuffer(b"".join(runs), dtype=np.int32))
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
        counts = np.zeros(self.pool.num_blocks, dtype=np.int32)
        for lease in self._leases:
            np.add.at(counts, lease.block_ids, 1)
            if lease.copy is not None:
                counts[lease.copy.source] += 1
            node = lease.node
            while node is not None and node.parent is not None:
                pins[node] = pins.get(node, 0) + 1
                node = node.parent
        packed = []
        num_pinned_blocks = num_evictable = 0
        for tree in self._trees.values():
            tree.check()
            _require(not tree.root.is_leaf, "an empty tree is kept")
            for node in tree.nodes():
                packed.append(node.block_ids)
                _require(node.pin_count == pins.pop(node, 0), "a pin count is not its number of leases")
                _require(
                    (node in self._evictable) == _is_evictable(node), "the eviction index is not the unused leaves"
                )
                num_pinned_blocks += node.num_blocks if node.pin_count else 0
                num_evictable += _is_evictable(node)
        _require(not pins, "a lease pins a node outside every tree")
        _require(self.num_pinned_blocks == num_pinned_blocks, "the number of pinned blocks drifted")
        _require(len(self._evictable) == num_evictable, "the eviction index holds a node outside every tree")
        published = np.frombuffer(b"".join(packed), dtype=np.int32)
        np.add.at(counts, published, 1)
        self.pool.check(counts, published)


_NO_MATCH = TreeMatch(None, 0, b"")


def _reusable_tokens(found: TreeMatch, tokens: bytes) -> int:
    return min(found.num_bytes, len(tokens) - TOKEN_BYTES) // TOKEN_BYTES


def _require_tokens(tokens: bytes) -> None:
    if not tokens or len(tokens) % TOKEN_BYTES:
        raise InvalidRequest(f"tokens: expected one or more uint32 token ids, got {len(tokens)} bytes")


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
