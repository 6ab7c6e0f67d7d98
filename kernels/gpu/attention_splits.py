"""Cuts the keys of attention tiles into splits, one per program, so that all programs end at about the same time.

A program is an instance of a Triton kernel, which runs on one multiprocessor of the GPU. A tile is a group of query
rows that one program computes together. A key tile is 64 keys, the unit in which programs read keys.

fixed    keys [ 0 to 2047 ][ 2048 to 4095 ][ 4096 to 4607 ]     the same cuts in any batch
even     keys [ 0 to 1535 ][ 1536 to 3071 ][ 3072 to 4607 ]     the number of splits estimated to be fastest
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.kernels.batch import Ints

# Keys of a key tile. Key tiles start at multiples of this, so splits and windows start there too.
KEY_ALIGNMENT_TOKENS = 64

# A shorter split would spend more on its float32 partial result than on its keys.
_MIN_SPLIT_KEY_TILES = 4

# Estimates in microseconds: the time of a program before and after its keys, the time to launch the merge, and the time
# that the merge waits for each partial result of a row. The last number is bytes per microsecond at 3.0 TB/s, nine
# tenths of the bandwidth on the data sheet of an H100.
_PROGRAM_US, _MERGE_US, _PARTIAL_US, _BYTES_PER_US = 3.0, 3.0, 0.5, 3e6

# `even_splits` estimates a cost for each pair of a split size and a tile. With more pairs than this, it tries fewer
# sizes, so that planning takes at most some hundred microseconds.
_MAX_ESTIMATES = 1 << 14


@dataclass(frozen=True, slots=True)
class TileCost:
    """Costs of attention tiles with a given number of rows.

    Attributes:
        programs: programs that fit on a multiprocessor at once, given their registers and shared memory.
        shared_us: microseconds that a fully used multiprocessor takes for 64 keys of one program.
        alone_us: microseconds per 64 keys of a program that has the multiprocessor to itself.
    """

    programs: int
    shared_us: float
    alone_us: float

    def key_tile_us(self, num_residents: Ints | int) -> Ints | float:
        """Return the microseconds per 64 keys of a program while its multiprocessor runs `num_residents` programs."""
        return np.maximum(self.shared_us * num_residents, self.alone_us)


# By rows of a tile. `tests/kernels/gpu/test_compile_sm90.py` gives the number of programs; the times are estimates for
# 128 dimensions. With 128 rows, matmuls and softmax are the bottleneck; with 16 rows, it is reading K and V at the
# multiprocessor's share of 3.0 TB/s. One program with 64 rows does not keep a multiprocessor busy, so a second one
# costs little there.
_COSTS = {16: TileCost(4, 1.44, 1.44), 64: TileCost(2, 0.475, 0.8), 128: TileCost(1, 0.95, 0.95)}


@dataclass(frozen=True, slots=True)
class DeviceCapacity:
    """How many attention programs a device runs at once.

    >>> [DeviceCapacity(132).num_programs(tile_rows) for tile_rows in (16, 64, 128)]
    [528, 264, 132]

    Attributes:
        num_multiprocessors: multiprocessors of the device.
        head_dim: dimension of a head. Above 128, a program needs twice the registers.
    """

    num_multiprocessors: int
    head_dim: int = 128

    def cost(self, tile_rows: int) -> TileCost:
        """Return the costs of tiles with `tile_rows` rows."""
        cost = _COSTS[tile_rows]
        if self.head_dim <= 128:
            return cost
        return TileCost(max(1, cost.programs // 2), 2 * cost.shared_us, 2 * cost.alone_us)

    def num_programs(self, tile_rows: int) -> int:
        """Return the number of programs with tiles of `tile_rows` rows that the device runs at once."""
        return self.num_multiprocessors * self.cost(tile_rows).programs

    def max_partials(self, num_requests: int, num_kv_heads: int, tile_rows: int) -> int:
        """Return the maximum number of partial results per KV head after `even_splits`, not counting joined rows.

        It is the number of programs that the device runs at once, but at least two per multiprocessor, divided by the
        KV heads, plus two per request. Joined rows, see `joined_rows.py`, have further ones.

        >>> [DeviceCapacity(132).max_partials(4, 8, tile_rows) for tile_rows in (16, 64, 128)]
        [74, 41, 41]
        """
        num_programs = max(self.num_programs(tile_rows), 2 * self.num_multiprocessors)
        return -(-num_programs // num_kv_heads) + 2 * num_requests


# An H100 or H200 (SXM): the default.
HOPPER = DeviceCapacity(132)


@dataclass(frozen=True, slots=True)
class Splits:
    """A way to cut keys into splits.

    Attributes:
        tokens: maximum number of keys of a split, a multiple of 64.
        is_even: whether the splits of a tile have the same length, give or take 64 keys; otherwise keys are cut at
            multiples of `tokens` from position 0.
    """

    tokens: int
    is_even: bool

    def counts(self, start: Ints, end: Ints) -> Ints:
        """Return the number of splits of each range of keys. Ranges start at multiples of 64."""
        if self.is_even:
            return -(-(end - start) // self.tokens)
        return -(-end // self.tokens) - start // self.tokens

    def bounds(self, start: Ints, end: Ints, nth: Ints, counts: Ints) -> tuple[Ints, Ints]:
        """Return first and end key of the nth split of each range, which has `counts` splits."""
        if self.is_even:
            num_key_tiles = _key_tiles_of(end - start)
            first, last = ((n * num_key_tiles // counts) * KEY_ALIGNMENT_TOKENS for n in (nth, nth + 1))
            return start + first, np.minimum(start + last, end)
        split_start = (start // self.tokens + nth) * self.tokens
        return np.maximum(split_start, start), np.minimum(split_start + self.tokens, end)


def even_splits(
    num_keys: Ints, num_rows: Ints, *, num_kv_heads: int, tile_rows: int, max_partials: int, capacity: DeviceCapacity
) -> Splits:
    """Choose how many keys a program reads, so that by an estimate the step ends earliest.

    The programs of a step run in waves. One program more than the device runs at once starts another wave, so the best
    number of splits depends on how full the last wave is.

        32 tiles on a device that    whole    [ 20 of 20 ........... ][ 12 of 20 ........... ]    2 times a tile's time
        runs 20 programs at once     thirds   [  20  ][  20  ][  20  ][  20  ][  16  ]            5/3 times that

    Args:
        num_keys: keys that each tile sees, `[num_tiles]`, at least one tile.
        num_rows: rows of each tile, `[num_tiles]`.
        num_kv_heads: KV heads; each is computed by separate programs.
        tile_rows: rows of a tile.
        max_partials: maximum number of partial results per KV head. A tile whose keys are not split has none, so it is
            always possible to split nothing.
        capacity: how many programs the device runs at once.

    Complexity: O(sizes * tiles). With many tiles fewer sizes are tried, so that this product is at most about 16,000.
    """
    key_tiles = _key_tiles_of(num_keys)
    sizes = _split_sizes(int(key_tiles.max()), 4 * capacity.num_programs(tile_rows) // num_kv_heads, key_tiles.size)
    counts = -(-key_tiles // sizes[:, None])  # [num_sizes, num_tiles]
    step_us = _attention_us(-(-key_tiles // counts), counts, num_kv_heads, capacity, tile_rows)
    partials = np.where(counts > 1, counts, 0)
    row_bytes = 2 * 4 * capacity.head_dim  # a float32 partial result of a row is written and read
    bytes_moved = row_bytes * num_kv_heads * (partials * num_rows).sum(1)
    step_us += np.where(partials.any(1), _MERGE_US + _PARTIAL_US * counts.max(1) + bytes_moved / _BYTES_PER_US, 0.0)
    is_allowed = partials.sum(1) <= max_partials
    is_allowed[0] = True  # the first size splits no tile
    best_size = int(sizes[np.argmin(np.where(is_allowed, step_us, np.inf))])
    return Splits(best_size * KEY_ALIGNMENT_TOKENS, is_even=True)


def _key_tiles_of(num_keys: Ints) -> Ints:
    return -(-num_keys // KEY_ALIGNMENT_TOKENS)


def _split_sizes(longest: int, max_splits: int, num_tiles: int) -> Ints:
    """List sizes of splits, in key tiles: the whole range of keys, a half, a third and so on."""
    # `longest` is the number of key tiles of the tile with the most keys.
    num_splits = np.arange(1, max(1, min(max_splits, longest // _MIN_SPLIT_KEY_TILES)) + 1)
    sizes = np.unique(-(-longest // num_splits))[::-1]
    stride = -(-sizes.size * num_tiles // _MAX_ESTIMATES)
    return sizes[::stride]


def _attention_us(
    split_key_tiles: Ints, counts: Ints, num_kv_heads: int, capacity: DeviceCapacity, tile_rows: int
) -> npt.NDArray[np.float64]:
    """Estimate how long all programs take if the longest ones start first, `[num_sizes]`.

    The first program of each wave is its longest, and the next wave starts when it ends.

    Args:
        split_key_tiles: key tiles of each split of a tile, `[num_sizes, num_tiles]`.
        counts: splits of each tile, `[num_sizes, num_tiles]`.
    """
    cost = capacity.cost(tile_rows)
    num_programs = num_kv_heads * counts.sum(1, keepdims=True)
    num_residents = np.clip(-(-num_programs // capacity.num_multiprocessors), 1, cost.programs)
    order = np.argsort(-split_key_tiles, axis=1, kind="stable")
    split_us = _PROGRAM_US + np.take_along_axis(split_key_tiles, order, 1) * cost.key_tile_us(num_residents)
    ends = num_kv_heads * np.take_along_axis(counts, order, 1).cumsum(1)
    waves = -(-ends // (capacity.num_multiprocessors * num_residents))
    took_us: npt.NDArray[np.float64] = (split_us * np.diff(waves, axis=1, prepend=0)).sum(1)
    return took_us
