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
    """`Matmul` of gemm.h."""

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
        numbers: the packed weights, `[num_panels, num_words, features of a panel, numbers of a word]`; if they are
            quantized, uint8 `[num_panels, num_groups, bytes of a group]`.
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
        panel_features = library.panel_features
        word_numbers = library.word_numbers[self.dtype]
        num_panels = -(-self.out_features // panel_features)
        num_words = in_features // word_numbers
        self.numbers = torch.empty(num_panels, num_words, panel_features, word_numbers, dtype=self.dtype)
        first_feature = 0
        for weight in map(torch.Tensor.contiguous, weights):
            library.pack_weight(
                *(weight.data_ptr(), len(weight), num_words, word_numbers * self.dtype.itemsize, first_feature),
                *(self.numbers.data_ptr(), torch.get_num_threads()),
            )
            first_feature += len(weight)
        num_last_features = self.out_features - (num_panels - 1) * panel_features
        self.numbers[-1, :, num_last_features:] = 0  # the padding of the last panel


class QuantizedPanels(Panels):
    """One or more quantized weights, packed in the layout of quantized.h, as one matrix.

    Args:
        weights: weights with the same bits and in_features. Their features are concatenated in order.
        dtype: dtype of the rows that the weights are multiplied with.
    """

    def __init__(self, weights: Iterable[QuantizedWeight], dtype: torch.dtype) -> None:
        weight = QuantizedWeight.concatenated(weights)
        self.dtype = dtype
        self.format = Format.Q8 if weight.bits == 8 else Format.Q4
        self.out_features = len(weight)
        panel_features = _current_library().panel_features
        codes, scales, minima = weight.padded(panel_features)
        num_panels, num_groups = len(scales) // panel_features, scales.shape[1]
        # Tensors of bytes, [num_panels, num_groups, bytes], that are concatenated for each group.
        sections = [
            float16s.view(num_panels, panel_features, num_groups).transpose(1, 2).contiguous().view(torch.uint8)
            for float16s in (scales, minima)
            if float16s is not None
        ]
        grouped = codes.view(num_panels, panel_features, num_groups, -1).permute(0, 2, 3, 1)
        if self.format == Format.Q4:
            grouped = grouped[:, :, 0::2] | grouped[:, :, 1::2] << 4  # two codes per byte
        sections.append(grouped.reshape(num_panels, num_groups, -1).view(torch.uint8))
        self.numbers = torch.cat(sections, dim=2)
        self._panel_features = panel_features

    def rows(self, features: torch.Tensor) -> QuantizedWeight:
        """Return the quantized weights of some output features, int64 `[n]`."""
        panel_features, is_q4 = self._panel_features, self.format == Format.Q4
        panel, index = features // panel_features, features % panel_features
        float16s = self.numbers.view(torch.float16)  # [num_panels, num_groups, half the bytes of a group]
        scales = float16s[:, :, :panel_features][panel, :, index]
        minima = float16s[:, :, panel_features : 2 * panel_features][panel, :, index] if is_q4 else None
        first_code_byte = (4 if is_q4 else 2) * panel_features  # two bytes for each scale and for each minimum
        codes = self.numbers[:, :, first_code_byte:]
        # [num_panels, num_groups, bytes of a feature, features]
        codes = codes.unflatten(2, (-1, panel_features))[panel, :, :, index]  # type: ignore[no-untyped-call]
        codes = torch.stack((codes & 15, codes >> 4), -1) if is_q4 else codes.view(torch.int8)
        return QuantizedWeight(codes.flatten(1), scales, minima, self.dtype)


def use(library: ctypes.CDLL) -> None:
    """Use a compiled library for all linear layers from now on.

    Args:
        library: returned by `load_library`.
    """
    global _library
    names = ("multiply", "pack_weight", "panel_features", "word_numbers")
    multiply, pack_weight, panel_features, word_numbers = (getattr(library, f"radixkv_{name}") for name in names)
    multiply.argtypes, multiply.restype = (_POINTER,), None
    pack_weight.argtypes, pack_weight.restype = (_POINTER, *(_INT,) * 4, _POINTER, _INT), None
    panel_features.argtypes, panel_features.restype = (), _INT
    word_numbers.argtypes, word_numbers.restype = (_INT,), _INT
    _library = _Library(
        multiply, pack_weight, panel_features(), {dtype: word_numbers(code) for dtype, code in DTYPE_CODES.items()}
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
