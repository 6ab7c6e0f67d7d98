"""Plans the work of each program of the paged attention kernel, on the host, once per step for all layers.

tile 0     keys [ split 0 ......... )[ split 1 ..... )     two partial results, which are merged
tile 1     keys [ one item ..... )                         written to the output directly

tile 2     keys [ joined, read once )[ one item )          two partial results
tile 3     keys [ joined, read once )[ one item .... )     two partial results
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from radixkv.kernels.batch import Ints, PagedBatch, repeat_indices
from radixkv.kernels.gpu.attention_splits import HOPPER, KEY_ALIGNMENT_TOKENS, DeviceCapacity, Splits, even_splits
from radixkv.kernels.gpu.joined_rows import Joins, fast_unit_tokens, join_rows, may_join
from radixkv.kernels.staging import to_device

# A work item, a merge and a joined row that read no key and write nothing. They pad the lists of a step that is
# captured as a CUDA graph.
NO_WORK = (0, 0, 0, 0, 0, 1, 1, -1)
NO_MERGE = (0, 0, 0, 0, 0)
NO_ROW = (0, 0, 0)

# The value in the column of an item's first token if its rows are joined rows.
JOINED = -1


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The work list of one step for all layers with the same number of query heads and the same window.

    The queries of one request and one KV head are packed into rows: row `r` is query head `r % group_size` of the
    group, of suffix token `r // group_size`. A tile is `tile_rows` consecutive rows. A tile with many visible keys is
    split: each split writes a partial result for each row, and the partial results are merged.

    Rows of several requests that attend to the same K/V may be joined in one tile for these keys. Its partial results
    are merged with those of the requests' own tiles for the other keys.

    Attributes:
        tile_rows: packed rows per program.
        group_size: query heads per KV head.
        window: the sliding window of these layers, None for full attention.
        work: int32 `[num_items, 8]` on the device, longest first. Columns: request, first packed token row of the
            request, suffix tokens of the request, prefix tokens, first row of the tile, first key position, end key
            position, first row of the partial result, or -1 if the item writes to the output directly.
            Columns of an item with joined rows: a request whose block table has the keys, `JOINED`, end joined row,
            last key position, first joined row, first key position, end key position, index of the split among those
            of each row.
        merges: int32 `[num_merges, 5]` on the device. Columns: first packed token row of the request, suffix tokens,
            first row of the tile, first row of its first partial result, number of partial results.
        joined_rows: int32 `[num_joined_rows, 3]` on the device. Columns: the packed row among those of all requests,
            its row in the first partial result of its tile, and the number of rows of that tile.
        num_partial_rows: rows of all partial results per KV head. Those of a tile are adjacent.
    """

    tile_rows: int
    group_size: int
    window: int | None
    work: torch.Tensor
    merges: torch.Tensor
    joined_rows: torch.Tensor
    num_partial_rows: int

    def with_idle_work(self) -> AttentionPlan:
        """Return a copy with additional idle items, like the padded plan of a CUDA graph."""
        idle, no_merge = self.work.new_tensor([NO_WORK] * 3), self.merges.new_tensor([NO_MERGE] * 3)
        return replace(
            self,
            work=torch.cat((self.work, idle)),
            merges=torch.cat((self.merges, no_merge)),
            joined_rows=torch.cat((self.joined_rows, self.joined_rows.new_tensor([NO_ROW] * 3))),
            num_partial_rows=self.num_partial_rows + 3,
        )


_Rows: TypeAlias = npt.NDArray[np.int32]


class _Tiles(NamedTuple):
    """Tiles of packed rows, and the keys that each of them attends to.

    Attributes:
        rows: int64 `[5, num_tiles]`, the first five columns of `AttentionPlan.work`.
        num_rows: int64 `[num_tiles]`, rows of each tile that belong to the request.
        kv_start, kv_end: int64 `[num_tiles]`, half-open ranges of key positions.
        last: int64 `[num_requests]`, the last tile of each request.
    """

    rows: Ints
    num_rows: Ints
    kv_start: Ints
    kv_end: Ints
    last: Ints


