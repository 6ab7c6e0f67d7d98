"""Linear layers with int8 weights and dynamically quantized rows on a CPU: a scale per row and per output feature.

Integer sums are exact in any order, so a row's bits cannot depend on the rest of the batch.

    row     float  ──▶ integers of -127..127, and a scale ┐
    weight  packed: integers of -127..127, and scales     ┴▶ sums of 32 bits ──▶ times both scales, plus the bias
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

_LARGEST = 127
_MAX_FEATURES = (2**31 - 1) // _LARGEST**2  # with more, a sum may overflow
_SMALLEST_SCALE = 1e-30  # the scale of a row of zeros
_ONEDNN: Any = torch.ops.onednn
_TRIED_IN_FEATURES = (3, 64, 300)
_TRIED_ROWS, _TRIED_OUT_FEATURES = 17, 33


class Int8Weight(NamedTuple):
    """A weight in the format of oneDNN's int8 matmul.

    Attributes:
        packed: integers, packed by oneDNN.
        scales: float32 `[out_features]`.
        zeros: int32 `[out_features]`, the zero points, all 0. oneDNN requires them.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row to integers. The largest magnitude of a row becomes 127.

    >>> quantize_rows(torch.tensor([[1.0, -2.0, 0.5]]))[0]
    tensor([[  64, -127,   32]], dtype=torch.int8)

    Args:
        rows: `[num_rows, num_columns]`.

    Returns:
        int8 `[num_rows, num_columns]`, and float32 scales `[num_rows, 1]`. If a row contains NaN or infinity, its scale
        is not finite.
    """
    wide = rows.float()
    largest = torch.maximum(wide.amax(1, keepdim=True), wide.amin(1, keepdim=True).neg_())
    scales = largest.mul_(1 / _LARGEST).clamp_(min=_SMALLEST_SCALE)
    return (wide * scales.reciprocal()).round_().to(torch.int8), scales


def pack_int8(weight: torch.Tensor) -> Int8Weight:
    """Quantize and pack a weight `[out_features, in_features]`.

    Raises:
        ValueError: it has so many input features that a 32-bit sum could overflow.
    """
    if weight.shape[1] > _MAX_FEATURES:
        raise ValueError(f"weight: expected at most {_MAX_FEATURES} input features, got {weight.shape[1]}")
    integers, scales = quantize_rows(weight)
    packed = _ONEDNN.qlinear_prepack(integers, None)
    return Int8Weight(packed, scales[:, 0].contiguous(), torch.zeros(weight.shape[0], dtype=torch.int32))


def int8_linear(rows: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Apply the layer to rows `[num_rows, in_features]`. Returns `[num_rows, out_features]` in the rows' dtype."""
    integers, scales = quantize_rows(rows)
    output = _int8_matmul(integers, weight).mul_(scales)
    if bias is not None:
        output.add_(bias)
    return output.to(rows.dtype)


def adds_integers_exactly() -> bool:
    """Return whether int8 matmuls are exact here: without VNNI, sums of two products may saturate at 16 bits."""
    if not torch._C._has_mkldnn:
        return False
    generator = torch.Generator().manual_seed(0)

    def random_extremes(num_rows: int, num_columns: int) -> torch.Tensor:
        return (torch.randint(0, 2, (num_rows, num_columns), generator=generator) * 2 - 1) * _LARGEST

    for in_features in _TRIED_IN_FEATURES:
        rows = random_extremes(_TRIED_ROWS, in_features)
        weight = random_extremes(_TRIED_OUT_FEATURES, in_features)
        rows[0] = weight[0] = _LARGEST  # the largest possible sum
        packed = pack_int8(weight.float())
        if not torch.equal(_int8_matmul(rows.to(torch.int8), packed), (rows @ weight.t()).float() * packed.scales):
            return False
    return True


def _int8_matmul(integers: torch.Tensor, weight: Int8Weight) -> torch.Tensor:
    """Return the int8 matmul, multiplied by the weight's scales, in float32."""
    output: torch.Tensor = _ONEDNN.qlinear_pointwise(
        integers, 1.0, 0, *weight, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return output
