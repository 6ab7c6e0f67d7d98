"""Computes elementwise functions so that the bits of a result do not depend on its position in the tensor.

Torch computes most of a tensor in vectors and the remaining elements one by one, with another implementation of the
exponential, and it splits large tensors among threads. Here each row is padded to whole vectors, and no row of up to
32,768 numbers is split among threads: either all threads of a call get the same number of rows, or one thread computes
all of them:

    [601, 100], 2 threads      rows padded to 128: a call of 600, 300 for each thread, and a call of 1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

VECTOR_ELEMENTS = 64  # torch computes two vectors of 64 bytes at once; the smallest dtype has 2 bytes
ELEMENTS_PER_CALL = 32_768  # at::internal::GRAIN_SIZE: torch splits larger tensors among threads


def in_row_pieces(function: Callable[..., torch.Tensor], rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute `function(rows, *args, **kwargs)`, element by element.

    Args:
        function: an elementwise function.
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
    pieces = [function(piece, *args, **kwargs) for piece in torch.split(flat, _rows_of_calls(*flat.shape))]
    result = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return result[:, :num_columns].reshape(rows.shape)


def _rows_of_calls(num_rows: int, num_columns: int) -> list[int]:
    """Return the number of rows of each call: one call for all threads, then calls for one thread each."""
    num_threads = torch.get_num_threads()
    num_shared_rows = num_rows - num_rows % num_threads
    if num_threads > 1 and num_shared_rows * num_columns < num_threads * ELEMENTS_PER_CALL:
        num_shared_rows = 0  # torch would use fewer threads, and might split a row
    calls = [num_shared_rows] if num_shared_rows else []
    rows_per_call = max(1, ELEMENTS_PER_CALL // num_columns)
    num_full_calls, num_last_rows = divmod(num_rows - num_shared_rows, rows_per_call)
    calls += [rows_per_call] * num_full_calls
    if num_last_rows or not num_rows:  # without rows, there is a call with an empty tensor
        calls.append(num_last_rows)
    return calls
