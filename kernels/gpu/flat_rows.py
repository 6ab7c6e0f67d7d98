"""Reshapes rows into a contiguous matrix whose address is a multiple of 16 bytes, copying them if necessary.

Triton specializes a kernel on whether a pointer is a multiple of 16 bytes. A kernel for unaligned pointers may load
different vectors and add up in a different order, so its results may have different bits. A view may be unaligned: if
a row has 6 bytes, `rows[3:]` begins at byte 18 of the allocation. Such a view is copied into a new, aligned allocation.
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
        `[num_rows, num_columns]`, contiguous: a view of `rows` if they are contiguous and aligned, else a copy.

    Raises:
        ValueError: another dtype, no dimension, or no columns.
    """
    if rows.dtype not in DTYPES:
        raise ValueError(f"rows: expected float32, bfloat16 or float16, got {rows.dtype}")
    if rows.dim() == 0 or rows.shape[-1] == 0:
        raise ValueError(f"rows: expected [..., num_columns] with at least one column, got shape {tuple(rows.shape)}")
    flat = rows.reshape(-1, rows.shape[-1]).contiguous()
    return flat if flat.data_ptr() % _ALIGNMENT_BYTES == 0 else flat.clone()
