"""Calls the GEMM of `gemm.cpp`: linear layers with a weight that was packed once.

`GEMM_BACKENDS` offers these functions as native, q8 and q4 once `use` has set a library. The bits of an output row
depend only on its input row, the weight and the bias, not on the number of rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple

import torch

from radixkv.kernels.native.library import DTYPE_CODES
from radixkv.kernels.quantized_weight import GROUP_FEATURES, QuantizedWeight

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64

DTYPES = tuple(DTYPE_CODES)  # supported dtypes of weights


class Format(IntEnum):
    """How weights are stored: `Format` of quantized.h."""

    PLAIN = 0
    Q8 = 1
    Q4 = 2


class _Library(NamedTuple):
    """The GEMM functions of a compiled library, and the layout of weights that it reads."""

    multiply: Callable[[object], None]
    pack_weight: Callable[..., None]
    panel_features: int
    word_numbers: Mapping[torch.dtype, int]


_library: _Library | None = None


class _MatmulStruct(ctypes.Structure):
    """`Matmul` of gemm.cpp."""

    _fields_ = (
        *((name, _POINTER) for name in ("rows", "weight", "other_weight", "bias", "other_bias", "out")),
        *((name, _INT) for name in ("num_rows", "in_features", "out_features", "dtype", "format", "num_threads")),
    )


class Panels:
    """One or more weights, packed in the layout that `multiply` reads, as one matrix.

    Args:
        weights: `[features, in_features]` each, for which `multiplies` is true. Their features are concatenated in
            order.

    Attributes:
        numbers: the packed weights.
        out_features: features of all weights.
        dtype: dtype of the rows that the weights are multiplied with.
        format: how the weights are stored.
    """

    format = Format.PLAIN

    def __init__(self, *weights: torch.Tensor) -> None:
        library = _current_library()
        in_features = weights[0].shape[1]
        self.dtype = weights[0].dtype
        self.out_features = sum(map(len, weights))
        num_features = library.panel_features
        num_numbers = library.word_numbers[self.dtype]
        num_panels = -(-self.out_features // num_features)
        num_words = in_features // num_numbers
        # [num_panels, num_words, features, numbers of a word]
        self.numbers = torch.empty(num_panels, num_words, num_features, num_numbers, dtype=self.dtype)
        start = 0
        for weight in map(torch.Tensor.contiguous, weights):
            library.pack_weight(
                *(weight.data_ptr(), len(weight), num_words, num_numbers * self.dtype.itemsize, start),
                *(self.numbers.data_ptr(), torch.get_num_threads()),
            )
            start += len(weight)
        self.numbers[-1, :, num_features - num_panels * num_features + start :] = 0


class QuantizedPanels(Panels):
    """One or more quantized weights, packed in the layout of quantized.h, as one matrix.

    Args:
        weights: weights with the same bits and in_features. Their features are concatenated in order.
        dtype: dtype of the rows that the weights are multiplied with.
    """

    def __init__(self, weights: Iterable[QuantizedWeight], dtype: torch.dtype) -> None:
        whole = QuantizedWeight.concatenated(weights)
        self.dtype = dtype
        self.format = Format.Q8 if whole.bits == 8 else Format.Q4
        self.out_features = len(whole)
        num_features = _current_library().panel_features
        codes, scales, minima = whole.padded(num_features)
        num_panels, num_groups = len(scales) // num_features, scales.shape[1]
        # [num_panels, num_groups, bytes of a group]
        parts = [
            each.view(num_panels, num_features, num_groups).transpose(1, 2).contiguous().view(torch.uint8)
            for each in (scales, minima)
            if each is not None
        ]
        grouped = codes.view(num_panels, num_features, num_groups, -1).permute(0, 2, 3, 1)
        if self.format == Format.Q4:
            grouped = grouped[:, :, 0::2] | grouped[:, :, 1::2] << 4
        parts.append(grouped.reshape(num_panels, num_groups, -1).view(torch.uint8))
        self.numbers = torch.cat(parts, dim=2)
        self._panel_features = num_features

    def rows(self, features: torch.Tensor) -> QuantizedWeight:
        """Return the quantized weights of some output features, int64 `[n]`."""
        width, is_q4 = self._panel_features, self.format == Format.Q4
        panel, place = features // width, features % width
        halves = self.numbers.view(torch.float16)  # [num_panels, num_groups, half the bytes of a group]
        scales = halves[:, :, :width][panel, :, place]
        minima = halves[:, :, width : 2 * width][panel, :, place] if is_q4 else None
        # [num_panels, num_groups, bytes of a feature, features]
        codes = self.numbers[:, :, (4 if is_q4 else 2) * width :]
        codes = codes.unflatten(2, (-1, width))[panel, :, :, place]  # type: ignore[no-untyped-call]
        codes = torch.stack((codes & 15, codes >> 4), -1) if is_q4 else codes.view(torch.int8)
        return QuantizedWeight(codes.flatten(1), scales, minima, self.dtype)


def use(library: ctypes.CDLL) -> None:
    """Use a compiled library for all linear layers from now on.

    Args:
        library: returned by `load_library`.
    """
    global _library
    names = ("multiply", "pack_weight", "panel_features", "word_numbers")
    multiply, pack_weight, features, numbers = (getattr(library, f"radixkv_{name}") for name in names)
    multiply.argtypes, multiply.restype = (_POINTER,), None
    pack_weight.argtypes, pack_weight.restype = (_POINTER, *(_INT,) * 4, _POINTER, _INT), None
    features.argtypes, features.restype = (), _INT
    numbers.argtypes, numbers.restype = (_INT,), _INT
    _library = _Library(
        multiply, pack_weight, features(), {dtype: numbers(code) for dtype, code in DTYPE_CODES.items()}
    )


def multiplies(weight: torch.Tensor) -> bool:
    """Return whether a library is in use that supports a weight of this shape and dtype."""
    if _library is None or weight.dtype not in _library.word_numbers:
        return False
    return weight.shape[1] % _library.word_numbers[weight.dtype] == 0


def multiplies_quantized(weight: torch.Tensor) -> bool:
    """Return whether a library is in use that supports a weight of this shape and dtype once it is quantized."""
    return _library is not None and weight.dtype in DTYPES and weight.shape[1] % GROUP_FEATURES == 0


def _current_library() -> _Library:
    assert _library is not None, "a library is in use"
    return _library


def multiply(rows: torch.Tensor, weight: Panels, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the output, see `GemmBackend.multiply`. Sums are float32; they are rounded once, after adding the bias."""
    return _compute(rows, weight, bias, None, None)


def gate(
    rows: torch.Tensor, weight: Panels, bias: torch.Tensor | None, up: Panels, up_bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the SiLU of the output of `weight`, times the output of `up`, rounded once."""
    return _compute(rows, weight, bias, up, up_bias)


def _compute(
    rows: torch.Tensor, weight: Panels, bias: torch.Tensor | None, up: Panels | None, up_bias: torch.Tensor | None
) -> torch.Tensor:
    num_rows, in_features = rows.shape
    out = rows.new_empty(num_rows, weight.out_features)
    tensors = (rows, weight.numbers, None if up is None else up.numbers, bias, up_bias, out)
    matmul = _MatmulStruct(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        *(num_rows, in_features, weight.out_features, DTYPE_CODES[rows.dtype], weight.format, torch.get_num_threads()),
    )
    _current_library().multiply(ctypes.byref(matmul))
    return out
