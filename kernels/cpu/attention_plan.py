"""Plans paged attention on a CPU, once per step for all layers with the same `AttentionSpec`.

A row is one query head of one token. A tile is the rows of a request in a range of 128 positions. The keys of a tile
are split into pieces at fixed positions, independent of the batch and of the cache:

    position   0 ............ 512 ........... 1024 ... 1280 ... 1408
    pieces     [ unit 0 ......)[ unit 1 ......)[ part  )[ tail  )       of the tile [1280, 1408)

    unit       512 keys. All rows of the tile attend to them, so they need no mask
    part       256 keys between the last unit and the tail, likewise
    tail       the last 128 or 256 keys, which end with the tile; a mask hides the later keys from each row

Rows of several tiles, of one or several requests, are computed together, as a group. If they share the blocks of units
or parts, one matmul serves all of them:

    group      [ tile of request 0 )[ tile of request 1 )[ tile of request 2 )
    strips     [ units 0 and 1, whose blocks all three share .............. )
               [ a part that two of them share ........ )[ another part ... )

A strip is consecutive units, or consecutive parts, of the same rows. A row's pieces, and the order in which they are
merged, depend on its position alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from radixkv.kernels.batch import PagedBatch, QueryTile
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.scoring import Scoring
from radixkv.kernels.shared_prefix import prefix_order, runs_in_order

# Keys of a unit. Longer units are hardly faster, and are shared less often: for 2,048 keys, 16 rows took 0.215 ms in
# units of 512 and 0.200 ms in one unit; 1,792 rows took 15.5 and 15.1 ms (2 heads of 64, float32, one thread).
UNIT_TOKENS = 512

# Keys of a part. For 512 new tokens, parts of 128 keys took 10.2 ms (bfloat16: 7.1 ms), and parts of 256 keys took
# 9.0 ms (4.8 ms).
PART_TOKENS = 256

# Positions of a tile. A tile of 64 positions has fewer masked keys, but needs twice as many calls.
TILE_TOKENS = 128

# With fewer than four rows, the library's matmul takes another code path, with another summation order.
ROWS_MULTIPLE = 16

# From 64 rows on, the library uses another code path for half precision on processors with AMX, which adds up 32 terms
# at a time. Sums of other lengths round differently, so head dims and windows are padded with zeros.
SUM_MULTIPLE = 32


class AttentionSpec(NamedTuple):
    """Properties that the layers of a plan have in common.

    Attributes:
        group_size: query heads per KV head.
        row_elements: elements of a row, over all KV heads: `num_kv_heads * head_dim`.
        dtype: dtype of the queries.
        window: the sliding window, None for full attention.
        splits_keys: whether the keys before a tile are split into pieces. They are not if there is a window, or if
            partial results can't be merged: a tile then attends to all its keys at once.
        reads_in_place: whether K and V of adjacent blocks can be read without copying them.
    """

    group_size: int
    row_elements: int
    dtype: torch.dtype
    window: int | None
    splits_keys: bool
    reads_in_place: bool

    @classmethod
    def of(cls, query: torch.Tensor, pool: KVPool, scoring: Scoring) -> AttentionSpec:
        """Return the properties of a layer.

        Args:
            query: `[num_tokens, num_query_heads, head_dim]`.
            pool: the K/V.
            scoring: how scores are computed, and which keys a query attends to.
        """
        _, num_query_heads, head_dim = query.shape
        return cls(
            group_size=num_query_heads // pool.num_kv_heads,
            row_elements=pool.num_kv_heads * head_dim,
            dtype=query.dtype,
            window=scoring.window,
            splits_keys=scoring.window is None and scoring.softcap is None,
            reads_in_place=pool.is_by_layer and pool.dtype == query.dtype and not missing_dims(head_dim, query.dtype),
        )


def missing_dims(head_dim: int, dtype: torch.dtype) -> int:
    """Return the padding of the head dim to a length that all processors sum in the same order."""
    return 0 if dtype == torch.float32 else -head_dim % SUM_MULTIPLE


@dataclass(frozen=True, slots=True)
class Strip:
    """Consecutive units, or consecutive parts, to which some rows of a group attend without a mask.

    Attributes:
        pieces: their indices among the pieces of these rows.
        unit_tokens: keys of each unit or part.
        rows: the rows in the group.
        blocks: adjacent blocks, which are read in place, or int64, the blocks to copy.
    """

    pieces: slice
    unit_tokens: int
    rows: slice
    blocks: slice | torch.Tensor


@dataclass(frozen=True, slots=True)
class Tails:
    """The tails of tiles with the same number of rows and of keys: the last keys of each tile, which are masked.

    Attributes:
        rows: the rows in the group. Of a single tile, a range that extends into the padding of the group's rows; of
            several tiles, int64 `[num_tiles * num_rows]`, where each tile is padded by repeating its last row.
        positions: int64 `[num_tiles, num_rows]`, the position of each row; `num_rows` is a multiple of `ROWS_MULTIPLE`.
        first_keys: int64 `[num_tiles]`, the position of each tile's first key.
        block_ids: int64, the blocks of the keys, tile by tile.
        num_skipped_keys: keys in the first block of each tile that precede the tile's first key.
        num_keys: keys of each tile, a multiple of `SUM_MULTIPLE`.
        unwritten: int64, the slots of these blocks that may contain any values; None if there are none.
        kept_mask: the `mask` of these tiles; None if it is too large to be kept.
    """

    rows: slice | torch.Tensor
    positions: torch.Tensor
    first_keys: torch.Tensor
    block_ids: torch.Tensor
    num_skipped_keys: int
    num_keys: int
    unwritten: torch.Tensor | None
    kept_mask: torch.Tensor | None = None

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return `[num_tiles, 1, num_rows, num_keys]`: 0 where a row attends to a key, and -inf elsewhere.

        Args:
            window: the sliding window, None for full attention.
            dtype: dtype of the queries.
        """
        if self.kept_mask is not None:
            return self.kept_mask
        keys = self.first_keys[:, None, None] + torch.arange(self.num_keys)  # [num_tiles, 1, num_keys]
        positions = self.positions[:, :, None]  # [num_tiles, num_rows, 1]
        is_hidden = keys > positions
        if window is not None:
            is_hidden |= keys <= positions - window
        return torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, float("-inf"))[:, None]


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that are computed together.

    Attributes:
        tokens: the tokens of these rows, as indices of the step's packed token rows: a range, or int64 `[num_tokens]`.
        num_tokens: number of these tokens.
        num_strip_pieces: the maximum number of units and parts of a row.
        strips: ordered by their first piece.
        tails: the tails of the tiles of these rows.
        tail_rows: the index of each row of the group among the rows of all tails: a range, or int64 `[num_rows]`.
    """

    tokens: slice | torch.Tensor
    num_tokens: int
    num_strip_pieces: int
    strips: tuple[Strip, ...]
    tails: tuple[Tails, ...]
    tail_rows: slice | torch.Tensor


_PARTS_PER_UNIT = UNIT_TOKENS // PART_TOKENS

# Maximum rows of a group, and maximum elements of its pieces or of its mask: 64 MiB of float32.
_MAX_GROUP_ROWS = 1024
_MAX_GROUP_ELEMENTS = 1 << 24

# Maximum number of tokens that are copied at once if K and V can't be read in place: 8 MiB in float32 for 2 heads of
# 64 dimensions.
_MAX_COPIED_TOKENS = 8192

# Maximum elements of a mask that is kept for all layers. A larger one, for a long window, is computed in each layer.
_MAX_KEPT_MASK_ELEMENTS = 1 << 20


class _GroupTiles(NamedTuple):
    """The tiles of a group, in `prefix_order`.

    Attributes:
        tiles: at least one tile.
        tables: `[num_tiles, max_blocks]`, the blocks of each tile's request.
        num_parts: whole parts before each tile, `[num_tiles]`.
        same_parts: the number of these parts that each tile shares with the next one, `[num_tiles - 1]`.
        first_rows: the first row of each tile in the group, and the number of rows, `[num_tiles + 1]`.
    """

    tiles: Sequence[QueryTile]
    tables: npt.NDArray[np.int32]
    num_parts: npt.NDArray[np.int64]
    same_parts: npt.NDArray[np.int64]
    first_rows: npt.NDArray[np.int64]


def plan_cpu_attention(batch: PagedBatch, spec: AttentionSpec) -> list[Group]:
    """Plan the attention of one step for the layers with the same `AttentionSpec`.

    Args:
        batch: the token rows of the step. The block size divides `TILE_TOKENS`.
        spec: the properties that the layers have in common.
    """
    tiles = [*_tiles(batch, spec)]
    num_parts = np.array([_num_parts(tile, spec) for tile in tiles])
    tables = batch.host_tables[[tile.request for tile in tiles]]
    order, same_parts = prefix_order(tables, num_parts, PART_TOKENS // batch.block_size)
    tiles, tables, num_parts = [tiles[i] for i in order], tables[order], num_parts[order]
    groups = []
    for first, end in _cut_into_groups(tiles, spec):
        in_group = slice(first, end)
        num_rows = [(tile.end - tile.start) * spec.group_size for tile in tiles[in_group]]
        first_rows = np.cumsum([0, *num_rows])
        group = _GroupTiles(
            tiles[in_group], tables[in_group], num_parts[in_group], same_parts[first : end - 1], first_rows
        )
        groups.append(_make_group(batch, spec, group))
    return groups


def _tiles(batch: PagedBatch, spec: AttentionSpec) -> Iterator[QueryTile]:
    """Yield the tiles of a step.

    A tile that exceeds the size of a group is divided into tiles of fewer rows, which attend to the same keys.
    """
    for tile in batch.query_tiles(TILE_TOKENS):
        max_tokens = max(1, _MAX_GROUP_ELEMENTS // (_elements_per_row(tile, spec) * spec.group_size))
        for start in range(tile.start, tile.end, max_tokens):
            end = min(start + max_tokens, tile.end)
            yield QueryTile(tile.request, start, end, tile.first_token + start - tile.start)


def _num_parts(tile: QueryTile, spec: AttentionSpec) -> int:
    """Return the number of whole parts before a tile, those inside units included."""
    return tile.start // PART_TOKENS if spec.splits_keys else 0


def _num_pieces(num_parts: int) -> int:
    """Return the number of units, and parts outside units, in `num_parts` parts."""
    return num_parts // _PARTS_PER_UNIT + num_parts % _PARTS_PER_UNIT


def _elements_per_row(tile: QueryTile, spec: AttentionSpec) -> int:
    """Return the elements of the pieces of a row, or of its mask, whichever are more."""
    num_pieces = _num_pieces(_num_parts(tile, spec)) + 1  # the tail included
    return max(num_pieces * spec.row_elements, _num_keys(tile, spec))


def _cut_into_groups(tiles: Sequence[QueryTile], spec: AttentionSpec) -> Iterator[tuple[int, int]]:
    """Split tiles, in order, into groups of bounded size, `[first, end)`."""
    first, num_rows, row_elements = 0, 0, 0  # of the group that is being filled
    for i, tile in enumerate(tiles):
        tile_rows, tile_row_elements = (tile.end - tile.start) * spec.group_size, _elements_per_row(tile, spec)
        new_rows, row_elements = num_rows + tile_rows, max(row_elements, tile_row_elements)
        if num_rows and (new_rows > _MAX_GROUP_ROWS or new_rows * row_elements > _MAX_GROUP_ELEMENTS):
            yield first, i
            first, new_rows, row_elements = i, tile_rows, tile_row_elements
        num_rows = new_rows
    yield first, len(tiles)


def _make_group(batch: PagedBatch, spec: AttentionSpec, group: _GroupTiles) -> Group:
    tokens = np.concatenate([tile.first_token + np.arange(tile.end - tile.start) for tile in group.tiles])
    strips = [*_make_strips(batch.block_size, spec, group)] if group.num_parts.any() else []
    tails, tail_rows = _make_tails(batch, spec, group)
    return Group(
        _as_selection(tokens),
        len(tokens),
        max((strip.pieces.stop for strip in strips), default=0),
        tuple(sorted(strips, key=lambda strip: strip.pieces.start)),
        tails,
        _as_selection(tail_rows),
    )


def _as_selection(indices: npt.NDArray[np.int64]) -> slice | torch.Tensor:
    """Return indices as a slice if they are consecutive, which is selected without a copy."""
    first, end = int(indices[0]), int(indices[0]) + len(indices)
    return slice(first, end) if (indices == np.arange(first, end)).all() else torch.from_numpy(indices)


def _make_strips(block_size: int, spec: AttentionSpec, group: _GroupTiles) -> Iterator[Strip]:
    _, tables, num_parts, same_parts, first_rows = group
    num_units = num_parts // _PARTS_PER_UNIT
    for first_unit, end_unit, first, end in runs_in_order(num_units.tolist(), (same_parts // _PARTS_PER_UNIT).tolist()):
        blocks = tables[first, first_unit * UNIT_TOKENS // block_size : end_unit * UNIT_TOKENS // block_size]
        rows = slice(int(first_rows[first]), int(first_rows[end]))
        yield from _strips_of_run(blocks, first_unit, UNIT_TOKENS, rows, block_size, spec)
    # Tiles with different numbers of units do not share parts, even if they share the blocks.
    same_parts = np.where(num_units[1:] == num_units[:-1], same_parts, 0)
    for first_part, end_part, first, end in runs_in_order(num_parts.tolist(), same_parts.tolist()):
        parts_in_units = int(num_units[first]) * _PARTS_PER_UNIT
        first_outside = max(first_part, parts_in_units)  # parts inside units are in the strips of units
        if first_outside < end_part:
            blocks = tables[first, first_outside * PART_TOKENS // block_size : end_part * PART_TOKENS // block_size]
            first_piece = int(num_units[first]) + first_outside - parts_in_units
            rows = slice(int(first_rows[first]), int(first_rows[end]))
            yield from _strips_of_run(blocks, first_piece, PART_TOKENS, rows, block_size, spec)


def _strips_of_run(
    blocks: npt.NDArray[np.int32],
    first_piece: int,
    unit_tokens: int,
    rows: slice,
    block_size: int,
    spec: AttentionSpec,
) -> Iterator[Strip]:
    """Split a run of units into strips of adjacent blocks, read in place, and strips of copied blocks."""
    by_unit = blocks.reshape(-1, unit_tokens // block_size)
    is_in_place = np.full(len(by_unit), spec.reads_in_place)
    is_in_place &= (by_unit[:, 1:] - by_unit[:, :-1] == 1).all(axis=1)
    is_adjacent = by_unit[1:, 0] - by_unit[:-1, -1] == 1  # to the unit before it
    begins_strip = (is_in_place[1:] != is_in_place[:-1]) | (is_in_place[1:] & ~is_adjacent)
    starts = [0, *(np.flatnonzero(begins_strip) + 1).tolist()]
    for start, end in itertools.pairwise([*starts, len(by_unit)]):
        max_units = end - start if is_in_place[start] else max(1, _MAX_COPIED_TOKENS // unit_tokens)
        for first in range(start, end, max_units):
            units = by_unit[first : min(first + max_units, end)]
            strip_blocks: slice | torch.Tensor = slice(int(units[0, 0]), int(units[-1, -1]) + 1)
            if not is_in_place[start]:
                strip_blocks = torch.from_numpy(units.reshape(-1).astype(np.int64))
            yield Strip(slice(first_piece + first, first_piece + first + len(units)), unit_tokens, rows, strip_blocks)


def _make_tails(
    batch: PagedBatch, spec: AttentionSpec, group: _GroupTiles
) -> tuple[tuple[Tails, ...], npt.NDArray[np.int64]]:
    """Return the tails of a group, and the index of each row of the group among the rows of all tails."""
    first_rows = group.first_rows
    tiles_by_shape: dict[tuple[int, int], list[int]] = {}  # by their number of rows and of keys
    for i, tile in enumerate(group.tiles):
        num_rows = -(-int(first_rows[i + 1] - first_rows[i]) // ROWS_MULTIPLE) * ROWS_MULTIPLE
        tiles_by_shape.setdefault((num_rows, _num_keys(tile, spec)), []).append(i)
    tails, tail_rows, num_tail_rows = [], np.empty(int(first_rows[-1]), dtype=np.int64), 0
    for (num_rows, num_keys), indices in tiles_by_shape.items():
        max_tiles = max(1, _MAX_COPIED_TOKENS // num_keys)
        for start in range(0, len(indices), max_tiles):
            tile_indices = indices[start : start + max_tiles]
            tails.append(_tails_of_shape(batch, spec, group, tile_indices, num_rows, num_keys))
            for i in tile_indices:
                tail_rows[first_rows[i] : first_rows[i + 1]] = num_tail_rows + np.arange(
                    first_rows[i + 1] - first_rows[i]
                )
                num_tail_rows += num_rows
    return tuple(tails), tail_rows


def _num_keys(tile: QueryTile, spec: AttentionSpec) -> int:
    """Return the number of keys in the tail of a tile."""
    return _tile_start(tile) + TILE_TOKENS - _first_key(tile, spec)


def _first_key(tile: QueryTile, spec: AttentionSpec) -> int:
    """Return the position of the first key in the tail of a tile."""
    if spec.splits_keys:
        return tile.start // PART_TOKENS * PART_TOKENS
    return _first_visible(_tile_start(tile), spec) // SUM_MULTIPLE * SUM_MULTIPLE


def _tile_start(tile: QueryTile) -> int:
    """Return the position at which a tile begins, even if its first query token comes later."""
    return tile.start // TILE_TOKENS * TILE_TOKENS


def _first_visible(position: int, spec: AttentionSpec) -> int:
    """Return the first position that a token attends to."""
    return 0 if spec.window is None else max(0, position + 1 - spec.window)


def _tails_of_shape(
    batch: PagedBatch,
    spec: AttentionSpec,
    group: _GroupTiles,
    tile_indices: Sequence[int],
    num_rows: int,
    num_keys: int,
) -> Tails:
    block_size, tiles = batch.block_size, [group.tiles[i] for i in tile_indices]
    first_keys = np.array([_first_key(tile, spec) for tile in tiles])  # [num_tiles]
    num_tokens = np.array([tile.end - tile.start for tile in tiles])[:, None]
    starts = np.array([tile.start for tile in tiles])[:, None]
    positions = starts + np.minimum(np.arange(num_rows) // spec.group_size, num_tokens - 1)
    rows_in_tile = np.minimum(np.arange(num_rows), num_tokens * spec.group_size - 1)
    rows = group.first_rows[list(tile_indices)][:, None] + rows_in_tile

    num_skipped_keys = int(first_keys[0]) % block_size  # the same for all tiles of a shape
    blocks_per_tile = -(-(num_skipped_keys + num_keys) // block_size)
    table_columns = first_keys[:, None] // block_size + np.arange(blocks_per_tile)
    kv_lens = np.array([batch.kv_lens[tile.request] for tile in tiles])[:, None]
    table_columns = np.minimum(table_columns, (kv_lens - 1) // block_size)
    slots = (first_keys // block_size * block_size)[:, None] + np.arange(blocks_per_tile * block_size)
    # If the first rows of a tile are not computed, the keys that only they attend to may have been dropped.
    first_visible = np.array([_first_visible(tile.start, spec) for tile in tiles])[:, None]
    is_written = (slots < kv_lens) & (slots >= first_visible)
    tails = Tails(
        torch.from_numpy(rows.reshape(-1)) if len(group.tiles) > 1 else slice(0, num_rows),
        torch.from_numpy(positions),
        torch.from_numpy(first_keys),
        torch.from_numpy(group.tables[np.array(tile_indices)[:, None], table_columns].reshape(-1).astype(np.int64)),
        num_skipped_keys,
        num_keys,
        None if is_written.all() else torch.from_numpy(np.flatnonzero(~is_written)),
    )
    if rows.size * num_keys > _MAX_KEPT_MASK_ELEMENTS:
        return tails
    return replace(tails, kept_mask=tails.mask(spec.window, spec.dtype))