def plan_attention(
    batch: PagedBatch,
    *,
    num_query_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    window: int | None = None,
    tile_rows: int | None = None,
    split_tokens: int | None = None,
    joins: bool = True,
    capacity: DeviceCapacity = HOPPER,
) -> AttentionPlan:
    """Plan the attention of one step for layers with the same number of query heads and the same window.

    If `tile_rows` and `split_tokens` are given, the bits of a row depend only on its prefix and its position: not on
    the rest of the batch, nor on where its suffix begins. Splits then begin at multiples of the split size.

    Args:
        batch: the token rows of the step.
        num_query_heads: query heads of these layers, a multiple of `num_kv_heads`.
        num_kv_heads: KV heads of the pool.
        dtype: dtype of the queries.
        window: tokens that a query attends to, including its own; None for all.
        tile_rows: 16, 64 or 128; None chooses it for the batch, see `tile_rows_for`.
        split_tokens: maximum number of keys per program, a multiple of 64; None distributes the keys evenly over the
            device, see `even_splits`.
        joins: whether rows of requests that share K/V are joined. They are not if the window hides any key.
        capacity: how many programs the device runs at once, for `even_splits`.

    Returns:
        A plan whose tensors are on the device of `batch.block_tables`.

    Raises:
        ValueError: `num_query_heads` is not a multiple of `num_kv_heads`, or `split_tokens` is not a positive multiple
            of 64.
    """
    group_size, remainder = divmod(num_query_heads, num_kv_heads)
    if remainder or not group_size:
        raise ValueError(f"num_query_heads: expected a multiple of {num_kv_heads} KV heads, got {num_query_heads}")
    if tile_rows is None:
        max_rows = group_size * batch.max_query_len
        tile_rows = tile_rows_for(batch, group_size, dtype, window) if joins else fitting_tile_rows(max_rows, dtype)
    if split_tokens is not None and (split_tokens < 1 or split_tokens % KEY_ALIGNMENT_TOKENS):
        raise ValueError(f"split_tokens: expected a positive multiple of {KEY_ALIGNMENT_TOKENS}, got {split_tokens}")
    tiles = _make_tiles(batch, group_size, tile_rows, window)
    batch_joins = None
    if joins and may_join(batch, window):
        batch_joins = _join_last_tiles(
            batch, tiles, group_size, tile_rows, split_tokens or fast_unit_tokens(batch.block_size)
        )
    if batch_joins is not None:
        tiles.kv_start[tiles.last] = batch_joins.end_keys
    if split_tokens is None:
        splits = _even_splits(tiles, batch_joins, num_kv_heads, tile_rows, capacity)
    else:
        splits = Splits(split_tokens, is_even=False)
    work, merges, joined_rows, num_partial_rows = _cut_keys(tiles, batch_joins, group_size, tile_rows, splits)
    device = batch.block_tables.device
    return AttentionPlan(
        tile_rows=tile_rows,
        group_size=group_size,
        window=window,
        work=to_device(torch.from_numpy(work), device),
        merges=to_device(torch.from_numpy(merges), device),
        joined_rows=to_device(torch.from_numpy(joined_rows), device),
        num_partial_rows=num_partial_rows,
    )


def first_key(position: Ints, window: int | None) -> Ints:
    """Return the first key position that each tile reads, `[num_tiles]`, given the position of its first query.

    >>> first_key(np.array([10, 500]), window=100)
    array([  0, 384])
    """
    first_visible = np.zeros_like(position) if window is None else np.maximum(0, position + 1 - window)
    return first_visible // KEY_ALIGNMENT_TOKENS * KEY_ALIGNMENT_TOKENS


