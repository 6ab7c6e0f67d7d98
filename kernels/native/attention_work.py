"""Plans attention for `attention.cpp`, once per step for all layers with the same heads and window.

Tokens are divided into tiles of 64 positions. A round is a range of keys, and the tiles of all requests that share
these keys, so that shared keys are read once:

    tokens   [ tile of request 0 )[ tile of request 1 )
    rounds   [ a shared prefix ...................... )  [ own keys of 0 )  [ own keys of 1 )

An item is a unit of work for a thread: some rows of one KV head, and the rounds that include all of their keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixkv.kernels.batch import PagedBatch, QueryTile
from radixkv.kernels.shared_prefix import prefix_order, runs_in_order

Ints = npt.NDArray[np.int32]

# Keys that attention.cpp packs together: kKeys of attention.h.
BLOCK_KEYS = 64

# Maximum number of elements in the rows of an item. Each item packs the keys of its rounds again, so large items pack
# less; small ones are distributed more evenly over threads, and stay in a core's cache. 448 rows of 64 elements took
# 2.77 ms in one item, and 2.84, 2.94 and 3.17 ms in items of 256, 128 and 64 rows (bfloat16, 2,048 keys).
_MAX_ITEM_ELEMENTS = 512 * 64
# Items of longer rows, such as latents, may have this number of rows. 64 tokens of 16 heads of 576 took 115 ms in items
# of 56 rows and 105 ms in items of 128 (bfloat16, 8,192 keys; in float32 210 and 190 ms). 192 rows and their sums do
# not fit into a core's cache, and gain 3 % at most.
_MAX_LONG_ROWS = 128
_MIN_ITEM_ROWS = 32
_ITEMS_PER_THREAD = 2
# The number of rows per item is a multiple of this: kRows, the rows that attention.cpp computes at once with AVX-512.
_ROW_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """The attention of a step, for layers with the same heads and window. All arrays are int32 and contiguous.

    Attributes:
        tokens: `[num_tokens]`, the packed token rows of the step, in the order of the tiles.
        positions: `[num_tokens]`, the position of each token in its sequence.
        blocks: the block ids of all requests, padded to the same number per request and concatenated.
        rounds: `[num_rounds, 6]`. Columns: first and end token, first and end key, first written key (those before it
            are outside the window, and may have no K/V), and the index in `blocks` of the block of the first key. The
            rounds of a token are in ascending order of keys.
        items: `[num_items, 5]`. Columns: KV head, first and end row, first and end round. A row is
            `token * group_size + head`.
    """

    tokens: Ints
    positions: Ints
    blocks: Ints
    rounds: Ints
    items: Ints

    @property
    def max_rows(self) -> int:
        """Rows of the largest item."""
        return int((self.items[:, 2] - self.items[:, 1]).max())


class _SortedTiles(NamedTuple):
    """Tiles, sorted so that tiles that share keys are adjacent.

    Keys are shared in units of `_unit_tokens` keys.

    Attributes:
        tiles: at least one tile.
        num_units: the number of whole units before each tile, `[num_tiles]`.
        same_units: the number of these units that each tile shares with the next one, `[num_tiles - 1]`.
        starts: the number of tokens in the tiles before each tile, and then in all tiles, `[num_tiles + 1]`.
    """

    tiles: Sequence[QueryTile]
    num_units: npt.NDArray[np.int64]
    same_units: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]


def plan_work(
    batch: PagedBatch, *, group_size: int, num_kv_heads: int, head_dim: int, window: int | None, num_threads: int
) -> AttentionWork:
    """Plan the attention of one step.

    Args:
        batch: the token rows of the step.
        group_size: query heads per KV head.
        num_kv_heads: KV heads of the pool.
        head_dim: dimension of a head.
        window: the sliding window; None for full attention. With a window, no keys are shared.
        num_threads: threads that the items are distributed over.
    """
    sorted_tiles = _sort_tiles(batch, window)
    rows_per_item = _rows_per_item(int(sorted_tiles.starts[-1]) * group_size, num_kv_heads, head_dim, num_threads)
    rounds: list[tuple[int, ...]] = []
    items: list[tuple[int, ...]] = []
    for first, end in _groups(sorted_tiles.same_units):
        first_round = len(rounds)
        rounds += _make_rounds(batch, sorted_tiles, first, end, window)
        first_row, end_row = int(sorted_tiles.starts[first]) * group_size, int(sorted_tiles.starts[end]) * group_size
        for row in range(first_row, end_row, rows_per_item):
            item_end_row = min(row + rows_per_item, end_row)
            items += [(kv_head, row, item_end_row, first_round, len(rounds)) for kv_head in range(num_kv_heads)]
    return AttentionWork(
        _ints(np.concatenate([tile.first_token + np.arange(tile.end - tile.start) for tile in sorted_tiles.tiles])),
        _ints(np.concatenate([np.arange(tile.start, tile.end) for tile in sorted_tiles.tiles])),
        _ints(batch.host_tables).reshape(-1),
        _ints(rounds),
        _ints(items),
    )


def _unit_tokens(batch: PagedBatch) -> int:
    """Return the number of keys of a unit, which tiles share as a whole or not at all."""
    return max(BLOCK_KEYS, batch.block_size)


def _sort_tiles(batch: PagedBatch, window: int | None) -> _SortedTiles:
    unit_tokens, tiles = _unit_tokens(batch), [*batch.query_tiles(BLOCK_KEYS)]
    num_units = np.array([0 if window else tile.start // unit_tokens for tile in tiles])
    tables = batch.host_tables[[tile.request for tile in tiles]]
    order, same_units = prefix_order(tables, num_units, unit_tokens // batch.block_size)
    tiles = [tiles[i] for i in order]
    return _SortedTiles(tiles, num_units[order], same_units, np.cumsum([0, *(tile.end - tile.start for tile in tiles)]))


def _rows_per_item(num_rows: int, num_kv_heads: int, head_dim: int, num_threads: int) -> int:
    max_rows = max(_MAX_LONG_ROWS, _MAX_ITEM_ELEMENTS // head_dim // _ROW_MULTIPLE * _ROW_MULTIPLE)
    if num_threads == 1:
        return max_rows
    even_rows = -(-num_rows * num_kv_heads // (_ITEMS_PER_THREAD * num_threads * _ROW_MULTIPLE)) * _ROW_MULTIPLE
    return min(max_rows, max(_MIN_ITEM_ROWS, even_rows))


def _make_rounds(
    batch: PagedBatch, sorted_tiles: _SortedTiles, first: int, end: int, window: int | None
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Yield the rounds of the tiles `[first, end)`: those over shared keys, then those over each tile's own keys."""
    unit_tokens, blocks_per_request = _unit_tokens(batch), int(batch.host_tables.shape[1])
    starts = sorted_tiles.starts[first:].tolist()

    def block_index(tile: int, key: int) -> int:
        return sorted_tiles.tiles[tile].request * blocks_per_request + key // batch.block_size

    for run in runs_in_order(
        sorted_tiles.num_units[first:end].tolist(), sorted_tiles.same_units[first : end - 1].tolist()
    ):
        first_key, end_key = run.first_unit * unit_tokens, run.end_unit * unit_tokens
        yield starts[run.first], starts[run.end], first_key, end_key, 0, block_index(first + run.first, first_key)
    for i, tile in enumerate(sorted_tiles.tiles[first:end]):
        first_written = max(0, tile.start + 1 - window) if window else 0
        first_key = max(first_written // BLOCK_KEYS * BLOCK_KEYS, int(sorted_tiles.num_units[first + i]) * unit_tokens)
        yield starts[i], starts[i + 1], first_key, tile.end, first_written, block_index(first + i, first_key)


def _ints(numbers: npt.ArrayLike) -> Ints:
    return np.ascontiguousarray(numbers, dtype=np.int32)


def _groups(same_units: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Split tiles, in order, into groups `[first, end)` that share no keys."""
    starts = [0, *(np.flatnonzero(same_units == 0) + 1).tolist()]
    yield from itertools.pairwise([*starts, len(same_units) + 1])
