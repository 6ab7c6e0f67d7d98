"""Calls the products of `products.cpp`: rows with a weight that was laid out once.

They are a `LinearPacking` once a library is in use. A row's bits depend on it alone, however many rows there are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch.nn.functional import pad

from radixkv.kernels.native.library import KINDS

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64

_FEATURES = 32  # of a panel

# Numbers in a word, by the dtypes of weights that are multiplied.
WORD_NUMBERS = {torch.float32: 1, torch.bfloat16: 2}

_multiply: Callable[[object], None] | None = None


class _Product(ctypes.Structure):
    """`Product` of products.cpp."""

    _fields_ = (
        *((name, _POINTER) for name in ("rows", "weight", "other_weight", "bias", "other_bias", "out")),
        *((name, _INT) for name in ("num_rows", "in_features", "out_features", "kind", "num_threads")),
    )


class Panels:
    """A weight, laid out for `multiply`.

    Args:
        weight: `[out_features, in_features]` of float32, or of bfloat16 with an even number of `in_features`.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.out_features, in_features = weight.shape
        num_numbers = WORD_NUMBERS[weight.dtype]
        missing = -self.out_features % _FEATURES
        filled = pad(weight, (0, 0, 0, missing)) if missing else weight  # `pad` copies, also to add nothing
        words = filled.reshape(-1, _FEATURES, in_features // num_numbers, num_numbers)
        self.numbers = words.transpose(1, 2).contiguous()  # [num_panels, num_words, 32, 1 or 2]


def use(library: ctypes.CDLL) -> None:
    """Let products be computed by a library.

    Args:
        library: of `load_library`.
    """
    global _multiply
    function = library.radixkv_multiply
    function.argtypes, function.restype = (_POINTER,), None
    _multiply = function


def multiplies(weight: torch.Tensor) -> bool:
    """Whether a library is in use that computes products with a weight like this one."""
    dtype = weight.dtype
    if _multiply is None or dtype not in WORD_NUMBERS or weight.shape[1] % WORD_NUMBERS[dtype]:
        return False
    return dtype == torch.float32 or torch.cpu._is_avx512_bf16_supported()


def multiply(rows: torch.Tensor, weight: Panels, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the product, as `LinearPacking.multiply` does. Sums are float32 and rounded once, after the bias."""
    return _computed(rows, weight, bias, None, None)


def gate(
    rows: torch.Tensor, weight: Panels, bias: torch.Tensor | None, up: Panels, up_bias: torch.Tensor | None
) -> torch.Tensor:
    """Return SiLU of one product times another, rounded once."""
    return _computed(rows, weight, bias, up, up_bias)


def _computed(
    rows: torch.Tensor, weight: Panels, bias: torch.Tensor | None, up: Panels | None, up_bias: torch.Tensor | None
) -> torch.Tensor:
    assert _multiply is not None, "a library is in use"
    num_rows, in_features = rows.shape
    out = rows.new_empty(num_rows, weight.out_features)
    tensors = (rows, weight.numbers, None if up is None else up.numbers, bias, up_bias, out)
    product = _Product(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        *(num_rows, in_features, weight.out_features, KINDS[rows.dtype], torch.get_num_threads()),
    )
    _multiply(ctypes.byref(product))
    return out
