"""What each program of the paged attention kernel does: planned on the host once a step, reused by every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.staging import to_device

# Keys are walked in tiles that start at multiples of this, so splits and windows do too.
KEY_ALIGNMENT_TOKENS = 64

# Two programs for each of the 132 multiprocessors of an H100 or H200.
_TARGET_PROGRAMS = 264

# Work and a merge that read no key and write nothing: what fills up the lists of a recorded step.
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
        """The same, filled up like the plan of a recorded step that has more room than it needs."""
        idle, no_merge = self.work.new_tensor([NO_WORK] * 3), self.merges.new_tensor([NO_MERGE] * 3)
        work, merges = torch.cat((self.work, idle)), torch.cat((self.merges, no_merge))
        return replace(self, work=work, merges=merges, num_partials=self.num_partials + 3)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Packed rows of one request and the key positions `[kv_start, kv_end)` that any of them sees."""

    request: int
    first_row: int
    kv_start: int
    kv_end: int


def balanced_partials(num_requests: int, num_kv_heads: int) -> int:
    """How many partial results of one KV head a batch has at most if it is spread over the whole device.

    Two for each share of a program, and two more for each request whose window is cut.
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
    """Lay out the attention of one step.

    Split boundaries are multiples of the split size from position 0. With `tile_rows` and `split_tokens` given, a row's
    result depends on its position alone, to the bit: not on the rest of the batch, nor on where its suffix began.

    Args:
        batch: the step.
        num_query_heads: query heads of the model, a multiple of `num_kv_heads`.
        num_kv_heads: KV heads of the pool.
        dtype: of the queries.
        window: visible tokens, the query token included; None for all.
        tile_rows: 16, 64 or 128; None fits the longest suffix of the batch.
        split_tokens: keys a program reads at most, a multiple of 64; None spreads the batch over the whole device.

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
    tiles = list(_tiles(batch, group_size, tile_rows, window))
    if split_tokens is None:
        split_tokens = _balanced_split_tokens(sum(tile.kv_end - tile.kv_start for tile in tiles) * num_kv_heads)
    elif split_tokens < 1 or split_tokens % KEY_ALIGNMENT_TOKENS:
        raise ValueError(f"split_tokens: expected a positive multiple of {KEY_ALIGNMENT_TOKENS}, got {split_tokens}")

    work: list[tuple[int, ...]] = []
    merges: list[tuple[int, ...]] = []
    num_partials = 0
    for tile in tiles:
        first_token, num_tokens = batch.query_starts[tile.request], _query_len(batch, tile.request)
        item = (tile.request, first_token, num_tokens, batch.kv_lens[tile.request] - num_tokens, tile.first_row)
        splits = list(_splits(tile, split_tokens))
        if len(splits) == 1:
            work.append((*item, tile.kv_start, tile.kv_end, -1))
            continue
        work += [(*item, start, end, num_partials + i) for i, (start, end) in enumerate(splits)]
        merges.append((first_token, num_tokens, tile.first_row, num_partials, len(splits)))
        num_partials += len(splits)
    work.sort(key=lambda item: item[5] - item[6])  # longest first: the short ones fill the tail
    device = batch.block_tables.device
    return AttentionPlan(
        tile_rows=tile_rows,
        group_size=group_size,
        window=window,
        work=to_device(torch.tensor(work, dtype=torch.int32), device),
        merges=to_device(torch.tensor(merges, dtype=torch.int32).view(len(merges), 5), device),
        num_partials=num_partials,
    )


def first_key(position: int, window: int | None) -> int:
    """Where a tile begins to read keys whose first query stands at `position`."""
    first_seen = 0 if window is None else max(0, position + 1 - window)
    return first_seen // KEY_ALIGNMENT_TOKENS * KEY_ALIGNMENT_TOKENS


def _query_len(batch: PagedBatch, request: int) -> int:
    return batch.query_starts[request + 1] - batch.query_starts[request]


def fitting_tile_rows(most_rows: int, dtype: torch.dtype) -> int:
    """Return the tile that the longest suffix fills; larger ones spill in float32, which has no tensor cores.

    Args:
        most_rows: packed rows of the longest suffix of a batch.
        dtype: of the queries.
    """
    if most_rows <= 16 or dtype == torch.float32:
        return 16
    return 64 if most_rows <= 64 else 128


def _tiles(batch: PagedBatch, group_size: int, tile_rows: int, window: int | None) -> Iterator[_Tile]:
    for request, kv_len in enumerate(batch.kv_lens):
        num_tokens = _query_len(batch, request)
        prefix_len = kv_len - num_tokens
        for first_row in range(0, num_tokens * group_size, tile_rows):
            first_token = first_row // group_size
            last_token = min((first_row + tile_rows - 1) // group_size, num_tokens - 1)
            kv_start = first_key(prefix_len + first_token, window)
            yield _Tile(request, first_row, kv_start, prefix_len + last_token + 1)


def _balanced_split_tokens(total_tokens: int) -> int:
    """Return the power of two that cuts the keys of all programs together into about one share a program."""
    share = -(-total_tokens // _TARGET_PROGRAMS)
    return max(_MIN_SPLIT_TOKENS, 1 << (share - 1).bit_length())


def _splits(tile: _Tile, split_tokens: int) -> Iterator[tuple[int, int]]:
    start = tile.kv_start
    while start < tile.kv_end:
        end = min((start // split_tokens + 1) * split_tokens, tile.kv_end)
        yield start, end
        start = end
