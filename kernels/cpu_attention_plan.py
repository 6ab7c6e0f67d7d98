"""Plans paged attention on a CPU. Made once a step, read by every layer.

The keys of a row are cut into pieces at fixed positions, whoever attends and whatever is cached:

    position   0 ............ 512 ........... 1024 ... 1280 ... 1408
    pieces     [ unit 0 ......)[ unit 1 ......)[ part  )[ tail  )       of the rows of the tile [1280, 1408)

Rows see units of 512 keys and parts of 256 keys as a whole, so rows of many requests can stand in one product over
them: those whose blocks are the same. Only what follows, up to the end of a
row's tile of 128 positions, is masked. A row's pieces, and the order
in which they are merged, depend on its position alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.cpu_attention_work import (
    PART_TOKENS,
    ROWS_MULTIPLE,
    SUM_MULTIPLE,
    TILE_TOKENS,
    UNIT_TOKENS,
    Demand,
    Group,
    Strip,
    Tails,
)
from radixkv.kernels.shared_prefix import prefix_order, runs_in_order

# Rows of a group, beyond which a group is not worth more company, and numbers in the pieces of one: 64 MiB of float32.
_GROUP_ROWS = 1024
_GROUP_NUMBERS = 1 << 24

# Tokens that are copied at once where K and V can't be read in place: 8 MiB of float32 for 2 heads of 64.
_COPIED_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class _Tile:
    """A request's query tokens at positions `[start, end)`, in the tile that begins at `tile_start`."""

    request: int
    tile_start: int
    start: int
    end: int
    first_token: int  # packed row of the token at `start`


