"""Cuts the keys of attention tiles into splits, one for each program, so that all programs end at about the same time.

fixed    keys [ 0 to 2047 )[ 2048 to 4095 )[ 4096 to 4607 )     the same cuts in any batch
even     keys [ 0 to 1535 )[ 1536 to 3071 )[ 3072 to 4607 )     as many as the device runs at once
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.kernels.batch import Ints

# Keys are walked in tiles that start at multiples of this, so splits and windows do too.
KEY_ALIGNMENT_TOKENS = 64

# A shorter split would spend more on its float32 partial result than on its keys.
_MIN_SPLIT_TILES = 4

# Estimates, in microseconds: what a program spends before and after its keys, what a launch of the merge takes, and
# what the merge waits for each partial result of a row. And bytes a microsecond, of 3.0 TB/s: nine tenths of an H100's
# data sheet.
_PROGRAM_US, _MERGE_US, _PARTIAL_US, _BYTES_A_US = 3.0, 3.0, 0.5, 3e6

# Sizes times tiles that are weighed, so that a plan stays a matter of some hundred microseconds.
_MOST_WEIGHED = 1 << 14


@dataclass(frozen=True, slots=True)
class TileCost:
    """Costs of attention tiles of some rows.

    Attributes:
        programs: programs that a multiprocessor runs at once: what registers and shared memory leave room for.
        shared_us: microseconds of a multiprocessor for 64 keys.
        alone_us: microseconds of a program for 64 keys while it has the multiprocessor to itself.
    """

    programs: int
    shared_us: float
    alone_us: float

    def tile_us(self, num_residents: Ints | int) -> Ints | float:
        """Return microseconds of a program for 64 keys while a multiprocessor runs this number of them."""
        return np.maximum(self.shared_us * num_residents, self.alone_us)


# Programs by `tests/kernels/gpu/test_compile_sm90.py`, times estimated for 128 dimensions: 128 rows are bound by
# matmuls and softmax, 16 rows by the bytes of K and V, a share of 3.0 TB/s. One group of warps with 64
# rows leaves gaps that a second program fills.
_COSTS = {16: TileCost(4, 1.44, 1.44), 64: TileCost(2, 0.475, 0.8), 128: TileCost(1, 0.95, 0.95)}


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """The room that a device has for attention programs.

    >>> [DeviceRoom(132).num_programs(tile_rows) for tile_rows in (16, 64, 128)]
    [528, 264, 132]

    Attributes:
        num_multiprocessors: multiprocessors of the device.
        head_dim: numbers in a vector of one head. Beyond 128 a program needs twice the registers.
    """

    num_multiprocessors: int
    head_dim: int = 128

    def cost(self, tile_rows: int) -> TileCost:
        """Return the costs of tiles of some rows."""
        cost = _COSTS[tile_rows]
        if self.head_dim <= 128:
            return cost
        return TileCost(max(1, cost.programs // 2), 2 * cost.shared_us, 2 * cost.alone_us)

    def num_programs(self, tile_rows: int) -> int:
        """Programs with tiles of some rows that the device runs at once."""
        return self.num_multiprocessors * self.cost(tile_rows).programs

    def most_partials(self, num_requests: int, num_kv_heads: int, tile_rows: int) -> int:
        """Return the most partial results of one KV head that `even_splits` leaves, but for joined rows.

        There is one for each program that the device runs at once, or for two where it runs one a multiprocessor, and
        two for each request.

        >>> [DeviceRoom(132).most_partials(4, 8, tile_rows) for tile_rows in (16, 64, 128)]
        [74, 41, 41]
        """
        num_programs = max(self.num_programs(tile_rows), 2 * self.num_multiprocessors)
        return -(-num_programs // num_kv_heads) + 2 * num_requests


# An H100 or H200 (SXM): the default.
HOPPER = DeviceRoom(132)


@dataclass(frozen=True, slots=True)
class Splits:
    """A way to cut keys.

    Attributes:
        tokens: the most keys of a split, a multiple of 64.
        is_even: whether the splits of a tile are equally long, but for 64 keys; otherwise they are cut at multiples of
            `tokens` from position 0.
    """

    tokens: int
    is_even: bool

    def counts(self, start: Ints, end: Ints) -> Ints:
        """Return the number of splits of each range of keys. Ranges start at multiples of 64."""
        if self.is_even:
            return -(-(end - start) // self.tokens)
        return -(-end // self.tokens) - start // self.tokens

    def bounds(self, start: Ints, end: Ints, nth: Ints, counts: Ints) -> tuple[Ints, Ints]:
        """Return first and end key of the nth split of each range, which has `counts` of them."""
        if self.is_even:
            num_tiles = _tiles_of(end - start)
            first, last = ((n * num_tiles // counts) * KEY_ALIGNMENT_TOKENS for n in (nth, nth + 1))
            return start + first, np.minimum(start + last, end)
        split_start = (start // self.tokens + nth) * self.tokens
        return np.maximum(split_start, start), np.minimum(split_start + self.tokens, end)


def even_splits(
    num_keys: Ints, num_rows: Ints, *, num_kv_heads: int, tile_rows: int, most_partials: int, room: DeviceRoom
) -> Splits:
    """Choose how many keys a program reads: what ends first by an estimate.

    The programs of a step run in waves. One program more than a device runs at once makes another wave, so twice the
    programs with half of the keys are not always as good.

        32 tiles of rows on 20 places   [ whole ........... )[ whole .. 12 of 20 )
                                        [ half .. )[ half .. )[ half .. )[ 4 of 20 )

    Args:
        num_keys: keys that each tile of rows sees, `[num_tiles]`, at least one tile.
        num_rows: rows of each tile, `[num_tiles]`.
        num_kv_heads: KV heads; each has programs of its own.
        tile_rows: rows of a tile.
        most_partials: the most partial results of one KV head, unless no split at all leaves more.
        room: the device.

    Complexity: O(sizes * tiles), at most some ten thousand.
    """
    key_tiles = _tiles_of(num_keys)
    sizes = _sizes(int(key_tiles.max()), 4 * room.num_programs(tile_rows) // num_kv_heads, key_tiles.size)
    counts = -(-key_tiles // sizes[:, None])  # [num_sizes, num_tiles]
    took_us = _attention_us(-(-key_tiles // counts), counts, num_kv_heads, room, tile_rows)
    partials = np.where(counts > 1, counts, 0)
    bytes_moved = 2 * 4 * room.head_dim * num_kv_heads * (partials * num_rows).sum(1)
    took_us += np.where(partials.any(1), _MERGE_US + _PARTIAL_US * counts.max(1) + bytes_moved / _BYTES_A_US, 0.0)
    is_allowed = partials.sum(1) <= most_partials
    is_allowed[0] = True
    best = int(sizes[np.argmin(np.where(is_allowed, took_us, np.inf))])
    return Splits(best * KEY_ALIGNMENT_TOKENS, is_even=True)


def _tiles_of(num_keys: Ints) -> Ints:
    return -(-num_keys // KEY_ALIGNMENT_TOKENS)


def _sizes(longest: int, most_splits: int, num_tiles: int) -> Ints:
    """List sizes of splits in tiles of keys: the longest tile whole, in two, in three and so on."""
    num_splits = np.arange(1, max(1, min(most_splits, longest // _MIN_SPLIT_TILES)) + 1)
    sizes = np.unique(-(-longest // num_splits))[::-1]
    stride = -(-sizes.size * num_tiles // _MOST_WEIGHED)
    return sizes[::stride]


def _attention_us(
    split_tiles: Ints, counts: Ints, num_kv_heads: int, room: DeviceRoom, tile_rows: int
) -> npt.NDArray[np.float64]:
    """Estimate how long the programs take, the longest first, `[num_sizes]`.

    The first program of each wave is its longest, and the next wave begins when it ends.

    Args:
        split_tiles: tiles of keys of each split of a tile of rows, `[num_sizes, num_tiles]`.
        counts: splits of each tile of rows, `[num_sizes, num_tiles]`.
    """
    cost = room.cost(tile_rows)
    num_programs = num_kv_heads * counts.sum(1, keepdims=True)
    num_residents = np.clip(-(-num_programs // room.num_multiprocessors), 1, cost.programs)
    order = np.argsort(-split_tiles, axis=1, kind="stable")
    split_us = _PROGRAM_US + np.take_along_axis(split_tiles, order, 1) * cost.tile_us(num_residents)
    ends = num_kv_heads * np.take_along_axis(counts, order, 1).cumsum(1)
    waves = -(-ends // (room.num_multiprocessors * num_residents))
    took_us: npt.NDArray[np.float64] = (split_us * np.diff(waves, axis=1, prepend=0)).sum(1)
    return took_us
