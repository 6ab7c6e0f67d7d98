"""The Hadamard transform on a GPU, applied to vectors before they are stored in 4 bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv.kernels.quantization import hadamard_size

# Elements per program: 16 KiB of float32.
_TILE_NUMBERS = 4096


def hadamard_transform(vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute `reference.hadamard_transform` in one launch, with the same bits.

    Args:
        vectors: `[num_tokens, num_heads, head_dim]` with a contiguous last dimension.
        dtype: dtype of the result.

    Raises:
        ValueError: the last dimension is strided.
    """
    if vectors.stride(-1) != 1:
        raise ValueError("vectors: expected a contiguous last dimension, got a strided one")
    num_tokens, num_heads, head_dim = vectors.shape
    rotated = torch.empty(vectors.shape, dtype=dtype, device=vectors.device)
    part_size = hadamard_size(head_dim)  # each part of a vector is transformed on its own
    num_parts = num_tokens * num_heads * (head_dim // part_size)
    tile_parts = max(1, _TILE_NUMBERS // part_size)
    _hadamard_tile[(triton.cdiv(num_parts, tile_parts),)](
        vectors,
        rotated,
        num_parts,
        vectors.stride(0),
        vectors.stride(1),
        num_heads,
        PARTS_PER_HEAD=head_dim // part_size,
        PART_SIZE=part_size,
        STAGES=part_size.bit_length() - 1,
        FACTOR=part_size**-0.5,
        TILE_PARTS=tile_parts,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return rotated


@triton.jit(do_not_specialize=["num_parts"])  # type: ignore[untyped-decorator]
def _hadamard_tile(  # type: ignore[no-untyped-def]
    vectors,
    rotated,
    num_parts,
    token_stride,
    head_stride,
    num_heads,
    PARTS_PER_HEAD: tl.constexpr,
    PART_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    FACTOR: tl.constexpr,
    TILE_PARTS: tl.constexpr,
):
    """Transform `TILE_PARTS` parts of vectors, of `PART_SIZE` elements each."""
    parts = tl.program_id(0).to(tl.int64) * TILE_PARTS + tl.arange(0, TILE_PARTS)
    heads = parts // PARTS_PER_HEAD
    starts = heads // num_heads * token_stride + heads % num_heads * head_stride + parts % PARTS_PER_HEAD * PART_SIZE
    dims = tl.arange(0, PART_SIZE)
    mask = (parts < num_parts)[:, None] & (dims >= 0)[None, :]  # `dims >= 0` only gives the mask its shape
    numbers = tl.load(vectors + starts[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(numbers, (TILE_PARTS, PART_SIZE // (2 << stage), 2, 1 << stage))
        first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        joined = tl.join(first + second, first - second)
        numbers = tl.reshape(tl.permute(joined, (0, 1, 3, 2)), (TILE_PARTS, PART_SIZE))
    numbers *= FACTOR
    offsets = parts[:, None] * PART_SIZE + dims[None, :]
    tl.store(rotated + offsets, numbers.to(rotated.dtype.element_ty), mask=mask)
