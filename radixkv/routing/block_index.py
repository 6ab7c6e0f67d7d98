"""An index from block hashes to the set of holders, one bit per holder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

_NUM_SHARDS = 256  # of 4,000 blocks each for a million: sweeping or growing one takes about 1 ms
_LOW = _NUM_SHARDS - 1


class BlockIndex:
    """Maps block hashes to sets of holders, stored as the bits of an integer.

        hash ──▶ shard [hash & 255] ──▶ 0b0101: holders 0 and 2

    Removing a holder is O(1): its bit is ignored from then on. `sweep` clears such bits later, one shard at a time, and
    only then reuses them. No call therefore takes long, whatever the number of blocks.

    Args:
        max_blocks: maximum number of blocks. Further blocks are not recorded, which makes matches shorter, never wrong.

    Attributes:
        num_blocks: number of blocks, including those of removed holders that are not swept yet.
        num_refused: number of blocks that were not recorded because a maximum was reached.
    """

    def __init__(self, max_blocks: int) -> None:
        self.num_blocks = 0
        self.num_refused = 0
        self._max_blocks = max_blocks
        self._shards: list[dict[int, int]] = [{} for _ in range(_NUM_SHARDS)]
        self._same: dict[int, int] = {}  # one shared integer per set of holders: there are few different sets
        self._free: list[int] = []
        self._num_bits = 0
        self._live = 0
        self._retired = 0
        self._sweeping = 0
        self._next_shard = 0

    def add_holder(self) -> int:
        """Add a holder without blocks, and return its bit."""
        if self._free:
            bit = self._free.pop()
        else:
            bit = 1 << self._num_bits
            self._num_bits += 1
        self._live |= bit
        return bit

    def forget_holder(self, bit: int) -> None:
        """Remove a holder. Complexity: O(1); `sweep` does the rest."""
        self._live &= ~bit
        self._retired |= bit

    def store(self, bit: int, hashes: Sequence[int], max_blocks: int | None = None) -> None:
        """Add blocks of a holder. Complexity: O(blocks).

        Args:
            bit: bit of the holder.
            hashes: hashes of the blocks.
            max_blocks: number of blocks up to which new ones are recorded; None for the limit of the index.
        """
        max_blocks = self._max_blocks if max_blocks is None else max_blocks
        if self.num_blocks + len(hashes) > max_blocks:
            hashes = self._recordable(hashes, max_blocks)
        shards, same = self._shards, self._same
        bit = same.setdefault(bit, bit)
        for block in hashes:
            shard = shards[block & _LOW]
            known = shard.setdefault(block, bit)
            if known is not bit:
                holders = known | bit
                shard[block] = same.setdefault(holders, holders)
        self.num_blocks = sum(map(len, shards))

    def remove(self, bits: int, hashes: Sequence[int]) -> None:
        """Remove blocks of holders. Unknown blocks are ignored. Complexity: O(blocks)."""
        for block in hashes:
            shard = self._shards[block & _LOW]
            known = shard.get(block)
            if known is not None:
                self._keep(shard, block, known & ~bits)

    def runs(self, hashes: Sequence[int]) -> list[tuple[int, int]]:
        """Return the holders of consecutive blocks of a prompt, up to the first block that no holder has.

        Holders evict a prompt from its end. So if two blocks have the same holders, the blocks between them have the
        same ones and need no lookup, which would miss the CPU caches.

        Returns:
            Pairs of holder bits and the number of consecutive blocks with these holders.

        Complexity: O(changes of holders * log blocks).
        """
        if not hashes:
            return []
        runs: list[tuple[int, int]] = []
        left = [(0, len(hashes), self.holders_of(hashes[0]), self.holders_of(hashes[-1]))]
        while left:
            start, end, first, last = left.pop()
            if not first:
                break
            if first == last:
                runs.append((first, end - start))
                continue
            middle = (start + end) // 2
            left.append((middle, end, self.holders_of(hashes[middle]), last))
            left.append((start, middle, first, self.holders_of(hashes[middle - 1])))
        return [(holders, sum(num for _, num in run)) for holders, run in groupby(runs, key=itemgetter(0))]

    def sweep(self) -> None:
        """Clear the bits of removed holders in one shard. Complexity: O(blocks / 256); O(1) without such bits."""
        if not self._sweeping:
            if not self._retired:
                return
            self._sweeping, self._retired = self._retired, 0
            self._same.clear()
        shard = self._shards[self._next_shard]
        touched = [(block, holders) for block, holders in shard.items() if holders & self._sweeping]
        for block, holders in touched:
            self._keep(shard, block, holders & ~self._sweeping)
        self._next_shard = (self._next_shard + 1) % _NUM_SHARDS
        if not self._next_shard:
            self._free += [1 << index for index in range(self._num_bits) if self._sweeping >> index & 1]
            self._sweeping = 0

    def holders_of(self, block: int) -> int:
        """Return the bits of a block's holders."""
        return self._shards[block & _LOW].get(block, 0) & self._live

    def _recordable(self, hashes: Sequence[int], max_blocks: int) -> list[int]:
        """Return the hashes that are in the index, and as many new ones as it has space for."""
        left = max_blocks - self.num_blocks
        kept = []
        for block in hashes:
            is_new = block not in self._shards[block & _LOW]
            if not is_new or left > 0:
                left -= is_new
                kept.append(block)
        self.num_refused += len(hashes) - len(kept)
        return kept

    def _keep(self, shard: dict[int, int], block: int, holders: int) -> None:
        if holders:
            shard[block] = self._same.setdefault(holders, holders)
        else:
            del shard[block]
            self.num_blocks -= 1
