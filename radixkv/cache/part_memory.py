"""The memory that blocks and the parts of windowed layers share, and a bound on the parts that requests only passed."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from radixkv.api.miss_reason import MissReason
from radixkv.cache.changes import Listener
from radixkv.cache.node import Node
from radixkv.namespace import Namespace
from radixkv.tokens import TOKEN_BYTES, prefix_fingerprint

# The initial share, relative to that of a pool in which every block has its part. `bench/windows/border.py` measures
# what prompts reuse then.
_FIRST_SHARE = 0.85
# An eviction is remembered until blocks that take this share of the memory have been evicted after it.
_SHADOW_SHARE = 1 / 4
# How much more a token counts that misses its window than one whose block was evicted, after both are divided by the
# memory that would have avoided the miss. The result is bounded, because passed parts may take very little memory.
_PART_WEIGHT = 1.5
_MAX_WEIGHT = 8.0


@dataclass(frozen=True, slots=True)
class PartMemory:
    """One memory for the blocks of the other layers and the parts of windowed layers. The border between them moves.

        memory   [ blocks ........... | free | further parts | parts with memory of their own ]
                                      └ withheld blocks: as many as take the memory of the further parts

    Attributes:
        part_bytes: bytes of a part.
        block_bytes: bytes of a block of the other layers; 0 if all layers are windowed, so that blocks take no memory.
        num_dedicated_parts: parts that have memory of their own, enough for one request of any length.

    >>> memory = PartMemory(part_bytes=5, block_bytes=2, num_dedicated_parts=10)
    >>> memory.num_blocks(10), memory.num_blocks(13), memory.num_bytes(100)
    (0, 8, 250)
    """

    part_bytes: int
    block_bytes: int
    num_dedicated_parts: int

    def num_blocks(self, num_parts: int) -> int:
        """Return how many blocks take the memory of the parts beyond those with memory of their own, rounded up."""
        if not self.block_bytes or num_parts <= self.num_dedicated_parts:
            return 0
        return -(-(num_parts - self.num_dedicated_parts) * self.part_bytes // self.block_bytes)

    def num_bytes(self, num_blocks: int) -> int:
        """Return the total size if `num_blocks` blocks fit next to the parts that have memory of their own."""
        return num_blocks * self.block_bytes + self.num_dedicated_parts * self.part_bytes


class PartShare(Listener):
    """Bounds the number of passed parts. Parts above the bound are evicted before blocks are.

        more passed parts    prompts that diverge inside a cached prompt reuse more of it
        fewer passed parts   more prompts stay cached, from whose end others can continue

    Misses move the bound. If a prompt misses tokens because their blocks were evicted recently, fewer parts would have
    left room for them, so the bound decreases. If a prompt misses tokens whose blocks are cached without their window,
    more parts would have kept the window, so the bound increases. Both kinds of misses are divided by the memory that
    it would have taken to avoid them. For evicted blocks, this is a quarter of the memory. For windows, it is as much
    memory again as passed parts take, since windows at half the distance halve the loss.

    Args:
        num_blocks: blocks of the block pool.
        block_size: tokens per block.
        memory: the memory of blocks and parts.

    Source: balancing two lists by their misses: Megiddo, Modha: "ARC", FAST 2003. Weighting by memory: Cidon et al.:
    "Cliffhanger", NSDI 2016.
    """

    def __init__(self, num_blocks: int, block_size: int, memory: PartMemory) -> None:
        self._memory = memory
        self._block_size = block_size
        self._num_bytes = memory.num_bytes(num_blocks)
        both_bytes = memory.part_bytes + memory.block_bytes
        self._capacity_tokens = self._num_bytes // both_bytes * block_size
        self._max_share = memory.part_bytes / both_bytes
        self._share = _FIRST_SHARE * self._max_share
        self._num_shadow_blocks = int(_SHADOW_SHARE * num_blocks)
        self._num_evicted_blocks = 0
        # By fingerprint: the blocks of an eviction, and the number of all blocks evicted until then.
        self._evicted: OrderedDict[int, tuple[int, int]] = OrderedDict()

    @property
    def max_parts(self) -> int:
        """The bound: the number of passed parts up to which blocks are evicted instead of them."""
        return int(self._share * self._num_bytes / self._memory.part_bytes)

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        """Remember an eviction, and forget old ones. Complexity: O(1), amortized."""
        self._num_evicted_blocks += num_blocks
        self._evicted[fingerprint] = num_blocks, self._num_evicted_blocks
        self._evicted.move_to_end(fingerprint)
        oldest_kept = self._num_evicted_blocks - self._num_shadow_blocks
        while self._evicted and next(iter(self._evicted.values()))[1] < oldest_kept:
            self._evicted.popitem(last=False)

    def record_missed_parts(self, num_tokens: int, num_passed_parts: int) -> None:
        """Record a prompt whose blocks are cached without the window that it needs.

        Args:
            num_tokens: cached tokens that the prompt cannot reuse for that reason.
            num_passed_parts: passed parts that are cached.
        """
        passed_bytes = max(1, num_passed_parts) * self._memory.part_bytes
        weight = _PART_WEIGHT * _SHADOW_SHARE * self._num_bytes / passed_bytes
        self._move_bound(min(weight, _MAX_WEIGHT) * num_tokens)

    def record_missed_blocks(self, namespace: Namespace, tokens: bytes, found_tokens: int) -> None:
        """Record how many tokens of a prompt were evicted recently.

        Args:
            namespace, tokens: the prompt.
            found_tokens: tokens that are cached.

        Complexity: a hash of the cached tokens and the next block, and one more for each eviction that is found.
        """
        size, num_tokens = self._block_size, len(tokens) // TOKEN_BYTES
        end_block = found_tokens // size
        while self._evicted and end_block * size < num_tokens:
            end = min((end_block + 1) * size * TOKEN_BYTES, len(tokens))
            num_blocks, _ = self._evicted.get(prefix_fingerprint(namespace.seed, tokens, end), (0, 0))
            if not num_blocks:
                break
            end_block += num_blocks
        self._move_bound(-max(0, min(end_block * size, num_tokens) - found_tokens))

    def _move_bound(self, num_tokens: float) -> None:
        """Move the bound by a weighted number of tokens, relative to the tokens that fit into the memory."""
        self._share = min(max(0.0, self._share + num_tokens / self._capacity_tokens), self._max_share)
