"""Plans attention for `attention.cpp`. Made once per step, read by every layer that demands the same.

Tokens are divided into tiles of 64 positions. A step here is a range of keys and all tiles that read it, because their
requests have the same blocks there. So keys that requests share are read once for all of them:

    tokens   [ tile of request 0 )[ tile of request 1 )
    steps    [ a shared prefix ...................... )  [ own keys of 0 )  [ own keys of 1 )

An item is what one thread does at once: some rows of one KV head, over all their steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.shared_prefix import prefix_order, runs_in_order

Ints = npt.NDArray[np.int32]

# Keys that rows meet at once: kKeys of attention.cpp.
BLOCK_KEYS = 64

# Numbers in the rows of an item: more lay out keys less often, fewer are shared out better and stay in a core's cache.
# 448 rows of 64 took 2.77 ms in one item, 2.84 in items of 256 rows, 2.94 of 128 and 3.17 of 64 (bfloat16, 2,048 keys).
_MOST_NUMBERS = 512 * 64
# Of longer rows, as latents are: 64 tokens of 16 heads of 576 took 115 ms in items of 56 rows and 105 of 128 (bfloat16,
# 8,192 keys), in float32 210 and 190. 192 rows and their sums do not fit into a core's cache, and gain 3 % at most.
_MOST_LONG_ROWS = 128
_FEWEST_ROWS = 32
_ITEMS_A_THREAD = 2
_TILE_ROWS = 8  # kRows of attention.cpp with AVX-512; it shares out rows evenly among tiles


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """The attention of a step, for layers with the same heads and window. All arrays are int32 and contiguous.

    Attributes:
        tokens: `[num_tokens]`, the tokens of the step in the order of the tiles.
        positions: `[num_tokens]`, their positions among the stored tokens of their requests.
        blocks: block ids of all requests, one after the other.
        steps: `[num_steps, 6]`: first and end of its tokens, first and end of its keys, the first key that is written,
            and where in `blocks` the block of the first key is. Of each token in ascending order of keys.
        items: `[num_items, 5]`: KV head, first and end of its rows, first and end of its steps. Row
            `token * group_size + head`.
    """

    tokens: Ints
    positions: Ints
    blocks: Ints
    steps: Ints
    items: Ints

    @property
    def most_rows(self) -> int:
        """Rows of the largest item."""
        return int((self.items[:, 2] - self.items[:, 1]).max())


class _Tile(NamedTuple):
    """A request's tokens at positions `[start, end)`. Packed token `first_token` is at `start`."""

    request: int
    start: int
    end: int
    first_token: int


class _Order(NamedTuple):
    """Tiles, sorted so that those which share keys follow each other.

    Attributes:
        tiles: at least one.
        num_units: units of keys before each tile that it may share, `[num_tiles]`.
        same_units: how many of them it has in common with the next one, `[num_tiles - 1]`.
        ends: the first token of each, and the number of tokens, `[num_tiles + 1]`.
    """

    tiles: Sequence[_Tile]
    num_units: npt.NDArray[np.int64]
    same_units: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]


def plan_work(
    batch: PagedBatch, *, group_size: int, num_kv_heads: int, head_dim: int, window: int | None, num_threads: int
) -> AttentionWork:
    """Lay out the attention of one step.

    Args:
        batch: the token rows of the step.
        group_size: query heads per KV head.
        num_kv_heads: KV heads of the pool.
        head_dim: numbers of a head.
        window: the sliding window; None for full attention. Windows share nothing.
        num_threads: threads that share the items.
    """
    order = _order(batch, window)
    rows_an_item = _rows_an_item(int(order.ends[-1]) * group_size, num_kv_heads, head_dim, num_threads)
    steps: list[tuple[int, ...]] = []
    items: list[tuple[int, ...]] = []
    for first, end in _bundles(order.same_units):
        first_step = len(steps)
        steps += _steps(batch, order, first, end, window)
        first_row, end_row = int(order.ends[first]) * group_size, int(order.ends[end]) * group_size
        for row in range(first_row, end_row, rows_an_item):
            last = min(row + rows_an_item, end_row)
            items += [(head, row, last, first_step, len(steps)) for head in range(num_kv_heads)]
    return AttentionWork(
        _ints(np.concatenate([tile.first_token + np.arange(tile.end - tile.start) for tile in order.tiles])),
        _ints(np.concatenate([np.arange(tile.start, tile.end) for tile in order.tiles])),
        _ints(batch.host_tables).reshape(-1),
        _ints(steps),
        _ints(items),
    )