def _make_tiles(batch: PagedBatch, group_size: int, tile_rows: int, window: int | None) -> _Tiles:
    query_lens = batch.query_lens
    num_tiles = -(-query_lens * group_size // tile_rows)
    request, nth = repeat_indices(num_tiles)
    first_row = nth * tile_rows
    num_tokens = query_lens[request]
    num_prefix_tokens = np.array(batch.kv_lens)[request] - num_tokens
    last_token = np.minimum((first_row + tile_rows - 1) // group_size, num_tokens - 1)
    kv_start = first_key(num_prefix_tokens + first_row // group_size, window)
    rows = np.array((request, np.array(batch.query_starts)[request], num_tokens, num_prefix_tokens, first_row))
    num_rows = np.minimum(num_tokens * group_size - first_row, tile_rows)
    return _Tiles(rows, num_rows, kv_start, num_prefix_tokens + last_token + 1, np.cumsum(num_tiles) - 1)


def _join_last_tiles(
    batch: PagedBatch, tiles: _Tiles, group_size: int, tile_rows: int, unit_tokens: int
) -> Joins | None:
    """Join the last tiles of requests. Full tiles are not joined: a program can hold no more rows."""
    last = tiles.last
    _, _, _, num_prefix_tokens, first_row = tiles.rows[:, last]
    positions = num_prefix_tokens + first_row // group_size
    return join_rows(batch, tiles.num_rows[last] % tile_rows, positions, tile_rows, unit_tokens)


def _even_splits(
    tiles: _Tiles, joins: Joins | None, num_kv_heads: int, tile_rows: int, capacity: DeviceCapacity
) -> Splits:
    """Distribute the keys of all tiles over the device, including those of joined rows."""
    num_keys, num_rows = tiles.kv_end - tiles.kv_start, tiles.num_rows
    if joins is not None:
        joined_keys, joined_rows = joins.tiles(tile_rows)
        num_keys, num_rows = np.concatenate((num_keys, joined_keys)), np.concatenate((num_rows, joined_rows))
    return even_splits(
        num_keys,
        num_rows,
        num_kv_heads=num_kv_heads,
        tile_rows=tile_rows,
        max_partials=capacity.max_partials(tiles.last.size, num_kv_heads, tile_rows),
        capacity=capacity,
    )


def _cut_keys(
    tiles: _Tiles, joins: Joins | None, group_size: int, tile_rows: int, splits: Splits
) -> tuple[_Rows, _Rows, _Rows, int]:
    """Split the keys of tiles. Returns a plan's work, merges, joined rows, and number of rows of partial results."""
    num_splits = splits.counts(tiles.kv_start, tiles.kv_end)
    tile, nth = repeat_indices(num_splits)  # the tile of each item, and the index of the item in that tile
    kv_start, kv_end = splits.bounds(tiles.kv_start[tile], tiles.kv_end[tile], nth, num_splits[tile])
    if joins is not None:
        pieces, num_pieces = joins.pieces(tile_rows, splits)
        num_before = np.zeros_like(num_splits)
        num_before[tiles.last] = num_pieces
        num_splits += num_before
        nth += num_before[tile]  # from here on, the index among all items of its rows, joined ones included

    num_partials = num_splits * (num_splits > 1)  # a tile with one item writes to the output directly
    end_partial_row = np.cumsum(num_partials * tiles.num_rows)
    first_partial_row = end_partial_row - num_partials * tiles.num_rows
    partial_row = np.where(num_splits[tile] > 1, first_partial_row[tile] + nth * tiles.num_rows[tile], -1)
    work = _as_rows((*tiles.rows[:, tile], kv_start, kv_end, partial_row))
    joined_rows = np.empty((0, len(NO_ROW)), dtype=np.int32)
    if joins is not None:
        work = np.concatenate((_joined_work(pieces), work))
        joined_rows = _joined_rows(tiles, tiles.last[joins.requests], first_partial_row, group_size)
    work = work[np.argsort(work[:, 5] - work[:, 6], kind="stable")]  # longest first: short ones fill the last wave

    _, first_token, num_tokens, _, first_row = tiles.rows
    split_tiles = np.flatnonzero(num_partials)
    merges = _as_rows(
        column[split_tiles] for column in (first_token, num_tokens, first_row, first_partial_row, num_partials)
    )
    return work, merges, joined_rows, int(end_partial_row[-1])


def _joined_work(pieces: Ints) -> _Rows:
    request, first_row, end_row, kv_start, kv_end, number = pieces
    return _as_rows((request, np.full_like(request, JOINED), end_row, kv_end - 1, first_row, kv_start, kv_end, number))


def _joined_rows(tiles: _Tiles, joined_tiles: Ints, first_partial_row: Ints, group_size: int) -> _Rows:
    _, first_token, _, _, first_row = tiles.rows
    index, nth = repeat_indices(tiles.num_rows[joined_tiles])
    tile = joined_tiles[index]
    row = first_token[tile] * group_size + first_row[tile] + nth
    return _as_rows((row, first_partial_row[tile] + nth, tiles.num_rows[tile]))


def _as_rows(columns: Iterable[Ints]) -> _Rows:
    return np.ascontiguousarray(np.array([*columns], dtype=np.int32).T)


_TILE_ROWS = (16, 64, 128)

# The smallest tiles that read at most this many times as many keys as the largest tiles are chosen, because requests
# that are not joined have more empty rows in a larger tile. The number is an estimate.
_MAX_KEYS_RATIO = 1.25


def fitting_tile_rows(max_rows: int, dtype: torch.dtype) -> int:
    """Return the rows per tile that fit the longest suffix.

    In float32, tensor cores are not used, and larger tiles spill registers.

    Args:
        max_rows: packed rows of the longest suffix of a batch.
        dtype: dtype of the queries.

    >>> [fitting_tile_rows(max_rows, torch.bfloat16) for max_rows in (7, 40, 1000)]
    [16, 64, 128]
    """
    if max_rows <= 16 or dtype == torch.float32:
        return 16
    return 64 if max_rows <= 64 else 128


def tile_rows_for(batch: PagedBatch, group_size: int, dtype: torch.dtype, window: int | None = None) -> int:
    """Return the rows per tile for a batch: more than the longest suffix needs, if enough rows can be joined.

    >>> tables = 40 * [np.arange(20, dtype=np.int32)]
    >>> batch = PagedBatch.build(40 * [1], 40 * [1200], tables, block_size=64)
    >>> tile_rows_for(batch, 4, torch.bfloat16), tile_rows_for(batch, 4, torch.bfloat16, window=500)
    (64, 16)

    Args:
        batch: the token rows of the step.
        group_size: query heads per KV head.
        dtype: dtype of the queries.
        window: the sliding window of the layers, None for full attention.
    """
    min_tile_rows = fitting_tile_rows(group_size * batch.max_query_len, dtype)
    if min_tile_rows == _TILE_ROWS[-1] or dtype == torch.float32 or not may_join(batch, window):
        return min_tile_rows
    kv_lens, num_tokens = np.array(batch.kv_lens), batch.query_lens
    joins = join_rows(
        batch, num_tokens * group_size, kv_lens - num_tokens, _TILE_ROWS[-1], fast_unit_tokens(batch.block_size)
    )
    if joins is None:
        return min_tile_rows
    own_keys = int((kv_lens - joins.end_keys).sum())
    num_keys = {tile_rows: own_keys + joins.num_tile_keys(tile_rows) for tile_rows in _TILE_ROWS}
    max_keys = _MAX_KEYS_RATIO * num_keys[_TILE_ROWS[-1]]
    return next(rows for rows in _TILE_ROWS if rows >= min_tile_rows and num_keys[rows] <= max_keys)
