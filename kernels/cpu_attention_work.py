"""The work of paged attention on a CPU: groups of rows, and the keys that each of them sees. Made by the plan.

group of rows    rows 0..111                 every row of the group
strips           [ unit 0 )[ unit 1 )        seen as a whole by some of its rows
tails                                [ ]     each request's own last keys, masked
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

# Keys that are attended at once. From 512 on, longer units are not faster: 2,048 keys took 0.215 ms in units of 512 and
# 0.200 in one for 16 rows, 15.5 and 15.1 ms for 1,792 (2 heads of 64, float32, one thread), and are shared less often.
UNIT_TOKENS = 512

# Keys of a part. With parts of 128 keys, 512 new tokens took 10.2 ms, and 7.1 in bfloat16, beside 9.0 and 4.8.
PART_TOKENS = 256

# Query tokens that see the same keys. A tile of 64 tokens has fewer masked keys, and needs twice the number of calls.
TILE_TOKENS = 128

# A matrix product of fewer than four rows takes another way through the library, with another order of sums.
ROWS_MULTIPLE = 16

# From 64 rows on, processors with AMX take another way for half precision, which adds up numbers 32 at a time. Sums of
# another length come out differently, so head dims and windows are filled up with zeros.
SUM_MULTIPLE = 32


class Demand(NamedTuple):
    """Properties that the layers of a plan have in common.

    Attributes:
        group_size: query heads a KV head.
        row_numbers: numbers in a row of all KV heads, `num_kv_heads * head_dim`.
        dtype: dtype of the queries.
        window: the sliding window, None for full attention.
        is_whole: whether a tile attends over all its keys at once: with a window, or where partial results can't be
            merged.
        reads_in_place: whether K and V of adjacent blocks can be read where they are.
    """

    group_size: int
    row_numbers: int
    dtype: torch.dtype
    window: int | None
    is_whole: bool
    reads_in_place: bool


@dataclass(frozen=True, slots=True)
class Strip:
    """Units or parts that some rows of a group see as a whole.

    Attributes:
        first_piece: place of the first one among the pieces of these rows.
        num_units: units, or parts.
        unit_tokens: keys of each.
        first_row, end_row: rows of the group.
        first_block: the first of the adjacent blocks where they lie; None if they are copied first.
        block_ids: int64, the blocks to copy; None if they are read in place.
    """

    first_piece: int
    num_units: int
    unit_tokens: int
    first_row: int
    end_row: int
    first_block: int | None
    block_ids: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Tails:
    """Tiles of some requests of a group, each over its own last keys.

    Attributes:
        rows: int64 `[num_tiles * num_rows]`, rows of the group, each tile's filled up with its last one; None if they
            are the first ones of the group.
        num_tiles: tiles.
        num_rows: rows of each, a multiple of `ROWS_MULTIPLE`.
        block_ids: int64, the blocks of the keys, one tile after the other.
        first_key: keys to skip in the first block of each tile.
        num_keys: keys of each tile, a multiple of `SUM_MULTIPLE`.
        unwritten: int64, which of the slots of these blocks may hold anything; None if there are none.
        positions: int64 `[num_tiles, num_rows]`, of the rows.
        first_keys: int64 `[num_tiles]`, the position of each tile's first key.
        kept_mask: the `mask` of these tiles; None if it is too large to be kept.
    """

    rows: torch.Tensor | None
    num_tiles: int
    num_rows: int
    block_ids: torch.Tensor
    first_key: int
    num_keys: int
    unwritten: torch.Tensor | None
    positions: torch.Tensor
    first_keys: torch.Tensor
    kept_mask: torch.Tensor | None

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return `[num_tiles, 1, num_rows, num_keys]`: 0 where a row sees a key, and -inf elsewhere.

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
        first_token, num_tokens: the tokens of the step, if they follow each other.
        tokens: int64 `[num_tokens]`, the tokens of the step if they do not; else None.
        num_pieces: the most units and parts that a row of the group sees.
        strips: ordered by their first piece.
        tails: the tiles of these rows.
        tail_rows: int64, where each row of the group is among the rows of all tails; None if these are the rows.
    """

    first_token: int
    num_tokens: int
    tokens: torch.Tensor | None
    num_pieces: int
    strips: tuple[Strip, ...]
    tails: tuple[Tails, ...]
    tail_rows: torch.Tensor | None
