"""Plans what each program of the paged attention kernel does. Made on the host once a step, read by every layer.

tile 0     keys [ split 0 ......... )[ split 1 ..... )     two partial results, which the merge adds up
tile 1     keys [ one item ..... )                         written to the output itself
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from radixkv.kernels.batch import Ints, PagedBatch, spread
from radixkv.kernels.staging import to_device

# Keys are walked in tiles that start at multiples of this, so splits and windows do too.
KEY_ALIGNMENT_TOKENS = 64

# Two programs for each of the 132 multiprocessors of an H100 or H200.
_TARGET_PROGRAMS = 264

# An item of work and a merge that read no key and write nothing. They fill up the lists of a recorded step.
NO_WORK = (0, 0, 0, 0, 0, 1, 1, -1)
NO_MERGE = (0, 0, 0, 0, 0)

# A shorter split would spend more on its float32 partial result than on its keys.
_MIN_SPLIT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The work list of one step for all layers that share a window.

    The queries of one request and one KV head are packed into rows: row `r` is query head `r % group_size` of the
    group, of suffix token `r // group_size`. A tile is `tile_rows` consecutive rows. A tile with many visible keys is
    split: each split leaves a partial result, which the merge joins.

    Attributes:
        tile_rows: packed rows a program works on.
        group_size: query heads a KV head.
        window: the sliding window of the layers that this plan serves, None for full attention.
        work: int32 `[num_items, 8]` on the device, longest first. Columns: request, first packed token row of the
            request, suffix tokens of the request, prefix tokens, first row of the tile, first key position, end key
            position, index of the partial result or -1 when the item writes the output itself.
        merges: int32 `[num_merges, 5]` on the device. Columns: first packed token row of the request, suffix tokens,
            first row of the tile, index of its first partial result, number of partial results.
        num_partials: partial results of one KV head.
    """

    tile_rows: int
    group_size: int
    window: int | None
    work: torch.Tensor
    merges: torch.Tensor
    num_partials: int

    def with_idle_work(self) -> AttentionPlan:
        """Return a copy with items that do nothing, like the plan of a recorded step with room to spare."""
        idle, no_merge = self.work.new_tensor([NO_WORK] * 3), self.merges.new_tensor([NO_MERGE] * 3)
        work, merges = torch.cat((self.work, idle)), torch.cat((self.merges, no_merge))
        return replace(self, work=work, merges=merges, num_partials=self.num_partials + 3)


class _Tiles(NamedTuple):
    """Tiles of packed rows, and the keys that each of them sees.

    Attributes:
        rows: int64 `[5, num_tiles]`, the first five columns of `AttentionPlan.work`.
        kv_start, kv_end: int64 `[num_tiles]`, key positions, half open.
    """

    rows: Ints
    kv_start: Ints
    kv_end: Ints


