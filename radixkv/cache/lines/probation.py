"""Probation of what was never reused, so that prompts that come once do not push out what returns."""

from __future__ import annotations

from collections import OrderedDict

from radixkv.api.miss_reason import MissReason
from radixkv.cache.changes import Listener
from radixkv.cache.node import Node
from radixkv.tokens import TOKEN_BYTES


class Probation(Listener):
    """Knows which nodes are on probation: those of which no other request found a block, before or after an eviction.

    A request's own later chunks are no reuse, nor is what it finds when it resumes after a pause. Of a leaf that was
    found and has grown since, the part that was not found is on probation again if it is split off. A leaf that comes
    back is not on probation, unless as many blocks as the pool has were evicted meanwhile.

    Memory: a fingerprint for each of the leaves that were evicted last, as many blocks together as the pool has.

    Complexity: O(1), amortized, for each change; O(nodes that end their probation) for what is found.

    Source: Johnson, Shasha: "2Q", VLDB 1994: what returns after its eviction has passed. Here the queue of what came
    once may be long, so below its bound the policy decides.

    Args:
        share: part of the pool that leaves on probation may take from the others; 1 switches probation off.
        num_pool_blocks: blocks of the cache's pool.

    Attributes:
        share: the same.
        is_on: whether anything can be on probation.
        max_blocks: blocks that leaves on probation may take from the others.
        num_blocks: blocks of leaves on probation that no lease uses; `ProbationLines` counts them.
        num_evicted_blocks: blocks evicted so far from such leaves; likewise.
    """

    def __init__(self, share: float, num_pool_blocks: int) -> None:
        self.share = share
        self.is_on = share < 1
        self.max_blocks = int(share * num_pool_blocks)
        self.num_blocks = 0
        self.num_evicted_blocks = 0
        self._num_pool_blocks = num_pool_blocks
        self._evicted: OrderedDict[int, int] = OrderedDict()  # blocks evicted until then, by fingerprint of a leaf
        self._num_blocks_gone = 0

    def has(self, node: Node) -> bool:
        """Return whether a node is on probation."""
        return self.is_on and node.num_reused_blocks == 0

    def found(self, node: Node, num_bytes: int, is_resumed: bool) -> None:
        """End the probation of the nodes of which a lease found whole blocks, in `num_bytes` of the path to `node`.

        A lease that goes on after an earlier one of the same request ends nothing.
        """
        if is_resumed or not self.is_on:
            return
        block_bytes = node.owner.block_size * TOKEN_BYTES
        while node.parent is not None and node.num_reused_blocks < node.num_blocks:
            num_bytes_here = num_bytes - node.start_bytes
            is_whole = num_bytes_here >= len(node.tokens)
            num_found_blocks = node.num_blocks if is_whole else num_bytes_here // block_bytes
            node.num_reused_blocks = max(node.num_reused_blocks, num_found_blocks)
            node = node.parent

    def returned(self, leaf: Node, is_resumed: bool) -> None:
        """End the probation of a new leaf that was evicted not long ago, unless its request only goes on."""
        if not is_resumed and self._evicted.pop(leaf.fingerprint, None) is not None:
            leaf.num_reused_blocks = 1

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        """End the probation of the upper half."""
        self.cut(lower)
        assert lower.parent is not None
        lower.parent.num_reused_blocks = lower.parent.num_blocks

    def cut(self, lower: Node) -> None:
        """Divide what was found between both halves."""
        upper = lower.parent
        assert upper is not None
        upper.num_reused_blocks = min(lower.num_reused_blocks, upper.num_blocks)
        lower.num_reused_blocks -= upper.num_reused_blocks

    def joined(self, uppers: list[Node], lower: Node) -> None:
        """Add up what was found."""
        lower.num_reused_blocks += sum(upper.num_reused_blocks for upper in uppers)

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        """Remember a leaf that goes."""
        self._num_blocks_gone += num_blocks
        leaf.num_reused_blocks = min(leaf.num_reused_blocks, leaf.num_blocks - num_blocks)
        if num_blocks == leaf.num_blocks:
            self._evicted[leaf.fingerprint] = self._num_blocks_gone
            self._evicted.move_to_end(leaf.fingerprint)
        while self._evicted and self._num_blocks_gone - next(iter(self._evicted.values())) >= self._num_pool_blocks:
            self._evicted.popitem(last=False)
