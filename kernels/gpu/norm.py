"""Batch-invariant means and RMS norms of rows on a GPU.

In a library, the number of threads per row depends on the number of rows and on the alignment of the tensor. Here one
program sums a row, in an order that depends only on the number of columns:

    row          [ 0 .. 4095 | 4096 .. 8191 | .. )
    4096 sums    one per column of a block, over all blocks; then added up in a tree
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv.kernels.gpu.flat_rows import flat_rows
from radixkv.kernels.norm_style import TORCH, NormStyle

# Columns per iteration: 16 values per thread of 8 warps.
_MAX_BLOCK_COLUMNS = 4096
_COLUMNS_PER_WARP = 512


def row_mean(rows: torch.Tensor) -> torch.Tensor:
    """Compute `rows.mean(-1, keepdim=True)`.

    Sums are float32. The bits of a mean depend only on its row.

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


def rms_norm(rows: torch.Tensor, weight: torch.Tensor | None, eps: float, style: NormStyle = TORCH) -> torch.Tensor:
    """Compute `reference.rms_norm` in one launch.

    The bits of an output row depend only on the row, the weight, `eps` and `style`.

    Args:
        rows: `[..., num_columns]` in float32, bfloat16 or float16, with at least one column; any strides.
        weight: `[num_columns]` in float32, bfloat16 or float16, or None for ones.
        eps: added to the mean of the squares.
        style: how the weight is applied.

    Returns:
        A new contiguous tensor like `rows`.

    Raises:
        ValueError: `rows` has another dtype, no dimension or no columns, or `weight` has another shape or device.
    """
    flat = flat_rows(rows)  # [num_rows, num_columns]
    output = torch.empty_like(flat)
    _launch_norm(flat, None, weight, output, None, eps, style)
    return output.view(rows.shape)


def add_rms_norm(
    rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, style: NormStyle = TORCH
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `reference.add_rms_norm` in one launch: `rows + residual`, rounded to their dtype, and its `rms_norm`.

    Args:
        rows, weight, eps, style: see `rms_norm`.
        residual: like `rows`.

    Returns:
        The sums and their norm, new contiguous tensors like `rows`.

    Raises:
        ValueError: see `rms_norm`; also if `residual` has another shape, dtype or device.
    """
    if (residual.shape, residual.dtype, residual.device) != (rows.shape, rows.dtype, rows.device):
        raise ValueError(
            f"residual: expected {rows.dtype} {tuple(rows.shape)} on {rows.device}, "
            f"got {residual.dtype} {tuple(residual.shape)} on {residual.device}"
        )
    flat = flat_rows(rows)  # [num_rows, num_columns]
    sums, output = torch.empty_like(flat), torch.empty_like(flat)
    _launch_norm(flat, flat_rows(residual), weight, output, sums, eps, style)
    return sums.view(rows.shape), output.view(rows.shape)


def _launch_norm(
    flat: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    output: torch.Tensor,
    sums: torch.Tensor | None,
    eps: float,
    style: NormStyle,
) -> None:
    num_rows, num_columns = flat.shape
    if weight is not None:
        if (weight.shape, weight.device) != ((num_columns,), flat.device):
            raise ValueError(
                f"weight: expected shape {(num_columns,)} on {flat.device}, "
                f"got {tuple(weight.shape)} on {weight.device}"
            )
        weight = weight.contiguous()
    if num_rows:
        block = _block_columns(num_columns)
        _norm_row[(num_rows,)](
            flat,
            residual,
            weight,
            output,
            sums,
            eps,
            NUM_COLUMNS=num_columns,
            BLOCK_COLUMNS=block,
            WEIGHT_OFFSET=style.weight_offset,
            ROUNDS_FIRST=style.rounds_first,
            num_warps=_num_warps(block),
            enable_fp_fusion=True,
        )


def _block_columns(num_columns: int) -> int:
    return min(1 << (num_columns - 1).bit_length(), _MAX_BLOCK_COLUMNS)


def _num_warps(block_columns: int) -> int:
    return max(1, block_columns // _COLUMNS_PER_WARP)


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
def _norm_row(  # type: ignore[no-untyped-def]
    rows,
    residual,
    weight,
    output,
    sums,
    eps,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):
    """Normalize one row by its root mean square. The row is read twice."""
    offset = tl.program_id(0).to(tl.int64) * NUM_COLUMNS
    squares = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for start in tl.range(0, NUM_COLUMNS, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        is_column = columns < NUM_COLUMNS
        values = _load_values(rows, residual, offset + columns, is_column)
        if sums is not None:
            tl.store(sums + offset + columns, values.to(sums.dtype.element_ty), mask=is_column)
        squares += values * values
    factor = tl.rsqrt(tl.sum(squares, 0) / NUM_COLUMNS + eps)
    for start in tl.range(0, NUM_COLUMNS, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        is_column = columns < NUM_COLUMNS
        values = _load_values(rows, residual, offset + columns, is_column) * factor
        if ROUNDS_FIRST:
            values = values.to(output.dtype.element_ty).to(tl.float32)
        if weight is not None:
            weights = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
            if WEIGHT_OFFSET != 0:
                weights += WEIGHT_OFFSET
            values *= weights
        tl.store(output + offset + columns, values.to(output.dtype.element_ty), mask=is_column)


@triton.jit
def _load_values(rows, residual, offsets, is_column):  # type: ignore[no-untyped-def]
    """Load part of a row as float32. If there is a residual, it is added, and the sum is rounded to the row's dtype."""
    values = tl.load(rows + offsets, mask=is_column, other=0.0).to(tl.float32)
    if residual is not None:
        values += tl.load(residual + offsets, mask=is_column, other=0.0).to(tl.float32)
        values = values.to(rows.dtype.element_ty).to(tl.float32)
    return values
