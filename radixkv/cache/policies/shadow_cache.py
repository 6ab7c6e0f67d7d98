"""A small model of the cache, without K/V, that tells how many hits another order of eviction would have."""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

from xxhash import xxh3_64

from radixkv.cache.tree.node import Node
from radixkv.tokens import TOKEN_BYTES

_SAMPLED_TOKENS = 512  # one block in this many tokens may be sampled, so short blocks cost no more than long ones
_NUM_SAMPLED = 1024  # blocks that a shadow cache holds; with 8192 the trace has the same hits within noise


class Sample(NamedTuple):
    """One of a node's blocks that shadow caches follow.

    Attributes:
        place: index of the block in the node.
        digest: hash of the namespace and all tokens up to the block's end.
    """

    place: int
    digest: int


class BlockSampler:
    """Picks blocks by the hash of their prefix, so the same prefixes are followed wherever nodes begin and end.

    Source: Waldspurger et al.: "Efficient MRC construction with SHARDS", FAST 2015.

    Args:
        num_blocks: blocks of the cache's pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def capacity(self, block_size: int) -> int:
        """Return how many sampled blocks stand for the whole cache."""
        return max(1, min(_NUM_SAMPLED, self._num_blocks // _stride(block_size)))

    def sample(self, node: Node, start: int) -> tuple[Sample, ...]:
        """List the sampled blocks of a node from block `start` on.

        Complexity: O(tokens of the path), one hash over them.
        """
        block_bytes = node.owner.block_size * TOKEN_BYTES
        stride = _stride(node.owner.block_size)
        limit = 2.0**64 * _NUM_SAMPLED * stride / self._num_blocks
        above = _ancestors(node)
        digest = xxh3_64(seed=(above[0] if above else node).fingerprint)
        for ancestor in above:
            digest.update(ancestor.tokens)
        samples = []
        hashed_bytes = 0
        first = -(1 + sum(ancestor.num_blocks for ancestor in above)) % stride  # blocks that end a stride of the path
        for index in range(first, len(node.tokens) // block_bytes, stride):
            end = (index + 1) * block_bytes
            digest.update(node.tokens[hashed_bytes:end])
            hashed_bytes = end
            if index >= start and digest.intdigest() < limit:
                samples.append(Sample(index, digest.intdigest()))
        return tuple(samples)


class ShadowCache:
    """Holds the digests of the sampled blocks that a cache would hold if it evicted the smallest key first."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[float, int, int]] = {}  # by digest: key, use and digest
        self._line: list[tuple[float, int, int]] = []  # a heap of the entries, outdated ones included
        self._num_uses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: int) -> bool:
        return digest in self._entries

    def use(self, digests: list[int], new_key: float, held_key: float, capacity: int) -> list[bool]:
        """Add blocks, and drop those with the smallest keys until no more than `capacity` are left.

        Args:
            digests: the blocks, in the order of their use.
            new_key: the key of a block that was not held before.
            held_key: the key of a block that was held before.
            capacity: blocks that may be held.

        Returns:
            For each block, whether it was held before.

        Complexity: O(log capacity) a block, amortized.
        """
        entries, line, num_uses = self._entries, self._line, self._num_uses
        held = []
        for digest in digests:
            is_held = digest in entries
            held.append(is_held)
            num_uses += 1
            entry = entries[digest] = (held_key if is_held else new_key, num_uses, digest)
            heapq.heappush(line, entry)
            while len(entries) > capacity:
                first = heapq.heappop(line)
                if entries.get(first[2]) is first:
                    del entries[first[2]]
        self._num_uses = num_uses
        if len(line) > 4 * capacity + len(digests):
            self._line = list(entries.values())
            heapq.heapify(self._line)
        return held


def _stride(block_size: int) -> int:
    return math.ceil(_SAMPLED_TOKENS / block_size)


def _ancestors(node: Node) -> list[Node]:
    """List the nodes above, without the root, the topmost first."""
    above: list[Node] = []
    ancestor = node.parent
    while ancestor is not None and ancestor.parent is not None:
        above.append(ancestor)
        ancestor = ancestor.parent
    return above[::-1]
