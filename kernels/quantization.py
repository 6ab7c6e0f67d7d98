"""Numbers of 8 and 4 bits with a float32 scale for each vector: what quantized K and V mean.

    vector  [ 0.3, -1.27, 0.02, ... ]  ->  scale = largest magnitude / 127,  values = round(vector / scale)

The scale is made from the vector alone (dynamic, symmetric, no calibration), so a token's K and V are stored alike
whatever is stored with it.
"""

from __future__ import annotations

import torch

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # torch's annotations lack it

# The largest magnitude that a vector is scaled to.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0, INT4: 7.0}

# A vector of zeros has this scale: the smallest that a division does not overflow with.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny

_PLAIN = (torch.float32, torch.bfloat16, torch.float16)


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether vectors of this dtype have scales."""
    return dtype in LARGEST


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the tensor that holds such numbers: two int4 share an int8.

    Raises:
        ValueError: numbers of this dtype are not stored.
    """
    if dtype not in _PLAIN and dtype not in LARGEST:
        names = ", ".join(str(known).removeprefix("torch.") for known in (*_PLAIN, *LARGEST))
        raise ValueError(f"dtype: expected one of {names}, got {str(dtype).removeprefix('torch.')}")
    return torch.int8 if dtype == INT4 else dtype


def stored_dim(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of the tensor that holds a vector of `head_dim` numbers.

    Raises:
        ValueError: int4 and an odd `head_dim`.
    """
    if dtype != INT4:
        return head_dim
    if head_dim % 2:
        raise ValueError(f"head_dim: expected an even number for int4, got {head_dim}")
    return head_dim // 2


def quantize(vectors: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and round vectors, to nearest and to even between two.

    Args:
        vectors: `[..., head_dim]`, floating point.
        dtype: float8_e4m3fn, int8 or int4.

    Returns:
        Values `[..., stored_dim]` of the stored dtype, and float32 scales `[...]`. A vector with an infinity or a NaN
        has a scale that is not finite.

    Raises:
        ValueError: another dtype.
    """
    if dtype not in LARGEST:
        raise ValueError(f"dtype: expected one of {', '.join(map(str, LARGEST))}, got {dtype}")
    vectors = vectors.float()
    # By a tensor: a GPU multiplies by the rounded reciprocal of a plain number, and so would be a bit off the kernel.
    largest = torch.full((), LARGEST[dtype], device=vectors.device)
    scales = (vectors.abs().amax(dim=-1) / largest).clamp_min(SMALLEST_SCALE)
    values = vectors / scales[..., None]
    if dtype == torch.float8_e4m3fn:
        return values.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype), scales
    values = values.round().nan_to_num(0.0).to(torch.int8)
    return (pack_int4(values) if dtype == INT4 else values), scales


def dequantize(
    values: torch.Tensor, scales: torch.Tensor, quantized: torch.dtype, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """What quantized vectors stand for.

    Args:
        values: `[..., stored_dim]`.
        scales: float32 `[...]`.
        quantized: what the values were quantized to.
        dtype: what to round the products to.

    Returns:
        A new tensor `[..., head_dim]` of `dtype`.
    """
    if quantized == INT4:
        values = unpack_int4(values)
    return values.float().mul_(scales[..., None]).to(dtype)


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """Put pairs of int8 between -8 and 7 into one int8 each: the even one into the low four bits."""
    return (values[..., 0::2] & 15) | (values[..., 1::2] << 4)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Undo `pack_int4`."""
    return torch.stack(((packed << 4) >> 4, packed >> 4), dim=-1).flatten(-2)