def balanced_partials(num_requests: int, num_kv_heads: int) -> int:
    """Return the most partial results of one KV head in a batch that is spread over the whole device.

    There are two for each program's share, and two more for each request whose window is cut.

    >>> balanced_partials(num_requests=4, num_kv_heads=8)
    74
    """
    return 2 * (-(-_TARGET_PROGRAMS // num_kv_heads) + num_requests)


def plan_attention(
    batch: PagedBatch,
    *,
    num_query_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    window: int | None = None,
    tile_rows: int | None = None,
    split_tokens: int | None = None,
) -> AttentionPlan:
    """Lay out the attention of one step for the layers that share a window.

    Split boundaries are multiples of the split size from position 0. With `tile_rows` and `split_tokens` given, a row's
    result depends on its position alone, to the bit: not on the rest of the batch, nor on where its suffix began.

    Args:
        batch: the token rows of the step.
        num_query_heads: query heads of the model, a multiple of `num_kv_heads`.
        num_kv_heads: KV heads of the pool.
        dtype: dtype of the queries.
        window: tokens that a query sees, its own included; None for all.
        tile_rows: 16, 64 or 128; None fits the longest suffix of the batch.
        split_tokens: the most keys that a program reads, a multiple of 64; None spreads the batch over the device.

    Returns:
        A plan whose tensors live on the device of `batch.block_tables`.

    Raises:
        ValueError: the head counts do not divide, or `split_tokens` is not a positive multiple of 64.
    """
    group_size, remainder = divmod(num_query_heads, num_kv_heads)
    if remainder or not group_size:
        raise ValueError(f"num_query_heads: expected a multiple of {num_kv_heads} KV heads, got {num_query_heads}")
    if tile_rows is None:
        tile_rows = fitting_tile_rows(group_size * batch.most_query_tokens, dtype)
    tiles = _tiles(batch, group_size, tile_rows, window)
    if split_tokens is None:
        split_tokens = _balanced_split_tokens(int((tiles.kv_end - tiles.kv_start).sum()) * num_kv_heads)
    elif split_tokens < 1 or split_tokens % KEY_ALIGNMENT_TOKENS:
        raise ValueError(f"split_tokens: expected a positive multiple of {KEY_ALIGNMENT_TOKENS}, got {split_tokens}")
    work, merges, num_partials = _cut(tiles, split_tokens)
    device = batch.block_tables.device
    return AttentionPlan(
        tile_rows=tile_rows,
        group_size=group_size,
        window=window,
        work=to_device(torch.from_numpy(work), device),
        merges=to_device(torch.from_numpy(merges), device),
        num_partials=num_partials,
    )


def first_key(position: Ints, window: int | None) -> Ints:
    """Return the first key position that tiles read whose first queries stand at `position`, `[num_tiles]`.

    >>> first_key(np.array([10, 500]), window=100)
    array([  0, 384])
    """
    first_seen = np.zeros_like(position) if window is None else np.maximum(0, position + 1 - window)
    return first_seen // KEY_ALIGNMENT_TOKENS * KEY_ALIGNMENT_TOKENS


def fitting_tile_rows(most_rows: int, dtype: torch.dtype) -> int:
    """Return the rows of a tile that the longest suffix fills. In float32, without tensor cores, larger tiles spill.

    Args:
        most_rows: packed rows of the longest suffix of a batch.
        dtype: dtype of the queries.

    >>> [fitting_tile_rows(most_rows, torch.bfloat16) for most_rows in (7, 40, 1000)]
    [16, 64, 128]
    """
    if most_rows <= 16 or dtype == torch.float32:
        return 16
    return 64 if most_rows <= 64 else 128


def _tiles(batch: PagedBatch, group_size: int, tile_rows: int, window: int | None) -> _Tiles:
    query_lens = batch.query_lens
    request, nth = spread(-(-query_lens * group_size // tile_rows))
    first_row = nth * tile_rows
    num_tokens = query_lens[request]
    num_prefix_tokens = np.array(batch.kv_lens)[request] - num_tokens
    last_token = np.minimum((first_row + tile_rows - 1) // group_size, num_tokens - 1)
    kv_start = first_key(num_prefix_tokens + first_row // group_size, window)
    rows = np.array((request, np.array(batch.query_starts)[request], num_tokens, num_prefix_tokens, first_row))
    return _Tiles(rows, kv_start, num_prefix_tokens + last_token + 1)


def _cut(tiles: _Tiles, split_tokens: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], int]:
    """Cut the keys of tiles into splits. Returns a plan's work, its merges, and its number of partial results."""
    first_split = tiles.kv_start // split_tokens
    num_splits = -(-tiles.kv_end // split_tokens) - first_split
    num_partials = num_splits * (num_splits > 1)
    end_partial = np.cumsum(num_partials)
    first_partial = end_partial - num_partials
    tile, nth = spread(num_splits)  # each item's tile, and its place among the splits of that tile
    split_start = (first_split[tile] + nth) * split_tokens
    kv_start = np.maximum(split_start, tiles.kv_start[tile])
    kv_end = np.minimum(split_start + split_tokens, tiles.kv_end[tile])
    partial = np.where(num_splits[tile] > 1, first_partial[tile] + nth, -1)

    work = _as_rows((*tiles.rows[:, tile], kv_start, kv_end, partial))
    work = work[np.argsort(kv_start - kv_end, kind="stable")]  # longest first: the short ones fill the tail

    _, first_token, num_tokens, _, first_row = tiles.rows
    split = np.flatnonzero(num_partials)
    merges = _as_rows(each[split] for each in (first_token, num_tokens, first_row, first_partial, num_partials))
    return work, merges, int(end_partial[-1])


def _as_rows(columns: Iterable[Ints]) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(np.array([*columns], dtype=np.int32).T)


def _balanced_split_tokens(total_tokens: int) -> int:
    """Return the power of two that cuts the keys of all programs together into about one share a program."""
    share = -(-total_tokens // _TARGET_PROGRAMS)
    return max(_MIN_SPLIT_TOKENS, 1 << (share - 1).bit_length())
