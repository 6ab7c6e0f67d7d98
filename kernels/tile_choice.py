"""Chooses the rows of attention tiles for a batch."""

from __future__ import annotations

import numpy as np
import torch

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.joined_rows import join_rows, may_join, unit_tokens

_TILE_ROWS = (16, 64, 128)

# A larger tile must save a fifth of the keys that all tiles read together: requests that are not joined have more
# empty rows in it. An estimate.
_WORTH_OF_FEWER_ROWS = 1.25


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


def tile_rows_for(batch: PagedBatch, group_size: int, dtype: torch.dtype, window: int | None = None) -> int:
    """Return the rows of a tile for a batch: more than the longest suffix fills, if enough rows can be joined.

    >>> tables = 40 * [np.arange(20, dtype=np.int32)]
    >>> batch = PagedBatch.build(40 * [1], 40 * [1200], tables, block_size=64)
    >>> tile_rows_for(batch, 4, torch.bfloat16), tile_rows_for(batch, 4, torch.bfloat16, window=500)
    (64, 16)

    Args:
        batch: the token rows of the step.
        group_size: query heads a KV head.
        dtype: dtype of the queries.
        window: the sliding window of the layers, None for full attention.
    """
    least = fitting_tile_rows(group_size * batch.most_query_tokens, dtype)
    if least == _TILE_ROWS[-1] or dtype == torch.float32 or not may_join(batch, window):
        return least
    kv_lens, num_tokens = np.array(batch.kv_lens), batch.query_lens
    unit = unit_tokens(batch.block_size)
    joins = join_rows(batch, num_tokens * group_size, kv_lens - num_tokens, _TILE_ROWS[-1], unit)
    if joins is None:
        return least
    own_keys = int((kv_lens - joins.end_keys).sum())
    num_keys = {tile_rows: own_keys + joins.num_tile_keys(tile_rows) for tile_rows in _TILE_ROWS}
    enough = _WORTH_OF_FEWER_ROWS * num_keys[_TILE_ROWS[-1]]
    return next(tile_rows for tile_rows in _TILE_ROWS if tile_rows >= least and num_keys[tile_rows] <= enough)
