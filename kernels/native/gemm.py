"""Calls the GEMM of `gemm.cpp`: linear layers with a weight that was packed once.

They are a `GemmBackend` once a library is in use. A row's bits depend on it alone, however many rows there are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from radixkv.kernels.native.library import KINDS

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64

DTYPES = tuple(KINDS)  # of weights that are multiplied


class _Library(NamedTuple):
    """The GEMM functions of a compiled library, and the layout of weights that it reads."""

    multiply: Callable[[object], None]
    lay_out: Callable[..., None]
    panel_features: int
    word_numbers: Mapping[torch.dtype, int]


_library: _Library | None = None


class _Matmul(ctypes.Structure):
    """`Matmul` of gemm.cpp."""

    _fields_ = (
        *((name, _POINTER) for name in ("rows", "weight", "other_weight", "bias", "other_bias", "out")),
        *((name, _INT) for name in ("num_rows", "in_features", "out_features", "kind", "num_threads")),
    )


class Panels:
    """Weights, laid out for `multiply` as one.

    Args:
        weights: `[features, in_features]`, which the library in use `multiplies`; the first one's features come first.
    """

    def __init__(self, *weights: torch.Tensor) -> None:
        library = _in_use()
        self.out_features, (in_features, dtype) = sum(map(len, weights)), (weights[0].shape[1], weights[0].dtype)
        num_features, num_numbers = library.panel_features, library.word_numbers[dtype]
        num_panels, num_words = -(-self.out_features // num_features), in_features // num_numbers
        # [num_panels, num_words, features, numbers of a word]
        self.numbers = torch.empty(num_panels, num_words, num_features, num_numbers, dtype=dtype)
        start = 0
        for weight in map(torch.Tensor.contiguous, weights):
            library.lay_out(
                *(weight.data_ptr(), len(weight), num_words, num_numbers * dtype.itemsize, start),
                *(self.numbers.data_ptr(), torch.get_num_threads()),
            )
            start += len(weight)
        self.numbers[-1, :, num_features - num_panels * num_features + start :] = 0


def use(library: ctypes.CDLL) -> None:
    """Let a library compute linear layers.

    Args:
        library: of `load_library`.
    """
    global _library
    names = ("multiply", "lay_out", "panel_features", "word_numbers")
    multiply, lay_out, features, numbers = (getattr(library, f"radixkv_{name}") for name in names)
    multiply.argtypes, multiply.restype = (_POINTER,), None
    lay_out.argtypes, lay_out.restype = (_POINTER, *(_INT,) * 4, _POINTER, _INT), None
    features.argtypes, features.restype = (), _INT
    numbers.argtypes, numbers.restype = (_INT,), _INT
    _library = _Library(multiply, lay_out, features(), {dtype: numbers(kind) for dtype, kind in KINDS.items()})


def multiplies(weight: torch.Tensor) -> bool:
    """Whether a library is in use that computes a weight like this one."""
    if _library is None or weight.dtype not in _library.word_numbers:
        return False
    return weight.shape[1] % _library.word_numbers[weight.dtype] == 0


def _in_use() -> _Library:
    assert _library is not None, "a library is in use"
    return _library


def multiply(rows: torch.Tensor, weight: Panels, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the output, as `GemmBackend.multiply` does. Sums are float32 and rounded once, after the bias."""
    return _computed(rows, weight, bias, None, None)


def gate(
    rows: torch.Tensor, weight: Panels, bias: torch.Tensor | None, up: Panels, up_bias: torch.Tensor | None
) -> torch.Tensor:
    """Return SiLU of one output times another, rounded once."""
    return _computed(rows, weight, bias, up, up_bias)


def _computed(
    rows: torch.Tensor, weight: Panels, bias: torch.Tensor | None, up: Panels | None, up_bias: torch.Tensor | None
) -> torch.Tensor:
    num_rows, in_features = rows.shape
    out = rows.new_empty(num_rows, weight.out_features)
    tensors = (rows, weight.numbers, None if up is None else up.numbers, bias, up_bias, out)
    matmul = _Matmul(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        *(num_rows, in_features, weight.out_features, KINDS[rows.dtype], torch.get_num_threads()),
    )
    _in_use().multiply(ctypes.byref(matmul))
    return out
