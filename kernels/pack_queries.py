"""Lays the rows of queries out so that those of a tile follow each other, as a tensor memory descriptor requires.

one KV head   [ rows of all requests, as they come .......... )[ joined rows ...... )
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PROGRAM_ROWS = 32


def pack_queries(query: torch.Tensor, joined_rows: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Copy the queries one KV head after the other, each with all its packed rows and then the joined ones.

    For each row the copy reads and writes `head_dim` numbers.

    Args:
        query: `[num_tokens, num_query_heads, head_dim]` with a contiguous last dimension.
        joined_rows: int32 `[num_joined_rows, 3]`, see `AttentionPlan`.
        num_kv_heads: KV heads, a divisor of `num_query_heads`.

    Returns:
        `[num_kv_heads, num_tokens * group_size + num_joined_rows, head_dim]`, new and contiguous.
    """
    num_tokens, num_query_heads, head_dim = query.shape
    group_size = num_query_heads // num_kv_heads
    num_rows = num_tokens * group_size + len(joined_rows)
    packed = query.new_empty(num_kv_heads, num_rows, head_dim)
    _pack_rows[(triton.cdiv(num_rows, _PROGRAM_ROWS), num_kv_heads)](
        query,
        packed,
        joined_rows,
        num_tokens * group_size,
        num_rows,
        query.stride(0),
        query.stride(1),
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        PROGRAM_ROWS=_PROGRAM_ROWS,
        num_warps=4,
        enable_fp_fusion=True,  # triton's default changes with 3.10
    )
    return packed


@triton.jit(do_not_specialize=["num_own_rows", "num_rows"])  # type: ignore[untyped-decorator]
def _pack_rows(  # type: ignore[no-untyped-def]
    query,
    packed,
    joined_rows,
    num_own_rows,
    num_rows,
    token_stride,
    head_stride,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PROGRAM_ROWS: tl.constexpr,
):
    """Copy some rows of one KV head."""
    rows = tl.program_id(0) * PROGRAM_ROWS + tl.arange(0, PROGRAM_ROWS)
    kv_head = tl.program_id(1)
    is_row = rows < num_rows
    joined = tl.load(joined_rows + (rows - num_own_rows) * 3, mask=is_row & (rows >= num_own_rows), other=0)
    sources = tl.where(rows < num_own_rows, rows, joined)
    dims = tl.arange(0, PADDED_DIM)
    is_number = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    heads = (kv_head * GROUP_SIZE + sources % GROUP_SIZE).to(tl.int64)
    offsets = (sources // GROUP_SIZE).to(tl.int64) * token_stride + heads * head_stride
    numbers = tl.load(query + offsets[:, None] + dims[None, :], mask=is_number, other=0.0)
    packed_rows = kv_head.to(tl.int64) * num_rows + rows
    tl.store(packed + packed_rows[:, None] * HEAD_DIM + dims[None, :], numbers, mask=is_number)
