"""Means of rows and what norms make of them, on a GPU, each row by itself.

A library shares a row out to more threads when there are few rows, and to others when a view starts elsewhere. Here one
program sums a row, in an order that the number of columns decides:

    row          [ 0 .. 4095 | 4096 .. 8191 | .. )
    4096 sums    + column by column, then added up in a tree
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv.kernels.flat_rows import flat_rows

# Columns at a time: 16 values a thread of 8 warps.
_MAX_BLOCK_COLUMNS = 4096
_COLUMNS_A_WARP = 512


def row_mean(rows: torch.Tensor) -> torch.Tensor:
    """Compute `rows.mean(-1, keepdim=True)`, each row by itself.

    Sums are float32. A mean's bits depend on its row alone.

    Args:
        rows: `[..., num_columns]` in float32, bfloat16 or float16, with at least one column; any strides.

    Returns:
        A new contiguous tensor `[..., 1]` like `rows`.

    Raises:
        ValueError: another dtype, no dimension, or no columns.
    """
    flat = flat_rows(rows)  # [num_rows, num_columns]
    num_rows, num_columns = flat.shape
    means = flat.new_empty(num_rows)
    if num_rows:
        block = _block_columns(num_columns)
        _mean_row[(num_rows,)](
            flat,
            means,
            NUM_COLUMNS=num_columns,
            BLOCK_COLUMNS=block,
            num_warps=_num_warps(block),
            enable_fp_fusion=True,  # triton's default changes with 3.10
        )
    return means.view(*rows.shape[:-1], 1)


def rms_norm(rows: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Compute `torch.nn.functional.rms_norm(rows, rows.shape[-1:], weight, eps)`, each row by itself.

    Everything is float32 until the result is rounded. A row's bits depend on the row, the weight and `eps` alone.

    Args:
        rows: `[..., num_columns]` in float32, bfloat16 or float16, with at least one column; any strides.
        weight: `[num_columns]` in float32, bfloat16 or float16, or None for ones.
        eps: added to the mean of the squares.

    Returns:
        A new contiguous tensor like `rows`.

    Raises:
        ValueError: `rows` has another dtype, no dimension, or no columns, or `weight` another shape or device.
    """
    flat = flat_rows(rows)  # [num_rows, num_columns]
    num_rows, num_columns = flat.shape
    if weight is not None:
        if (weight.shape, weight.device) != ((num_columns,), rows.device):
            raise ValueError(
                f"weight: expected shape {(num_columns,)} on {rows.device}, "
                f"got {tuple(weight.shape)} on {weight.device}"
            )
        weight = weight.contiguous()
    output = torch.empty_like(flat)
    if num_rows:
        block = _block_columns(num_columns)
        _norm_row[(num_rows,)](
            flat,
            weight,
            output,
            eps,
            NUM_COLUMNS=num_columns,
            BLOCK_COLUMNS=block,
            num_warps=_num_warps(block),
            enable_fp_fusion=True,
        )
    return output.view(rows.shape)


def _block_columns(num_columns: int) -> int:
    return min(1 << (num_columns - 1).bit_length(), _MAX_BLOCK_COLUMNS)


def _num_warps(block_columns: int) -> int:
    return max(1, block_columns // _COLUMNS_A_WARP)


@triton.jit  # type: ignore[untyped-decorator]
def _mean_row(rows, means, NUM_COLUMNS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the mean of one row."""
    index = tl.program_id(0).to(tl.int64)
    row = rows + index * NUM_COLUMNS
    sums = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for start in tl.range(0, NUM_COLUMNS, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        sums += tl.load(row + columns, mask=columns < NUM_COLUMNS, other=0.0).to(tl.float32)
    mean = tl.sum(sums, 0) / NUM_COLUMNS
    tl.store(means + index, mean.to(means.dtype.element_ty))


@triton.jit(do_not_specialize=["eps"])  # type: ignore[untyped-decorator]
def _norm_row(rows, weight, output, eps, NUM_COLUMNS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Divide one row by the root of the mean of its squares; the row is read again where it is longer than a block."""
    offset = tl.program_id(0).to(tl.int64) * NUM_COLUMNS
    squares = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for start in tl.range(0, NUM_COLUMNS, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        values = tl.load(rows + offset + columns, mask=columns < NUM_COLUMNS, other=0.0).to(tl.float32)
        squares += values * values
    factor = tl.rsqrt(tl.sum(squares, 0) / NUM_COLUMNS + eps)
    for start in tl.range(0, NUM_COLUMNS, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        is_column = columns < NUM_COLUMNS
        values = tl.load(rows + offset + columns, mask=is_column, other=0.0).to(tl.float32) * factor
        if weight is not None:
            values *= tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
        tl.store(output + offset + columns, values.to(output.dtype.element_ty), mask=is_column)