def _unit_tokens(batch: PagedBatch) -> int:
    """Return the keys that are shared together or not at all."""
    return max(BLOCK_KEYS, batch.block_size)


def _order(batch: PagedBatch, window: int | None) -> _Order:
    unit_tokens, tiles = _unit_tokens(batch), [*_tiles(batch)]
    num_units = np.array([0 if window else tile.start // unit_tokens for tile in tiles])
    tables = batch.host_tables[[tile.request for tile in tiles]]
    order, same_units = prefix_order(tables, num_units, unit_tokens // batch.block_size)
    tiles = [tiles[i] for i in order]
    return _Order(tiles, num_units[order], same_units, np.cumsum([0, *(tile.end - tile.start for tile in tiles)]))


def _rows_an_item(num_rows: int, num_kv_heads: int, head_dim: int, num_threads: int) -> int:
    most = max(_MOST_LONG_ROWS, _MOST_NUMBERS // head_dim // _TILE_ROWS * _TILE_ROWS)
    if num_threads == 1:
        return most
    evenly = -(-num_rows * num_kv_heads // (_ITEMS_A_THREAD * num_threads * _TILE_ROWS)) * _TILE_ROWS
    return min(most, max(_FEWEST_ROWS, evenly))


def _steps(
    batch: PagedBatch, order: _Order, first: int, end: int, window: int | None
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Make the steps of the tiles `[first, end)`: first those over shared keys, then each tile's own."""
    unit_tokens, width = _unit_tokens(batch), int(batch.host_tables.shape[1])
    starts = order.ends[first:].tolist()

    def place(tile: int, key: int) -> int:
        return order.tiles[tile].request * width + key // batch.block_size

    for run in runs_in_order(order.num_units[first:end].tolist(), order.same_units[first : end - 1].tolist()):
        first_key, end_key = run.first_unit * unit_tokens, run.end_unit * unit_tokens
        yield starts[run.first], starts[run.end], first_key, end_key, 0, place(first + run.first, first_key)
    for i, tile in enumerate(order.tiles[first:end]):
        first_written = max(0, tile.start + 1 - window) if window else 0
        first_key = max(first_written // BLOCK_KEYS * BLOCK_KEYS, int(order.num_units[first + i]) * unit_tokens)
        yield starts[i], starts[i + 1], first_key, tile.end, first_written, place(first + i, first_key)


def _ints(numbers: npt.ArrayLike) -> Ints:
    return np.ascontiguousarray(numbers, dtype=np.int32)


def _tiles(batch: PagedBatch) -> Iterator[_Tile]:
    for i, kv_len in enumerate(batch.kv_lens):
        first_token, end_token = batch.query_starts[i], batch.query_starts[i + 1]
        prefix_len = kv_len - (end_token - first_token)
        for tile_start in range(prefix_len // BLOCK_KEYS * BLOCK_KEYS, kv_len, BLOCK_KEYS):
            start = max(tile_start, prefix_len)
            yield _Tile(i, start, min(tile_start + BLOCK_KEYS, kv_len), first_token + start - prefix_len)


def _bundles(same_units: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Cut tiles in order where neighbours share nothing: `[first, end)`."""
    cuts = [0, *(np.flatnonzero(same_units == 0) + 1).tolist(), len(same_units) + 1]
    yield from itertools.pairwise(cuts)
