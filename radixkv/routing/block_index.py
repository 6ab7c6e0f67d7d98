"""An index from block hashes to the set of holders, one bit per holder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

_NUM_SHARDS = 256  # of 4,000 blocks each for a million: sweeping or growing one takes about 1 ms
_SHARD_MASK = _NUM_SHARDS - 1


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
        # Maps each set of holders to one shared integer. This saves memory, because there are few different sets.
        self._interned: dict[int, int] = {}
        self._free_bits: list[int] = []
        self._num_bits = 0
        self._live_bits = 0
        self._removed_bits = 0
        self._bits_to_clear = 0
        self._next_shard = 0

    def add_holder(self) -> int:
        """Add a holder without blocks, and return its bit."""
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = 1 << self._num_bits
            self._num_bits += 1
        self._live_bits |= bit
        return bit

    def forget_holder(self, bit: int) -> None:
        """Remove a holder. Complexity: O(1); `sweep` does the rest."""
        self._live_bits &= ~bit
        self._removed_bits |= bit

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
        shards, interned = self._shards, self._interned
        bit = interned.setdefault(bit, bit)
        for block in hashes:
            shard = shards[block & _SHARD_MASK]
            holders = shard.setdefault(block, bit)
            if holders is not bit:  # `is`, because sets of holders are interned
                new_holders = holders | bit
                shard[block] = interned.setdefault(new_holders, new_holders)
        self.num_blocks = sum(map(len, shards))

    def remove(self, bits: int, hashes: Sequence[int]) -> None:
        """Remove blocks of holders. Unknown blocks are ignored. Complexity: O(blocks)."""
        for block in hashes:
            shard = self._shards[block & _SHARD_MASK]
            holders = shard.get(block)
            if holders is not None:
                self._set_holders(shard, block, holders & ~bits)

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
        unresolved = [(0, len(hashes), self.holders_of(hashes[0]), self.holders_of(hashes[-1]))]
        while unresolved:
            start, end, first_holders, last_holders = unresolved.pop()
            if not first_holders:
                break
            if first_holders == last_holders:
                runs.append((first_holders, end - start))
                continue
            middle = (start + end) // 2
            unresolved.append((middle, end, self.holders_of(hashes[middle]), last_holders))
            unresolved.append((start, middle, first_holders, self.holders_of(hashes[middle - 1])))
        # Halves of a range can end and begin with the same holders: add up their blocks.
        return [
            (holders, sum(num_blocks for _, num_blocks in group)) for holders, group in groupby(runs, key=itemgetter(0))
        ]

    def sweep(self) -> None:
        """Clear the bits of removed holders in one shard. Complexity: O(blocks / 256); O(1) without such bits."""
        if not self._bits_to_clear:
            if not self._removed_bits:
                return
            self._bits_to_clear, self._removed_bits = self._removed_bits, 0
            self._interned.clear()
        shard = self._shards[self._next_shard]
        touched = [(block, holders) for block, holders in shard.items() if holders & self._bits_to_clear]
        for block, holders in touched:
            self._set_holders(shard, block, holders & ~self._bits_to_clear)
        self._next_shard = (self._next_shard + 1) % _NUM_SHARDS
        if not self._next_shard:
            self._free_bits += [1 << index for index in range(self._num_bits) if self._bits_to_clear >> index & 1]
            self._bits_to_clear = 0

    def holders_of(self, block: int) -> int:
        """Return the bits of a block's holders."""
        return self._shards[block & _SHARD_MASK].get(block, 0) & self._live_bits

    def _recordable(self, hashes: Sequence[int], max_blocks: int) -> list[int]:
        """Return the hashes that are in the index, and as many new ones as it has space for."""
        num_addable = max_blocks - self.num_blocks
        recordable = []
        for block in hashes:
            is_new = block not in self._shards[block & _SHARD_MASK]
            if not is_new or num_addable > 0:
                num_addable -= is_new
                recordable.append(block)
        self.num_refused += len(hashes) - len(recordable)
        return recordable

    def _set_holders(self, shard: dict[int, int], block: int, holders: int) -> None:
        if holders:
            shard[block] = self._interned.setdefault(holders, holders)
        else:
            del shard[block]
            self.num_blocks -= 1
