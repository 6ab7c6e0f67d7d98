"""Computes the gate of an MLP on a GPU in one kernel. Each program computes a piece of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv.kernels.gpu.flat_rows import flat_rows

# Columns of a program: 8 values a thread of 4 warps.
_MAX_BLOCK_COLUMNS = 1024
_COLUMNS_A_WARP = 256


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute `reference.swiglu`, that is `silu(gate) * up`, in one launch.

    Args:
        gate: `[..., num_columns]` in float32, bfloat16 or float16, with at least one column; any strides.
        up: like `gate`.

    Returns:
        A new contiguous tensor like `gate`.

    Raises:
        ValueError: `gate` has another dtype, no dimension, or no columns, or `up` another shape, dtype or device.
    """
    if (up.shape, up.dtype, up.device) != (gate.shape, gate.dtype, gate.device):
        raise ValueError(
            f"up: expected {gate.dtype} {tuple(gate.shape)} on {gate.device}, "
            f"got {up.dtype} {tuple(up.shape)} on {up.device}"
        )
    flat_gate, flat_up = flat_rows(gate), flat_rows(up)  # [num_rows, num_columns]
    num_rows, num_columns = flat_gate.shape
    output = torch.empty_like(flat_gate)
    if num_rows:
        block = min(1 << (num_columns - 1).bit_length(), _MAX_BLOCK_COLUMNS)
        _gate_piece[(num_rows, triton.cdiv(num_columns, block))](
            flat_gate,
            flat_up,
            output,
            NUM_COLUMNS=num_columns,
            BLOCK_COLUMNS=block,
            num_warps=max(1, block // _COLUMNS_A_WARP),
            enable_fp_fusion=True,
        )
    return output.view(gate.shape)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_piece(gate, up, output, NUM_COLUMNS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gate a piece of one row."""
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    offsets = tl.program_id(0).to(tl.int64) * NUM_COLUMNS + columns
    is_column = columns < NUM_COLUMNS
    values = tl.load(gate + offsets, mask=is_column, other=0.0).to(tl.float32)
    gates = (values / (1 + tl.exp(-values))).to(output.dtype.element_ty).to(tl.float32)
    values = gates * tl.load(up + offsets, mask=is_column, other=0.0).to(tl.float32)
    tl.store(output + offsets, values.to(output.dtype.element_ty), mask=is_column)
