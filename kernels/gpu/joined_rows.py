"""Joins the rows of requests that share K/V, so that attention reads it once per tile of rows, not once per request.

A row is one query head of one token. A tile is a fixed number of rows that one program of the kernel computes together.
Here each request computes one token, and four query heads share a KV head, so each request has four rows:

request 0   [ system prompt )[ document ......... )[ own )        rows 0 to 3
request 1   [ system prompt )[ document ......... )[ own )        rows 4 to 7
request 2   [ system prompt )[ own )                              rows 8 to 11

joins       [ rows 0 to 11  )[ rows 0 to 7 ...... )
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from radixkv.kernels.batch import Ints, PagedBatch, repeat_indices
from radixkv.kernels.gpu.attention_splits import Splits
from radixkv.kernels.shared_prefix import OrderedRun, prefix_order, runs_in_order

# A join must save at least this number of key reads per row. This is an estimate: a join adds at most two float32
# partial results per row, and writing and reading one of them moves as many bytes as two bfloat16 keys with their
# values.
_SAVED_KEYS_PER_ROW = 4

# In fast mode, where the length of splits depends on the batch, keys are joined in units of this size. In exact mode,
# splits have a fixed length, and a unit is one split.
_FAST_UNIT_TOKENS = 256


class Join(NamedTuple):
    """Keys that several requests share, and the rows that see all of them.

    Attributes:
        first_key, end_key: positions, half open, the same for all these requests.
        first_row, end_row: rows, half open, counted over the joined requests in the order of `Joins.requests`.
        requests: the requests that these rows belong to, in the order of the rows.
    """

    first_key: int
    end_key: int
    first_row: int
    end_row: int
    requests: Ints


@dataclass(frozen=True, slots=True)
class Joins:
    """All joins of a batch.

    Attributes:
        joins: ordered so that a join precedes those that continue its keys.
        requests: the requests that take part in at least one join, in the order of their rows,
            `[num_joined_requests]`.
        end_keys: for each request of the batch, the number of its keys that joins read; these begin at position 0,
            `[num_requests]`.
    """

    joins: tuple[Join, ...]
    requests: Ints
    end_keys: Ints

    def num_tile_keys(self, tile_rows: int) -> int:
        """Return the number of keys that tiles of `tile_rows` joined rows read."""
        return sum(-(-(end_row - row) // tile_rows) * (end - start) for start, end, row, end_row, _ in self.joins)

    def tiles(self, tile_rows: int) -> tuple[Ints, Ints]:
        """Return the keys and the rows of each tile of joined rows, `[num_tiles]` each."""
        num_tiles = np.array([-(-(join.end_row - join.first_row) // tile_rows) for join in self.joins])
        join, nth = repeat_indices(num_tiles)
        keys = np.array([end_key - first_key for first_key, end_key, *_ in self.joins])
        rows = np.array([end_row - first_row for _, _, first_row, end_row, _ in self.joins])
        return keys[join], np.minimum(rows[join] - nth * tile_rows, tile_rows)

    def pieces(self, tile_rows: int, splits: Splits) -> tuple[Ints, Ints]:
        """Cut the joins into pieces, each of which is one tile of rows and one split of keys.

        Args:
            tile_rows: joined rows of a tile.
            splits: how keys are cut.

        Returns:
            The pieces, `[6, num_pieces]`, and the number of pieces that each request of the batch sees,
            `[num_requests]`. The six numbers of a piece are a request whose block table has the keys, the first and the
            end joined row of the tile, the first and the end key, and the index of the piece among those that its rows
            see.
        """
        num_seen = np.zeros_like(self.end_keys)
        pieces_of_joins = [np.empty((6, 0), dtype=np.int64)]
        for first_key, end_key, first_row, end_row, requests in self.joins:
            keys = np.array([first_key]), np.array([end_key])
            num_splits = int(splits.counts(*keys)[0])
            tile, nth = repeat_indices(np.full(-(-(end_row - first_row) // tile_rows), num_splits))
            tile_start = first_row + tile * tile_rows
            pieces = np.empty((6, tile.size), dtype=np.int64)
            pieces[0] = requests[0]
            pieces[1], pieces[2] = tile_start, np.minimum(tile_start + tile_rows, end_row)
            pieces[3], pieces[4] = splits.bounds(*keys, nth, np.array([num_splits]))
            pieces[5] = num_seen[requests[0]] + nth
            pieces_of_joins.append(pieces)
            num_seen[requests] += num_splits
        return np.concatenate(pieces_of_joins, axis=1), num_seen


def may_join(batch: PagedBatch, window: int | None) -> bool:
    """Return whether at least two requests begin with the same block, and the window hides no key from any request."""
    if window is not None and window < max(batch.kv_lens):
        return False
    first_blocks = batch.host_tables[:, 0].tolist()
    return len(set(first_blocks)) < len(first_blocks)


def fast_unit_tokens(block_size: int) -> int:
    """Return the number of keys of a unit in fast mode, which is at least a block.

    >>> fast_unit_tokens(64), fast_unit_tokens(512)
    (256, 512)
    """
    return max(_FAST_UNIT_TOKENS, block_size)


def join_rows(batch: PagedBatch, num_rows: Ints, positions: Ints, tile_rows: int, unit_tokens: int) -> Joins | None:
    """Find the keys for which joining rows is faster.

    Joining rows is worthwhile if fewer tiles read the keys: two requests with one row each need one tile instead of
    two, but two requests that fill a tile each need two tiles either way. Rows are not joined if the float32 partial
    results would move more bytes than the join saves.

    >>> tables = [np.array(blocks, dtype=np.int32) for blocks in ([7, 2, 5, 1], [7, 2, 4, 0], [7, 2, 5, 3])]
    >>> batch = PagedBatch.build([1, 1, 1], [200, 250, 220], tables, block_size=64)
    >>> num_rows, positions = np.array([4, 4, 4]), np.array([199, 249, 219])
    >>> for join in join_rows(batch, num_rows, positions, tile_rows=16, unit_tokens=64).joins:
    ...     print(join.first_key, join.end_key, "rows", join.first_row, join.end_row, "of", join.requests)
    0 128 rows 0 12 of [1 0 2]
    128 192 rows 4 12 of [0 2]

    Args:
        batch: the token rows of the step.
        num_rows: number of rows of each request that may be joined: 0, or less than `tile_rows`; `[num_requests]`.
        positions: position of the first of these rows, `[num_requests]`. Rows share only keys before it.
        tile_rows: rows of a tile.
        unit_tokens: keys are joined in units of this size.

    Returns:
        None if nothing is worth joining, or if a unit is not a whole number of blocks.
    """
    blocks_per_unit, remainder = divmod(unit_tokens, batch.block_size)
    num_units = np.where(num_rows > 0, positions // unit_tokens, 0)
    if remainder or not num_units.any():
        return None
    # Requests that share the first unit have the same last block in it.
    first_unit_ends = batch.host_tables[num_units > 0, blocks_per_unit - 1].tolist()
    if len(set(first_unit_ends)) == len(first_unit_ends):
        return None
    order, same_units = prefix_order(batch.host_tables, num_units, blocks_per_unit)
    all_runs = runs_in_order(num_units[order].tolist(), same_units.tolist())
    runs, end_units = _choose_runs(all_runs, num_rows[order], tile_rows, unit_tokens)
    if not runs:
        return None
    end_rows = np.cumsum(num_rows[order] * (end_units > 0)).tolist()
    joins = []
    for first_unit, end_unit, first, end in runs:
        first_row = end_rows[first - 1] if first else 0
        keys = first_unit * unit_tokens, end_unit * unit_tokens
        joins.append(Join(*keys, first_row, end_rows[end - 1], order[first:end]))
    end_keys = np.zeros_like(num_rows)
    end_keys[order] = end_units * unit_tokens
    return Joins(tuple(joins), order[end_units > 0], end_keys)


def _choose_runs(
    runs: Sequence[OrderedRun], num_rows: Ints, tile_rows: int, unit_tokens: int
) -> tuple[list[OrderedRun], Ints]:
    """Choose the runs to join: units of keys that the same requests share.

    If a run is chosen, the earlier runs of the same requests are chosen, too, even if joining them saves too little.

    Args:
        runs: from `runs_in_order`.
        num_rows: rows of each request, in that order.
        tile_rows, unit_tokens: as for `join_rows`.

    Returns:
        The chosen runs in the order of `runs`, and the number of units that each request has in them, in the order of
        `num_rows`.
    """
    chosen: list[OrderedRun] = []
    end_units = np.zeros_like(num_rows)
    for run in reversed(runs):
        first_unit, end_unit, first, end = run
        rows = int(num_rows[first:end].sum())
        saved_tiles = end - first - -(-rows // tile_rows)
        saved_keys = saved_tiles * (end_unit - first_unit) * unit_tokens
        if saved_keys >= _SAVED_KEYS_PER_ROW * rows or end_units[first:end].any():
            end_units[first:end] = np.maximum(end_units[first:end], end_unit)
            chosen.append(run)
    return chosen[::-1], end_units
