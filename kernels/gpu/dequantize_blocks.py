"""Dequantizes blocks of a pool on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.quantization import INT4

# Keys, and values, per program: 64 vectors of 128 bfloat16 numbers are 16 KiB, eight 16-byte stores per thread.
_TILE_VECTORS = 64


def dequantize_blocks(pool: KVPool, layer: int, block_ids: torch.Tensor, dtype: torch.dtype) -> KVPool:
    """Compute `reference.dequantize_blocks` in one launch.

    Args:
        pool: the K/V, quantized; not latent.
        layer: index into the pool's layers.
        block_ids: int32 `[num_blocks]`, contiguous.
        dtype: dtype of the new pool: bfloat16, float16 or float32.

    Returns:
        A new pool of one layer, owned by the caller. Its block `i` is block `block_ids[i]` of `pool`.

    Raises:
        ValueError: the pool is not quantized, or `block_ids` is strided.
    """
    if pool.scales is None:
        raise ValueError(f"pool: expected a quantized pool, got one of {pool.dtype}")
    if not block_ids.is_contiguous():
        raise ValueError("block_ids: expected a contiguous tensor, got a strided one")
    size = (block_ids.shape[0], 1, pool.num_kv_heads, pool.block_size, pool.head_dim)
    plain = KVPool.allocate(*size, dtype=dtype, device=pool.blocks.device, is_zeroed=False)
    block_vectors = pool.num_kv_heads * pool.block_size
    tiles_per_block = triton.cdiv(block_vectors, _TILE_VECTORS)
    _dequantize_tile[(block_ids.shape[0] * tiles_per_block,)](
        pool.values,
        pool.scales,
        plain.values,
        block_ids,
        *pool.block_strides,
        layer,
        BLOCK_VECTORS=block_vectors,
        TILES_PER_BLOCK=tiles_per_block,
        HEAD_DIM=pool.head_dim,
        PADDED_DIM=triton.next_power_of_2(pool.head_dim),
        ROW_SIZE=pool.values.shape[-1],
        LAYER_SIZE=pool.values.shape[2:].numel(),
        VALUE_OFFSET=pool.value_offset,
        IS_PACKED=pool.dtype == INT4,
        TILE_VECTORS=_TILE_VECTORS,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return plain


@triton.jit(do_not_specialize=["layer"])  # type: ignore[untyped-decorator]
def _dequantize_tile(  # type: ignore[no-untyped-def]
    values,
    scales,
    plain,
    block_ids,
    value_stride,
    scale_stride,
    layer,
    BLOCK_VECTORS: tl.constexpr,
    TILES_PER_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    LAYER_SIZE: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    IS_PACKED: tl.constexpr,
    TILE_VECTORS: tl.constexpr,
):
    """Dequantize some keys and values of one block. Scales of a layer are contiguous, those of K first."""
    index = tl.program_id(0) // TILES_PER_BLOCK
    block_id = tl.load(block_ids + index).to(tl.int64)
    vectors = tl.program_id(0) % TILES_PER_BLOCK * TILE_VECTORS + tl.arange(0, TILE_VECTORS)
    is_vector = vectors < BLOCK_VECTORS
    dims, pairs = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_DIM // 2)
    mask = is_vector[:, None] & (dims < HEAD_DIM)[None, :]
    for k_or_v in tl.static_range(2):
        first = block_id * value_stride + layer * LAYER_SIZE + k_or_v * VALUE_OFFSET
        sources = values + first + (vectors * ROW_SIZE)[:, None]
        if IS_PACKED and k_or_v == 1:
            is_pair = is_vector[:, None] & (pairs < HEAD_DIM // 2)[None, :]
            packed = tl.load(sources + pairs[None, :], mask=is_pair, other=0)
            numbers = tl.interleave((packed << 4) >> 4, packed >> 4).to(tl.float32)
        else:
            numbers = tl.load(sources + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        scale_rows = (layer * 2 + k_or_v) * BLOCK_VECTORS + vectors
        vector_scales = tl.load(scales + block_id * scale_stride + scale_rows, mask=is_vector, other=0.0)
        numbers *= vector_scales[:, None]  # [TILE_VECTORS, PADDED_DIM]
        target_rows = (index.to(tl.int64) * 2 + k_or_v) * BLOCK_VECTORS + vectors
        targets = plain + target_rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(targets, numbers.to(plain.dtype.element_ty), mask=mask)
