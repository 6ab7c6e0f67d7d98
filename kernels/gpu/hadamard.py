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
    part = hadamard_size(head_dim)
    num_parts = num_tokens * num_heads * (head_dim // part)
    tile = max(1, _TILE_NUMBERS // part)
    _hadamard_tile[(triton.cdiv(num_parts, tile),)](
        vectors,
        rotated,
        num_parts,
        vectors.stride(0),
        vectors.stride(1),
        num_heads,
        PARTS=head_dim // part,
        PART=part,
        STAGES=part.bit_length() - 1,
        FACTOR=part**-0.5,
        TILE=tile,
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
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    STAGES: tl.constexpr,
    FACTOR: tl.constexpr,
    TILE: tl.constexpr,
):
    """Transform `TILE` blocks of vectors."""
    parts = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    heads = parts // PARTS
    starts = heads // num_heads * token_stride + heads % num_heads * head_stride + parts % PARTS * PART
    dims = tl.arange(0, PART)
    mask = (parts < num_parts)[:, None] & (dims >= 0)[None, :]
    numbers = tl.load(vectors + starts[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(numbers, (TILE, PART // (2 << stage), 2, 1 << stage))
        first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        joined = tl.join(first + second, first - second)
        numbers = tl.reshape(tl.permute(joined, (0, 1, 3, 2)), (TILE, PART))
    numbers *= FACTOR
    places = parts[:, None] * PART + dims[None, :]
    tl.store(rotated + places, numbers.to(rotated.dtype.element_ty), mask=mask)
