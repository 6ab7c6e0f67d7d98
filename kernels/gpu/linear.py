"""Batch-invariant linear layers on a GPU: the bits of a row do not depend on the other rows of the batch.

A GEMM library chooses its tiles, and with them the order of summation, by the number of rows. Here every tile of the
output adds up the input features from first to last, in steps of the same size, with one accumulator per number:

                 features ->           columns ->
    rows         [ 0 | 1 | 2 | .. )    [ tile | tile | .. )     tile = 0 + rows[0] @ weight[0] + rows[1] @ weight[1] ...

The tile size depends on the weight. If there are enough rows to fill the GPU with larger tiles, which read less from
the L2 cache, they may be used: the order of summation is the same by construction, and a trial compares the bits.

The kernel is persistent: each multiprocessor runs one program, and the tiles are distributed over the programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from radixkv.kernels.cancelling_inputs import sensitive_linear
from radixkv.kernels.gpu.flat_rows import flat_rows

# Consecutive tiles stay within 8 tiles of rows (1024 rows). What 132 programs read at one time, 8 tiles of rows and 17
# of columns, is then a few MiB, which fit into the L2 cache of 50 MiB.
_GROUP_TILES = 8

_TMA_ALIGNMENT_BYTES = 16  # of addresses and strides

_TRIED_ROWS = 300  # three tiles of 128 rows, the last one partly empty


def linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, has_large_tiles: bool = False
) -> torch.Tensor:
    """Compute `torch.nn.functional.linear` in one launch.

    Sums are float32, without TF32, and the bias is added before rounding. The bits of an output row depend only on the
    row, the weight and the bias.

    Args:
        rows: `[..., in_features]` in float32, bfloat16 or float16; any strides. Copied unless they are contiguous and
            start at a multiple of 16 bytes.
        weight: `[out_features, in_features]` like `rows`; any strides.
        bias: `[out_features]` like `rows`, or None.
        has_large_tiles: whether larger tiles may be used for many rows; see `try_tiles`.

    Returns:
        A new contiguous tensor `[..., out_features]` like `rows`; empty if there are no rows.

    Raises:
        ValueError: `rows` has another dtype or no features, or the shape, dtype or device of `weight` or `bias` does
            not fit.
    """
    flat = flat_rows(rows)  # [num_rows, in_features]
    num_rows, in_features = flat.shape
    _require_like("weight", weight, rows, (*weight.shape[:1], in_features))
    out_features = weight.shape[0]
    if bias is not None:
        _require_like("bias", bias, rows, (out_features,))
        bias = bias.contiguous()
    output = flat.new_empty(num_rows, out_features)
    if output.numel():
        layout = layout_of(weight)
        shape = tile_shape(out_features, weight.dtype, layout)
        if has_large_tiles and _fills_device(num_rows, out_features, weight.device):
            shape = LARGE_TILE
        _launch(flat, weight, bias, output, layout, shape)
    return output.view(*rows.shape[:-1], out_features)


Tiles = Literal["both sizes", "one size"] | None


def try_tiles(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Tiles:
    """Check which tiles are batch-invariant on this GPU, for any row count and position.

    `linear` fixes the order of summation. The trial checks that compiler and hardware preserve it, with inputs that are
    sensitive to cancellation.

    Args:
        weight: `[out_features, in_features]`, with the dtype, device and strides that are used later.
        bias: `[out_features]`, or None.

    Returns:
        `both sizes` if `linear` may use large tiles for many rows, `one size` if it must not, and None if rows depend
        on the batch even without large tiles.
    """
    rows, weight, bias = sensitive_linear(weight, bias, _TRIED_ROWS)
    whole = linear(rows, weight, bias)
    order = torch.randperm(_TRIED_ROWS, generator=torch.Generator().manual_seed(0)).to(weight.device)
    selections = (order, order[:1], order[:17], torch.arange(1, _TRIED_ROWS, device=weight.device))
    if not all(torch.equal(linear(rows[selected], weight, bias), whole[selected]) for selected in selections):
        return None
    layout = layout_of(weight)
    if not layout or tile_shape(weight.shape[0], weight.dtype, layout) == LARGE_TILE:
        return "one size"
    large = torch.empty_like(whole)
    _launch(flat_rows(rows), weight, None if bias is None else bias.contiguous(), large, layout, LARGE_TILE)
    return "both sizes" if torch.equal(large, whole) else "one size"


def _fills_device(num_rows: int, out_features: int, device: torch.device) -> bool:
    """Return whether there are at least as many large tiles as multiprocessors."""
    num_tiles = triton.cdiv(num_rows, LARGE_TILE.rows) * triton.cdiv(out_features, LARGE_TILE.columns)
    return bool(num_tiles >= _num_multiprocessors(device))


def _require_like(name: str, tensor: torch.Tensor, rows: torch.Tensor, shape: tuple[int, ...]) -> None:
    if (tensor.shape, tensor.dtype, tensor.device) != (shape, rows.dtype, rows.device):
        raise ValueError(
            f"{name}: expected shape {shape} in {rows.dtype} on {rows.device}, "
            f"got {tuple(tensor.shape)} in {tensor.dtype} on {tensor.device}"
        )


Layout = Literal["in", "out"] | None


def layout_of(weight: torch.Tensor) -> Layout:
    """Choose how tiles of the weight and of the rows are loaded, by the weight.

    Args:
        weight: `[out_features, in_features]`.

    Returns:
        The contiguous dimension of a weight that the GPU's tensor memory accelerator (TMA) can read: `out` for
        transposed views such as GPT-2's. None if tiles are loaded through pointers.
    """
    alignment = _TMA_ALIGNMENT_BYTES // weight.element_size()  # in elements
    # float32 matmuls pass through registers, and spilled when TMA loaded the tiles.
    if weight.dtype == torch.float32 or weight.shape[1] % alignment or weight.data_ptr() % _TMA_ALIGNMENT_BYTES:
        return None
    out_stride, in_stride = weight.stride()
    if in_stride == 1 and out_stride >= weight.shape[1] and out_stride % alignment == 0:
        return "in"
    if out_stride == 1 and in_stride >= weight.shape[0] and in_stride % alignment == 0:
        return "out"
    return None


@dataclass(frozen=True, slots=True)
class TileShape:
    """The part of a matmul that a program computes at a time.

    Attributes:
        rows, columns: rows and columns of the result.
        features: input features per step of the sum.
        num_warps: 4 or 8. A warp group of four warps shares the tensor cores.
        num_stages: tiles of rows and of the weight in shared memory; all but one of them are being loaded.
    """

    rows: int
    columns: int
    features: int
    num_warps: int
    num_stages: int


# Per byte that is loaded, this tile computes 2 times as much as one of 128 x 64. It compiles for sm_90 without spills.
LARGE_TILE = TileShape(rows=128, columns=256, features=64, num_warps=8, num_stages=4)


def tile_shape(out_features: int, dtype: torch.dtype, layout: Layout) -> TileShape:
    """Choose the tile by the weight, for any number of rows.

    Wide tiles read less per multiplication. But a short suffix is a single tile of rows, so only the tiles of columns
    distribute the reading of the weight over the GPU. With 3.0 TB/s and a latency of one microsecond (both estimated),
    an H100 needs 3.0 MB in flight.

    | loads | out_features | tile | weight in flight, KiB per tile x tiles |
    |---|---|---|---|
    | TMA | from 16384 | 128 x 256 x 64 | 96 x 64 and more: the whole bandwidth |
    | TMA | from 8192 | 128 x 128 x 64 | 80 x 64 to 127 |
    | TMA | from 2048 | 128 x 64 x 64 | 56 x 32 to 127 |
    | TMA | below | 128 x 32 x 64 | 28 x 1 to 63 |
    | pointers | from 2048 | 128 x 128 x 64 | |
    | pointers | below | 128 x 64 x 64 | |
    | pointers, float32 | all | 64 x 64 x 32 | |

    With TMA, the stages and the result fill the 227 KiB of shared memory of a multiprocessor. With pointers, addresses
    take registers: 256 columns with an odd number of features took 244 of 255. Without tensor cores, matmuls pass
    through registers; 64 x 64 computes 9 multiplications per access to shared memory. `test_compile_sm90` checks that
    none of them spills.
    """
    if dtype == torch.float32:
        return TileShape(rows=64, columns=64, features=32, num_warps=4, num_stages=4)
    if not layout:
        columns = 64 if out_features < 2048 else 128
        return TileShape(rows=128, columns=columns, features=64, num_warps=8, num_stages=3)
    if out_features < 8192:
        return TileShape(rows=128, columns=32 if out_features < 2048 else 64, features=64, num_warps=4, num_stages=8)
    if out_features < 16384:
        return TileShape(rows=128, columns=128, features=64, num_warps=8, num_stages=6)
    return LARGE_TILE


def _num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 without a GPU, where programs run one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _launch(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    layout: Layout,
    shape: TileShape,
) -> None:
    row_source: Any = rows
    weight_source: Any = weight
    if layout:
        row_source = TensorDescriptor.from_tensor(rows, [shape.rows, shape.features])
        if layout == "in":
            weight_source = TensorDescriptor.from_tensor(weight, [shape.columns, shape.features])
        else:
            weight_source = TensorDescriptor.from_tensor(weight.t(), [shape.features, shape.columns])
    num_rows, out_features = output.shape
    num_tiles = triton.cdiv(num_rows, shape.rows) * triton.cdiv(out_features, shape.columns)
    _multiply_tiles[(min(_num_multiprocessors(rows.device), num_tiles),)](
        row_source,
        weight_source,
        bias,
        output,
        num_rows,
        IN_FEATURES=rows.shape[1],
        OUT_FEATURES=out_features,
        OUT_STRIDE=weight.stride(0),
        IN_STRIDE=weight.stride(1),
        LAYOUT=layout,
        TILE_ROWS=shape.rows,
        TILE_COLUMNS=shape.columns,
        TILE_FEATURES=shape.features,
        GROUP_TILES=_GROUP_TILES,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        enable_fp_fusion=True,  # triton's default changes with 3.10
    )


# Triton would compile one kernel for a single row and one for multiples of 16, and their bits might differ.
@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _multiply_tiles(  # type: ignore[no-untyped-def]
    rows,
    weight,
    bias,
    output,
    num_rows,
    IN_FEATURES: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    IN_STRIDE: tl.constexpr,
    LAYOUT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_FEATURES: tl.constexpr,
    GROUP_TILES: tl.constexpr,
):
    """Compute every n-th tile of the result, from the program's own index on, where n is the number of programs."""
    num_row_tiles = tl.cdiv(num_rows, TILE_ROWS)
    num_tiles = num_row_tiles * tl.cdiv(OUT_FEATURES, TILE_COLUMNS)
    # With `flatten`, the first loads of a tile overlap with the stores of the previous tile.
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        row, column = _tile_position(tile, num_row_tiles, OUT_FEATURES, TILE_ROWS, TILE_COLUMNS, GROUP_TILES)
        acc = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
        for feature in tl.range(0, IN_FEATURES, TILE_FEATURES):
            if LAYOUT is None:
                features = feature + tl.arange(0, TILE_FEATURES)
                r = _load_tile(rows, row, features, num_rows, IN_FEATURES, IN_FEATURES, 1, TILE_ROWS)
                w = _load_tile(
                    weight, column, features, OUT_FEATURES, IN_FEATURES, OUT_STRIDE, IN_STRIDE, TILE_COLUMNS
                ).T
            else:  # TMA fills the part past the end with 0
                r = rows.load([row, feature])
                w = weight.load([column, feature]).T if LAYOUT == "in" else weight.load([feature, column])
            acc = tl.dot(r, w, acc, input_precision="ieee")  # [TILE_ROWS, TILE_COLUMNS]

        # Computed again, because keeping it during the inner loop would take registers.
        row, column = _tile_position(tile, num_row_tiles, OUT_FEATURES, TILE_ROWS, TILE_COLUMNS, GROUP_TILES)
        out_rows = row + tl.arange(0, TILE_ROWS)
        columns = column + tl.arange(0, TILE_COLUMNS)
        is_column = columns < OUT_FEATURES
        if bias is not None:
            acc += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        pointers = output + out_rows.to(tl.int64)[:, None] * OUT_FEATURES + columns[None, :]
        tl.store(pointers, acc.to(output.dtype.element_ty), mask=(out_rows < num_rows)[:, None] & is_column[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _tile_position(  # type: ignore[no-untyped-def]
    tile,
    num_row_tiles,
    OUT_FEATURES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    GROUP_TILES: tl.constexpr,
):
    """Return the first row and column of a tile. Tiles are ordered by groups of rows, then columns, then rows."""
    tiles_per_group = GROUP_TILES * tl.cdiv(OUT_FEATURES, TILE_COLUMNS)
    first_row_tile = tile // tiles_per_group * GROUP_TILES
    num_in_group = tl.minimum(num_row_tiles - first_row_tile, GROUP_TILES)
    index_in_group = tile % tiles_per_group
    row_tile = first_row_tile + index_in_group % num_in_group
    return row_tile * TILE_ROWS, index_in_group // num_in_group * TILE_COLUMNS


@triton.jit  # type: ignore[untyped-decorator]
def _load_tile(  # type: ignore[no-untyped-def]
    matrix,
    first_row,
    features,
    num_rows,
    IN_FEATURES: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    FEATURE_STRIDE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Load some features of some rows of a matrix, `[TILE_ROWS, TILE_FEATURES]`; 0 past the end of the matrix.

    The rows of the weight are output features.
    """
    rows = first_row + tl.arange(0, TILE_ROWS)
    pointers = matrix + rows.to(tl.int64)[:, None] * ROW_STRIDE + features.to(tl.int64)[None, :] * FEATURE_STRIDE
    return tl.load(pointers, mask=(rows < num_rows)[:, None] & (features < IN_FEATURES)[None, :], other=0.0)
