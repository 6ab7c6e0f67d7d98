"""Lays rows out as a contiguous, aligned matrix, whatever view they come as.

Triton compiles another kernel for a pointer that is not a multiple of 16 bytes, with other vectors of loads and so,
perhaps, another order of sums. A view such as `rows[3:]` may start at one, and is copied:

    rows[3:]     16 |  | 32      a row of 6 bytes: the view starts at byte 18
    flat_rows    16 |            a copy starts where an allocation does
"""

from __future__ import annotations

import torch

_ALIGNMENT_BYTES = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def flat_rows(rows: torch.Tensor) -> torch.Tensor:
    """Reshape rows into a contiguous matrix that starts at a multiple of 16 bytes.

    >>> flat_rows(torch.zeros(2, 3, 5)).shape
    torch.Size([6, 5])

    Args:
        rows: `[..., num_columns]` in float32, bfloat16 or float16, with at least one column.

    Returns:
        `[num_rows, num_columns]`, contiguous: a view of `rows` if that is laid out so, else a copy.

    Raises:
        ValueError: another dtype, no dimension, or no columns.
    """
    if rows.dtype not in DTYPES:
        raise ValueError(f"rows: expected float32, bfloat16 or float16, got {rows.dtype}")
    if rows.dim() == 0 or rows.shape[-1] == 0:
        raise ValueError(f"rows: expected [..., num_columns] with at least one column, got shape {tuple(rows.shape)}")
    flat = rows.reshape(-1, rows.shape[-1]).contiguous()
    return flat if flat.data_ptr() % _ALIGNMENT_BYTES == 0 else flat.clone()
