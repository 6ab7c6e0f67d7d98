"""Reference counts of nodes. A referenced node is pinned: it cannot be evicted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from radixkv.api.awaits import Awaits
from radixkv.cache.block_pool import BlockPool
from radixkv.cache.changes import Changes
from radixkv.cache.eviction_policy import EvictionPolicy
from radixkv.cache.eviction_queue import EvictionQueue
from radixkv.cache.namespace_trees import NamespaceTrees
from radixkv.cache.node import NUM_FOLLOWED_NODES, Node, Session, path_to
from radixkv.tokens import TOKEN_BYTES

# Members of an enumeration are looked up slowly, and every node of a path is compared with these.
_NOTHING = Awaits.NOTHING
_UNKNOWN = Awaits.UNKNOWN


class Pins:
    """Counts the references to each node, and removes pinned leaves from the eviction queue.

        pinned ── unpin, by the last lease ──▶ unused; a leaf is in the eviction queue ── evict ──▶ free
               ◀──────────── pin ────────────

    A lease references the node in which its path ends, and a pinned node references its parent. So a second lease of
    the same path changes one count, however long the path is:

        root ── [2] ─┬─ [1] ◀─ lease          a second lease of this leaf makes its count 2, and changes no other
                     └─ [1] ◀─ lease

    Attributes:
        num_pinned_blocks: published blocks that leases keep from eviction.
    """

    def __init__(
        self,
        *,
        block_size: int,
        trees: NamespaceTrees,
        pool: BlockPool,
        policy: EvictionPolicy,
        queue: EvictionQueue,
        changes: Changes,
        clock: Callable[[], float],
    ) -> None:
        self.num_pinned_blocks = 0
        self._block_size = block_size
        self._trees = trees
        self._pool = pool
        self._policy = policy
        self._queue = queue
        self._changes = changes
        self._clock = clock

    def pin(self, node: Node) -> None:
        """Pin all nodes of a path. Complexity: O(log leaves + nodes of the path that were not pinned)."""
        self._queue.discard(node)
        now_s, path_end, num_blocks = self._clock(), node, 0
        while (parent := node.parent) is not None:
            node.ref_count += 1
            if node.ref_count > 1:
                break
            num_blocks += node.num_blocks
            node.last_used_s = now_s
            node = parent
        self.count_pinned(path_end, num_blocks)
        _touch(node, now_s)

    def unpin(
        self,
        node: Node,
        awaits: Awaits | None = None,
        session: Session | None = None,
        *,
        last_used_s: float | None = None,
    ) -> Node:
        """Undo one `pin` of the same node.

        Args:
            node: the end of the path.
            awaits: what the session of the lease waits for now, which is recorded in the nodes that are no longer
                pinned; None to record nothing. The end of a session (`NOTHING`) is not recorded in nodes that other
                sessions probably use too, nor in those above them.
            session: the session of the lease, unless it has been ended. Its end is only recorded in its own nodes.
            last_used_s: time of the last use of `node`, if the lease has not used it; None if this is a use.

        Returns:
            The deepest node of the path that is still pinned, or the root.

        Complexity: O(log leaves + nodes of the path that are no longer pinned).
        """
        now_s, path_end, num_blocks = self._clock(), node, 0
        while (parent := node.parent) is not None:
            node.ref_count -= 1
            if node.ref_count:
                break
            num_blocks += node.num_blocks
            if node.retired_block_ids:
                self._free_retired(node)
            node.last_used_s = now_s
            if awaits is _NOTHING and (
                _has_other_continuations(node) or (session is not None and node.session is not session)
            ):
                awaits = None
            if awaits is not None:
                node.awaits = awaits
                if awaits is not _UNKNOWN:
                    self._policy.note_awaits(node)
            node = parent
        self.count_pinned(path_end, -num_blocks)
        _touch(node, now_s)
        if last_used_s is not None:
            path_end.last_used_s = last_used_s
        if path_end.is_evictable:
            self._queue.add(path_end)
        return node

    def set_awaits(self, node: Node, awaits: Awaits) -> None:
        """Set what the session of a node waits for, without a use of the node. Complexity: O(log leaves)."""
        node.awaits = awaits
        self._policy.note_awaits(node)
        self._queue.requeue(node)

    def set_awaits_of_path(self, node: Node, awaits: Awaits, start_bytes: int = 0) -> None:
        """Set what the session of a path waits for, in the nodes that no lease uses, as `unpin` would have set it.

        Args:
            node: the end of the path.
            awaits: what the session waits for.
            start_bytes: nodes that begin before this position stay unchanged.
        """
        while node.parent is not None and not node.ref_count and node.start_bytes >= start_bytes:
            if awaits is _NOTHING and _has_other_continuations(node):
                break
            self.set_awaits(node, awaits)
            node = node.parent

    def unpin_and_join(
        self, node: Node, awaits: Awaits, session: Session | None = None, *, even_unlike: bool = False
    ) -> None:
        """Undo one `pin`, and join nodes that are no longer pinned, where they have the same properties.

        This undoes splits that were made for priorities that have expired, and for branches that were evicted, so that
        these splits do not slow down later requests.

        Args:
            node: the end of the path.
            awaits, session: as in `unpin`.
            even_unlike: also join nodes that the policy treats differently.

        Complexity: that of `unpin`, and O(tokens of the nodes that are joined).
        """
        deepest_pinned = self.unpin(node, awaits, session)
        while node is not deepest_pinned:
            uppers: list[Node] = []
            above = node.parent
            while (
                above is not None
                and above is not deepest_pinned
                and len(above.children or ()) == 1
                and self._may_join(above, node, even_unlike)
            ):
                uppers.append(above)
                above = above.parent
            if uppers:
                uppers.reverse()
                self._trees[node.owner.namespace].join(uppers, node)
                self._changes.joined(uppers, node)
                self._queue.requeue(node)
            if above is None:
                return
            node = above

    def _may_join(self, upper: Node, lower: Node, even_unlike: bool) -> bool:
        """Whether a node and its only child may become one."""
        return (
            upper.num_blocks > 0  # otherwise it was purged
            and upper.priority == lower.priority
            and upper.has_expired is lower.has_expired
            and upper.session is lower.session
            and upper.expiry_entry is None
            and lower.expiry_entry is None
            and (even_unlike or self._policy.are_alike(upper, lower))
        )

    def num_unpinned_blocks(self, node: Node | None, num_sufficient_blocks: int) -> int:
        """Count the blocks of a path that are not pinned yet; 0 if they cannot be more than `num_sufficient_blocks`.

        Complexity: O(1) in that case, otherwise O(nodes of the path that are not pinned).
        """
        if node is None:
            return 0
        num_blocks_before = node.start_bytes // (node.owner.block_size * TOKEN_BYTES)
        if num_blocks_before + node.num_blocks <= num_sufficient_blocks:
            return 0
        num_blocks = 0
        while node.parent is not None and node.ref_count == 0:
            num_blocks += node.num_blocks
            node = node.parent
        return num_blocks

    def narrow(
        self, node: Node | None, cached_tokens: int, num_surplus_blocks: int, root_tokens: int
    ) -> tuple[Node | None, int, int]:
        """Shorten a path before it is pinned, since the lease needs blocks at its end; reuse fewer tokens if needed.

        First the path is split after the reused blocks, so that the blocks after them can be evicted. If that is not
        enough, the partly reused block is not reused. Whole blocks are always reused, because computing one takes a
        block as well.

        Args:
            node: the deepest node that shares tokens.
            cached_tokens: tokens that could be reused.
            num_surplus_blocks: blocks that the lease could take, minus those for the tokens after the reused ones.
            root_tokens: tokens of a public prefix above the tree, whose blocks are always pinned.

        Returns:
            The end of the path to pin, the tokens to reuse, and the number of blocks that are missing. If any are
            missing, nothing has changed.
        """
        num_pinned_blocks = root_tokens // self._block_size
        num_pinned_blocks += sum(above.num_blocks for above in path_to(node) if above.ref_count)
        num_cached_blocks = -(-cached_tokens // self._block_size)
        if num_surplus_blocks < num_cached_blocks - num_pinned_blocks:
            num_cached_blocks = cached_tokens // self._block_size
            cached_tokens = num_cached_blocks * self._block_size
        num_available_blocks = num_surplus_blocks - max(0, num_cached_blocks - num_pinned_blocks)
        if num_available_blocks < 0 or node is None or cached_tokens <= root_tokens:
            return None, root_tokens, max(0, -num_available_blocks)
        return self._trees.cut_range(node, 0, num_cached_blocks)[-1], cached_tokens, 0

    def count_pinned(self, node: Node, num_blocks: int) -> None:
        """Add to the number of pinned blocks of a node's tenant and of all tenants; `num_blocks` may be negative."""
        self.num_pinned_blocks += num_blocks
        node.owner.usage.num_pinned_blocks += num_blocks

    def _free_retired(self, node: Node) -> None:
        block_ids = np.frombuffer(node.retired_block_ids, dtype=np.int32)
        self._pool.release(block_ids)
        node.owner.usage.take(-block_ids.size)
        node.retired_block_ids = b""


def _has_other_continuations(node: Node) -> bool:
    """Whether other sessions than the one that just ended have probably continued after a node, below other children.

    A single other child of one block does not count: it usually is the end of an earlier prompt of the same session.
    """
    if node.children is None or len(node.children) < 2:
        return False
    if len(node.children) > 2:
        return True
    return not any(child.is_leaf and child.num_blocks == 1 for child in node.children.values())


def _touch(node: Node, now_s: float) -> None:
    """Record a use of a node and its nearest ancestors. Nodes further up are updated when pinned or unpinned."""
    for _ in range(NUM_FOLLOWED_NODES):
        if node.parent is None:
            return
        node.last_used_s = now_s
        node = node.parent
