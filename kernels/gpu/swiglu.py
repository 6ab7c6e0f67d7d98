"""Computes the SwiGLU activation of an MLP on a GPU in one kernel. Each program computes part of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv.kernels.gpu.flat_rows import DTYPES

# Columns per program: 8 values per thread of 4 warps.
_MAX_BLOCK_COLUMNS = 1024
_COLUMNS_PER_WARP = 256


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute `reference.swiglu`, that is `silu(gate) * up`, in one launch.

    Args:
        gate: `[..., num_columns]` in float32, bfloat16 or float16, with at least one column. The halves of the output
            of a merged linear layer are read in place; tensors with other strides may be copied.
        up: like `gate`.

    Returns:
        A new contiguous tensor like `gate`.

    Raises:
        ValueError: `gate` has another dtype, no dimension or no columns, or `up` has another shape, dtype or device.
    """
    if (up.shape, up.dtype, up.device) != (gate.shape, gate.dtype, gate.device):
        raise ValueError(
            f"up: expected {gate.dtype} {tuple(gate.shape)} on {gate.device}, "
            f"got {up.dtype} {tuple(up.shape)} on {up.device}"
        )
    if gate.dtype not in DTYPES:
        raise ValueError(f"gate: expected float32, bfloat16 or float16, got {gate.dtype}")
    if gate.dim() == 0 or gate.shape[-1] == 0:
        raise ValueError(f"gate: expected [..., num_columns] with at least one column, got shape {tuple(gate.shape)}")
    flat_gate, gate_stride = _as_matrix(gate)
    flat_up, up_stride = _as_matrix(up)
    num_rows, num_columns = flat_gate.shape
    output = flat_gate.new_empty(num_rows, num_columns)
    if num_rows:
        block = min(1 << (num_columns - 1).bit_length(), _MAX_BLOCK_COLUMNS)
        _gate_piece[(num_rows, triton.cdiv(num_columns, block))](
            flat_gate,
            flat_up,
            output,
            GATE_STRIDE=gate_stride,
            UP_STRIDE=up_stride,
            NUM_COLUMNS=num_columns,
            BLOCK_COLUMNS=block,
            num_warps=max(1, block // _COLUMNS_PER_WARP),
            enable_fp_fusion=True,
        )
    return output.view(gate.shape)


def _as_matrix(rows: torch.Tensor) -> tuple[torch.Tensor, int]:
    """View rows as `[num_rows, num_columns]` with contiguous columns. Returns them and the stride of their rows."""
    num_columns = rows.shape[-1]
    flat = rows.reshape(-1, num_columns)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    if len(flat) > 1:
        return flat, flat.stride(0)
    # The stride of a single row is arbitrary. With the stride of several rows, no second kernel is compiled.
    return flat, rows.stride(-2) if rows.dim() > 1 else num_columns


@triton.jit  # type: ignore[untyped-decorator]
def _gate_piece(  # type: ignore[no-untyped-def]
    gate,
    up,
    output,
    GATE_STRIDE: tl.constexpr,
    UP_STRIDE: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Compute part of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_column = columns < NUM_COLUMNS
    values = tl.load(gate + row * GATE_STRIDE + columns, mask=is_column, other=0.0).to(tl.float32)
    gates = (values / (1 + tl.exp(-values))).to(output.dtype.element_ty).to(tl.float32)
    values = gates * tl.load(up + row * UP_STRIDE + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(output + row * NUM_COLUMNS + columns, values.to(output.dtype.element_ty), mask=is_column)
