"""A weight in 8 or 4 bits. Groups of 32 input features share a scale, and with 4 bits also a minimum.

    bits   codes       weight                     like
    8      -127..127   scale * code               GGUF's Q8_0
    4      0..15       scale * code + minimum     GGUF's Q4_1; Q4_0 is the same with minimum = -8 * scale

Scales and minima are float16. Rows are not quantized: they are multiplied by the dequantized weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

GROUP_FEATURES = 32
_LARGEST_CODE = {8: 127, 4: 15}  # by bits
_NUM_FITS = 3  # times that scale and minimum are fitted to the codes
_LARGEST_HALF = torch.finfo(torch.float16).max
_CHUNK_NUMBERS = 2**24  # numbers that are quantized at once, in float32


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight `[out_features, in_features]`.

    Attributes:
        codes: int8 or uint8 `[out_features, in_features]`.
        scales: float16 `[out_features, in_features / 32]`.
        minima: float16 `[out_features, in_features / 32]` for 4 bits; None for 8 bits.
        dtype: dtype of the rows that are multiplied by the weight.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    dtype: torch.dtype

    @classmethod
    def quantize(cls, weight: torch.Tensor, bits: int, dtype: torch.dtype | None = None) -> QuantizedWeight:
        """Round a weight.

        Args:
            weight: `[out_features, in_features]`, finite, of any floating-point dtype.
            bits: 8 or 4.
            dtype: dtype of the rows that are multiplied by the weight; None for the dtype of the weight.

        Raises:
            ValueError: `in_features` is not a multiple of 32, or a group is beyond what float16 scales can express.
        """
        out_features, in_features = weight.shape
        if in_features % GROUP_FEATURES:
            raise ValueError(f"weight: expected a multiple of {GROUP_FEATURES} input features, got {in_features}")
        chunks = torch.split(weight, max(1, _CHUNK_NUMBERS // max(1, in_features)))
        quantize = _quantize_8 if bits == 8 else _quantize_4
        quantized = [quantize(chunk.float().view(len(chunk), -1, GROUP_FEATURES)) for chunk in chunks]
        codes, scales, minima = map(torch.cat, zip(*quantized, strict=True))
        largest = torch.maximum(scales.abs(), minima.abs()).max() if out_features else torch.zeros(())
        if not largest <= _LARGEST_HALF:
            raise ValueError(f"weight: expected groups with scales of at most {_LARGEST_HALF:.0f}, got {largest:.3g}")
        return cls(
            codes.view(out_features, -1), scales.half(), None if bits == 8 else minima.half(), dtype or weight.dtype
        )

    @classmethod
    def concatenated(cls, weights: Iterable[QuantizedWeight]) -> QuantizedWeight:
        """Concatenate the output features of weights with the same number of bits."""
        weights = list(weights)
        if len(weights) == 1:
            return weights[0]
        minima = [weight.minima for weight in weights if weight.minima is not None]
        return cls(
            torch.cat([weight.codes for weight in weights]),
            torch.cat([weight.scales for weight in weights]),
            torch.cat(minima) if minima else None,
            weights[0].dtype,
        )

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 if self.minima is None else 4

    @property
    def shape(self) -> torch.Size:
        """`[out_features, in_features]`."""
        return self.codes.shape

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def is_finite(self) -> bool:
        """Whether all scales and minima are finite."""
        return bool(self.scales.isfinite().all()) and (self.minima is None or bool(self.minima.isfinite().all()))

    def rows(self, order: torch.Tensor) -> QuantizedWeight:
        """Return the output features with the indices `order`, in that order."""
        minima = None if self.minima is None else self.minima[order]
        return QuantizedWeight(self.codes[order], self.scales[order], minima, self.dtype)

    def dequantize(self) -> torch.Tensor:
        """Return the weight in float32 `[out_features, in_features]`, each number rounded once."""
        grouped = self.codes.view(*self.scales.shape, GROUP_FEATURES).double()
        numbers = grouped * self.scales[..., None].double()
        if self.minima is not None:
            numbers += self.minima[..., None].double()
        return numbers.float().view(self.codes.shape)

    def padded(self, multiple: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return codes, scales and minima, with output features of zeros appended up to a multiple of `multiple`."""
        num_padding = -len(self) % multiple

        def pad(numbers: torch.Tensor) -> torch.Tensor:
            return torch.cat((numbers, numbers.new_zeros(num_padding, numbers.shape[1]))) if num_padding else numbers

        return pad(self.codes), pad(self.scales), None if self.minima is None else pad(self.minima)


def _quantize_8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize float32 `[out_features, num_groups, 32]`. Returns int8 codes, float32 scales, and zeros."""
    scales = _as_half(groups.abs().amax(-1) / _LARGEST_CODE[8])
    codes = _codes(groups, scales, torch.zeros_like(scales), -_LARGEST_CODE[8], _LARGEST_CODE[8])
    return codes.to(torch.int8), scales, torch.zeros_like(scales)


def _quantize_4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize float32 `[out_features, num_groups, 32]`. Returns uint8 codes, and float32 scales and minima.

    The first scale and minimum of a group cover its range. They are then fitted to the codes by least squares, and
    the group is rounded again, three times. A fit that does not reduce the group's error is dropped.
    """
    minima, maxima = groups.aminmax(dim=-1)
    scales, minima = _as_half((maxima - minima) / _LARGEST_CODE[4]), _as_half(minima)
    codes = _codes(groups, scales, minima, 0, _LARGEST_CODE[4])
    errors = _errors(groups, codes, scales, minima)
    for _ in range(_NUM_FITS):
        code_means, group_means = codes.mean(-1), groups.mean(-1)
        centered = codes - code_means[..., None]
        slope = (centered * groups).sum(-1) / centered.square().sum(-1).clamp(min=1e-12)
        fitted_scales = _as_half(slope)
        fitted_minima = _as_half(group_means - slope * code_means)
        fitted_codes = _codes(groups, fitted_scales, fitted_minima, 0, _LARGEST_CODE[4])
        fitted_errors = _errors(groups, fitted_codes, fitted_scales, fitted_minima)
        is_better = fitted_errors < errors
        scales, minima = torch.where(is_better, fitted_scales, scales), torch.where(is_better, fitted_minima, minima)
        codes = torch.where(is_better[..., None], fitted_codes, codes)
        errors = torch.where(is_better, fitted_errors, errors)
    return codes.to(torch.uint8), scales, minima


def _as_half(numbers: torch.Tensor) -> torch.Tensor:
    """Round float32 numbers to those that float16 can express."""
    return numbers.half().float()


def _codes(groups: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return the codes from `first` to `last`, both included, that are closest to the numbers of each group."""
    inverse = torch.where(scales == 0, 0.0, scales.reciprocal())
    return ((groups - minima[..., None]) * inverse[..., None]).round_().clamp_(first, last)


def _errors(groups: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    """Return the sum of squared errors of each group."""
    return (codes * scales[..., None] + minima[..., None] - groups).square().sum(-1)
