"""New K and V into their slots, on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Tokens a program: rows of 128 bfloat16 values make 4 KiB of K and 4 KiB of V, contiguous in the pool within a block.
_TILE_TOKENS = 16


def write_kv(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor, layer: int) -> None:
    """Write as `reference.write_kv` does, in one launch.

    Args:
        key: `[num_tokens, num_kv_heads, head_dim]` with a contiguous last dimension, rounded to the pool's dtype on
            the way.
        value: like `key`.
        slots: int64 `[num_tokens]`, contiguous, `block_id * block_size + offset`, all different.
        pool: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, contiguous.
        layer: index into the pool's layers.

    Raises:
        ValueError: the last dimension of `key` or `value` is strided.
    """
    if key.stride(-1) != 1 or value.stride(-1) != 1:
        raise ValueError("key, value: expected a contiguous last dimension, got a strided one")
    num_tokens = key.shape[0]
    _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    _write_tile[(triton.cdiv(num_tokens, _TILE_TOKENS), num_kv_heads)](
        key,
        value,
        slots,
        pool,
        num_tokens,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        layer,
        NUM_LAYERS=num_layers,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        TILE_TOKENS=_TILE_TOKENS,
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["num_tokens", "layer"])  # type: ignore[untyped-decorator]
def _write_tile(  # type: ignore[no-untyped-def]
    key,
    value,
    slots,
    pool,
    num_tokens,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    layer,
    NUM_LAYERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Write K and V of some tokens of one KV head."""
    tokens = tl.program_id(0) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    kv_head = tl.program_id(1).to(tl.int64)
    is_token = tokens < num_tokens
    slot = tl.load(slots + tokens, mask=is_token, other=0)
    K_OR_V_STRIDE: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE
    layer_rows = (slot // BLOCK_SIZE * NUM_LAYERS + layer) * (2 * K_OR_V_STRIDE)
    pool_rows = layer_rows + kv_head * BLOCK_SIZE + slot % BLOCK_SIZE  # int64, in rows of head_dim

    key_rows = key + tokens.to(tl.int64) * key_token_stride + kv_head * key_head_stride
    value_rows = value + tokens.to(tl.int64) * value_token_stride + kv_head * value_head_stride
    _write_rows(key_rows, pool, pool_rows, is_token, HEAD_DIM, PADDED_DIM)
    _write_rows(value_rows, pool, pool_rows + K_OR_V_STRIDE, is_token, HEAD_DIM, PADDED_DIM)


@triton.jit  # type: ignore[untyped-decorator]
def _write_rows(source_rows, pool, pool_rows, is_row, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert whole rows, one a token and head, to the pool's dtype: the place for a scale a row."""
    dims = tl.arange(0, PADDED_DIM)
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    rows = tl.load(source_rows[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(pool + pool_rows[:, None] * HEAD_DIM + dims[None, :], rows.to(pool.dtype.element_ty), mask=mask)
