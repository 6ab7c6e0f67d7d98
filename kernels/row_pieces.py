"""Computes functions of single numbers so that a result's bits do not depend on its place in the tensor.

Torch computes most of a tensor in vectors and the rest one by one, with another exponential, and splits large tensors
among threads. Here each row is padded to whole vectors, and a call has no more rows than one thread computes:

    [num_rows, 100]      rows of 128, 256 of them a call
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

VECTOR_ELEMENTS = 64  # two vectors of 64 bytes at once, of the smallest dtype
ELEMENTS_A_CALL = 32_768  # at::internal::GRAIN_SIZE: more are shared out to threads


def in_row_pieces(function: Callable[..., torch.Tensor], rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute `function(rows, *args, **kwargs)`, element by element.

    Args:
        function: a function of each number by itself.
        rows: `[..., num_columns]`, at least one dimension.
        args, kwargs: further arguments of `function`.

    Returns:
        A new tensor shaped like `rows`.
    """
    num_columns = rows.shape[-1]
    flat = rows.reshape(-1, num_columns).contiguous()  # [num_rows, num_columns]
    padding = -num_columns % VECTOR_ELEMENTS
    if padding:
        flat = pad(flat, (0, padding))
    rows_a_call = max(1, ELEMENTS_A_CALL // flat.shape[1])
    pieces = [function(piece, *args, **kwargs) for piece in torch.split(flat, rows_a_call)]
    result = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return result[:, :num_columns].reshape(rows.shape)