def plan_cpu_attention(batch: PagedBatch, demand: Demand) -> list[Group]:
    """Lay out the attention of one step for the layers that make the same demand.

    Args:
        batch: the token rows of the step. The block size divides `TILE_TOKENS`.
        demand: what the layers have in common.
    """
    tiles = [*_tiles(batch, demand)]
    counts = np.array([0 if demand.is_whole else tile.tile_start // PART_TOKENS for tile in tiles])
    blocks_a_part = PART_TOKENS // batch.block_size
    tables = batch.host_tables[[tile.request for tile in tiles]]
    if len(tiles) == 1:
        order, same = np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    else:
        order, same = prefix_order(tables, counts, blocks_a_part)
    tiles, tables, counts = [tiles[i] for i in order], tables[order], counts[order]
    groups = []
    for first, end in _cut_into_groups(tiles, counts, demand):
        members = slice(first, end)
        groups.append(_group(batch, demand, tiles[members], tables[members], counts[members], same[first : end - 1]))
    return groups


def _tiles(batch: PagedBatch, demand: Demand) -> Iterator[_Tile]:
    for i, kv_len in enumerate(batch.kv_lens):
        first_token, end_token = batch.query_starts[i], batch.query_starts[i + 1]
        prefix_len = kv_len - (end_token - first_token)
        for tile_start in range(prefix_len // TILE_TOKENS * TILE_TOKENS, kv_len, TILE_TOKENS):
            start, tile_end = max(tile_start, prefix_len), min(tile_start + TILE_TOKENS, kv_len)
            pieces = 1 if demand.is_whole else _num_pieces(tile_start // PART_TOKENS) + 1
            step = max(1, _GROUP_NUMBERS // (pieces * demand.row_numbers * demand.group_size))
            for at in range(start, tile_end, step):
                yield _Tile(i, tile_start, at, min(at + step, tile_end), first_token + at - prefix_len)


def _num_pieces(num_parts: int) -> int:
    """Return how many units and parts there are before a tile that follows `num_parts` parts."""
    return num_parts // _PARTS_A_UNIT + num_parts % _PARTS_A_UNIT


_PARTS_A_UNIT = UNIT_TOKENS // PART_TOKENS


def _cut_into_groups(
    tiles: Sequence[_Tile], counts: npt.NDArray[np.int64], demand: Demand
) -> Iterator[tuple[int, int]]:
    """Cut tiles in order into groups of bounded size, `[first, end)`."""
    first, rows, pieces = 0, 0, 0
    for i, (tile, count) in enumerate(zip(tiles, counts.tolist(), strict=True)):
        own_rows = (tile.end - tile.start) * demand.group_size
        most = max(pieces, _num_pieces(count) + 1)
        numbers = (rows + own_rows) * most * demand.row_numbers
        if rows and (rows + own_rows > _GROUP_ROWS or numbers > _GROUP_NUMBERS):
            yield first, i
            first, rows, most = i, 0, _num_pieces(count) + 1
        rows, pieces = rows + own_rows, most
    yield first, len(tiles)


def _group(
    batch: PagedBatch,
    demand: Demand,
    tiles: Sequence[_Tile],
    tables: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int64],
    same: npt.NDArray[np.int64],
) -> Group:
    tokens = np.concatenate([tile.first_token + np.arange(tile.end - tile.start) for tile in tiles])
    num_tokens = len(tokens)
    is_range = bool((tokens == tokens[0] + np.arange(num_tokens)).all())
    starts = np.cumsum([0, *((tile.end - tile.start) * demand.group_size for tile in tiles)])
    strips = [*_strips(batch.block_size, demand, tables, counts, same, starts)] if counts.any() else []
    tails, tail_rows = _tails(batch, demand, tiles, tables, starts)
    return Group(
        int(tokens[0]),
        num_tokens,
        None if is_range else torch.from_numpy(tokens),
        max((strip.first_piece + strip.num_units for strip in strips), default=0),
        tuple(sorted(strips, key=lambda strip: strip.first_piece)),
        tails,
        tail_rows,
    )


def _strips(
    block_size: int,
    demand: Demand,
    tables: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int64],
    same: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
) -> Iterator[Strip]:
    units = counts // _PARTS_A_UNIT
    for first_unit, end_unit, first, end in runs_in_order(units.tolist(), (same // _PARTS_A_UNIT).tolist()):
        blocks = tables[first, first_unit * UNIT_TOKENS // block_size : end_unit * UNIT_TOKENS // block_size]
        rows = int(starts[first]), int(starts[end])
        yield from _in_place_or_copied(blocks, first_unit, UNIT_TOKENS, rows, block_size, demand)
    # Tiles that see other units have other parts, although they may share the blocks.
    same_parts = np.where(units[1:] == units[:-1], same, 0)
    for first_part, end_part, first, end in runs_in_order(counts.tolist(), same_parts.tolist()):
        num_units = int(units[first])
        first_own = max(first_part, num_units * _PARTS_A_UNIT)
        if first_own < end_part:
            blocks = tables[first, first_own * PART_TOKENS // block_size : end_part * PART_TOKENS // block_size]
            first_piece = num_units + first_own - num_units * _PARTS_A_UNIT
            rows = int(starts[first]), int(starts[end])
            yield from _in_place_or_copied(blocks, first_piece, PART_TOKENS, rows, block_size, demand)


def _in_place_or_copied(
    blocks: npt.NDArray[np.int32],
    first_piece: int,
    unit_tokens: int,
    rows: tuple[int, int],
    block_size: int,
    demand: Demand,
) -> Iterator[Strip]:
    """Cut a run of units where their blocks are not adjacent."""
    blocks_a_unit = unit_tokens // block_size
    by_unit = blocks.reshape(-1, blocks_a_unit)
    num_units = len(by_unit)
    is_in_place = np.full(num_units, demand.reads_in_place)
    is_in_place &= (by_unit[:, 1:] - by_unit[:, :-1] == 1).all(axis=1)
    follows = (by_unit[1:, 0] - by_unit[:-1, -1] == 1) & is_in_place[1:]
    most_copied = max(1, _COPIED_TOKENS // unit_tokens)
    first = 0
    while first < num_units:
        if is_in_place[first]:
            breaks = np.flatnonzero(~follows[first:])
            end = first + int(breaks[0]) + 1 if len(breaks) else num_units
            yield Strip(first_piece + first, end - first, unit_tokens, *rows, int(by_unit[first, 0]), None)
        else:
            others = np.flatnonzero(is_in_place[first:])
            end = min(first + int(others[0]) if len(others) else num_units, first + most_copied)
            copied = torch.from_numpy(by_unit[first:end].reshape(-1).astype(np.int64))
            yield Strip(first_piece + first, end - first, unit_tokens, *rows, None, copied)
        first = end


def _tails(
    batch: PagedBatch,
    demand: Demand,
    tiles: Sequence[_Tile],
    tables: npt.NDArray[np.int32],
    starts: npt.NDArray[np.int64],
) -> tuple[tuple[Tails, ...], torch.Tensor | None]:
    alike: dict[tuple[int, int], list[int]] = {}  # tiles by the number of their rows and of their keys
    for i, tile in enumerate(tiles):
        num_rows = -(-int(starts[i + 1] - starts[i]) // ROWS_MULTIPLE) * ROWS_MULTIPLE
        alike.setdefault((num_rows, tile.tile_start + TILE_TOKENS - _first_key(tile, demand)), []).append(i)
    tails, tail_rows, num_before = [], np.empty(int(starts[-1]), dtype=np.int64), 0
    for (num_rows, num_keys), members in alike.items():
        most_tiles = max(1, _COPIED_TOKENS // num_keys)
        for cut in range(0, len(members), most_tiles):
            chosen = members[cut : cut + most_tiles]
            tails.append(_tails_alike(batch, demand, tiles, tables, starts, chosen, num_rows, num_keys))
            for i in chosen:
                tail_rows[starts[i] : starts[i + 1]] = num_before + np.arange(starts[i + 1] - starts[i])
                num_before += num_rows
    are_rows = num_before == len(tail_rows) and bool((tail_rows == np.arange(num_before)).all())
    return tuple(tails), None if are_rows else torch.from_numpy(tail_rows)


def _first_key(tile: _Tile, demand: Demand) -> int:
    """Return the first key of a tile's own sums."""
    if not demand.is_whole:
        return tile.tile_start // PART_TOKENS * PART_TOKENS
    return _first_visible(tile, demand) // SUM_MULTIPLE * SUM_MULTIPLE


def _first_visible(tile: _Tile, demand: Demand) -> int:
    """Return the first position that the first token of a tile would see."""
    return 0 if demand.window is None else max(0, tile.tile_start + 1 - demand.window)


def _tails_alike(
    batch: PagedBatch,
    demand: Demand,
    tiles: Sequence[_Tile],
    tables: npt.NDArray[np.int32],
    starts: npt.NDArray[np.int64],
    members: Sequence[int],
    num_rows: int,
    num_keys: int,
) -> Tails:
    block_size = batch.block_size
    first_keys = np.array([_first_key(tiles[i], demand) for i in members])  # [num_tiles]
    tokens = np.arange(num_rows) // demand.group_size  # [num_rows]
    own_tokens = np.array([tiles[i].end - tiles[i].start for i in members])[:, None]
    positions = np.array([tiles[i].start for i in members])[:, None] + np.minimum(tokens, own_tokens - 1)
    rows = starts[list(members)][:, None] + np.minimum(np.arange(num_rows), own_tokens * demand.group_size - 1)
    keys = first_keys[:, None] + np.arange(num_keys)  # [num_tiles, num_keys]
    is_hidden = keys[:, None, :] > positions[:, :, None]
    if demand.window is not None:
        is_hidden |= keys[:, None, :] <= positions[:, :, None] - demand.window
    mask = torch.zeros(is_hidden.shape, dtype=demand.dtype).masked_fill_(torch.from_numpy(is_hidden), float("-inf"))

    first_key = int(first_keys[0]) % block_size
    blocks_a_tile = -(-(first_key + num_keys) // block_size)
    places = first_keys[:, None] // block_size + np.arange(blocks_a_tile)
    kv_lens = np.array([batch.kv_lens[tiles[i].request] for i in members])[:, None]
    in_table = np.minimum(places, (kv_lens - 1) // block_size)
    slots = (first_keys // block_size * block_size)[:, None] + np.arange(blocks_a_tile * block_size)
    first_visible = np.array([_first_visible(tiles[i], demand) for i in members])[:, None]
    is_written = (slots < kv_lens) & (slots >= first_visible)
    return Tails(
        torch.from_numpy(rows.reshape(-1)) if len(tiles) > 1 else None,
        len(members),
        num_rows,
        torch.from_numpy(tables[np.array(members)[:, None], in_table].reshape(-1).astype(np.int64)),
        first_key,
        num_keys,
        None if is_written.all() else torch.from_numpy(np.flatnonzero(~is_written)),
        mask[:, None],
    )
