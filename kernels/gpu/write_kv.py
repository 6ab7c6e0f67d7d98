"""Writes new K and V into their slots on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.quantization import INT4, LARGEST, SMALLEST_SCALE, key_dtype

# Tokens per program: their vectors of 128 bfloat16 values are 4 KiB of K and 4 KiB of V, contiguous within a block.
_TILE_TOKENS = 16


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor | None,
    slots: torch.Tensor,
    pool: KVPool,
    layer: int,
    max_magnitudes: torch.Tensor | None = None,
) -> None:
    """Compute `reference.write_kv` in one launch.

    Args:
        key: `[num_tokens, num_kv_heads, head_dim]` with a contiguous last dimension; rounded or quantized to the
            pool's dtype.
        value: like `key`; not None, since the pool is not latent.
        slots: int64 `[num_tokens]`, contiguous, `block_id * block_size + offset`, all different. A token with a
            negative slot is padding and is not written.
        pool: the K/V, ordered by block; not latent.
        layer: index into the pool's layers.
        max_magnitudes: float32 `[num_tokens, num_kv_heads]`, contiguous, or None; see `reference.write_kv`. Padding
            does not change it.

    Raises:
        ValueError: the last dimension of `key` or `value` is strided, or the pool is latent.
    """
    if value is None or pool.is_latent:
        raise ValueError("pool: expected a pool of keys and values, got a latent pool")
    if key.stride(-1) != 1 or value.stride(-1) != 1:
        raise ValueError("key, value: expected a contiguous last dimension, got a strided one")
    num_tokens = key.shape[0]
    value_stride, scale_stride = pool.block_strides
    _write_tile[(triton.cdiv(num_tokens, _TILE_TOKENS), pool.num_kv_heads)](
        key,
        value,
        slots,
        pool.values,
        pool.scales,
        max_magnitudes,
        num_tokens,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        value_stride,
        scale_stride,
        layer,
        NUM_KV_HEADS=pool.num_kv_heads,
        BLOCK_SIZE=pool.block_size,
        HEAD_DIM=pool.head_dim,
        PADDED_DIM=triton.next_power_of_2(pool.head_dim),
        ROW_SIZE=pool.values.shape[-1],
        LAYER_SIZE=pool.values.shape[2:].numel(),
        VALUE_OFFSET=pool.value_offset,
        IS_PACKED=pool.dtype == INT4,
        LARGEST_KEY=LARGEST.get(key_dtype(pool.dtype)),
        LARGEST=LARGEST.get(pool.dtype),
        SMALLEST_SCALE=SMALLEST_SCALE,
        TILE_TOKENS=_TILE_TOKENS,
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["num_tokens", "layer"])  # type: ignore[untyped-decorator]
def _write_tile(  # type: ignore[no-untyped-def]
    key,
    value,
    slots,
    values,
    scales,
    max_magnitudes,
    num_tokens,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    value_stride,
    scale_stride,
    layer,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    LAYER_SIZE: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    IS_PACKED: tl.constexpr,
    LARGEST_KEY: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Write K and V of some tokens of one KV head. A program writes whole vectors, since each has its own scale.

    LARGEST and LARGEST_KEY are the largest numbers that the dtypes of values and of keys can hold.
    """
    tokens = tl.program_id(0) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    kv_head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + tokens, mask=tokens < num_tokens, other=-1)
    is_token = slot >= 0
    dims, pairs = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_DIM // 2)
    mask = is_token[:, None] & (dims < HEAD_DIM)[None, :]
    if max_magnitudes is not None:
        magnitudes = tl.load(max_magnitudes + tokens * NUM_KV_HEADS + kv_head, mask=is_token, other=0.0)
    row = kv_head * BLOCK_SIZE + slot % BLOCK_SIZE  # within a layer
    targets = values + (slot // BLOCK_SIZE * value_stride + layer * LAYER_SIZE + row * ROW_SIZE)
    for k_or_v in tl.static_range(2):
        if k_or_v == 0:
            sources = key + tokens.to(tl.int64) * key_token_stride + kv_head * key_head_stride
        else:
            sources = value + tokens.to(tl.int64) * value_token_stride + kv_head * value_head_stride
        numbers = tl.load(sources[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        if max_magnitudes is not None:
            magnitudes = _larger(magnitudes, numbers)
        if LARGEST is not None:
            vector_scales = _scales(numbers, LARGEST_KEY if k_or_v == 0 else LARGEST, SMALLEST_SCALE)
            scale_row = (layer * 2 + k_or_v) * NUM_KV_HEADS * BLOCK_SIZE + row  # within its block
            tl.store(scales + slot // BLOCK_SIZE * scale_stride + scale_row, vector_scales, mask=is_token)
            numbers = tl.div_rn(numbers, vector_scales[:, None])
            numbers = _round(numbers) if values.dtype.element_ty == tl.int8 else tl.clamp(numbers, -LARGEST, LARGEST)
        vectors = targets[:, None] + k_or_v * VALUE_OFFSET
        if IS_PACKED and k_or_v == 1:
            evens, odds = tl.split(tl.reshape(numbers, (TILE_TOKENS, PADDED_DIM // 2, 2)))
            packed = (evens & 15) | (odds << 4)
            is_pair = is_token[:, None] & (pairs < HEAD_DIM // 2)[None, :]
            tl.store(vectors + pairs[None, :], packed.to(values.dtype.element_ty), mask=is_pair)
        else:
            tl.store(vectors + dims[None, :], numbers.to(values.dtype.element_ty), mask=mask)
    if max_magnitudes is not None:
        tl.store(max_magnitudes + tokens * NUM_KV_HEADS + kv_head, magnitudes, mask=is_token)


@triton.jit
def _larger(magnitudes, numbers):  # type: ignore[no-untyped-def]
    """Return the maximum of each magnitude and the magnitudes of its row of `numbers`; NaN if any is NaN.

    `tl.max` alone would ignore NaN.
    """
    is_nan = (magnitudes != magnitudes) | (tl.max((numbers != numbers).to(tl.int32), 1) > 0)
    return tl.where(is_nan, float("nan"), tl.maximum(magnitudes, tl.max(tl.abs(numbers), 1)))


@triton.jit  # type: ignore[untyped-decorator]
def _scales(numbers, LARGEST: tl.constexpr, SMALLEST_SCALE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scale of each row; NaN if the row contains NaN, which `tl.max` ignores."""
    scales = tl.maximum(tl.div_rn(tl.max(tl.abs(numbers), 1), LARGEST), SMALLEST_SCALE)
    has_nan = tl.max((numbers != numbers).to(tl.int32), 1) > 0
    return tl.where(has_nan, float("nan"), scales)


@triton.jit
def _round(numbers):  # type: ignore[no-untyped-def]
    """Round to the nearest integer, ties to even. NaN becomes 0."""
    rounded = (numbers + 12582912.0) - 12582912.0  # 1.5 * 2**23: at this magnitude, float32 has no fractional bits
    return tl.where(rounded == rounded, rounded, 0.0).to(tl.int32)
