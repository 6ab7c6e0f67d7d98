"""LoRA on a GPU: adds the low-rank updates of several adapters to the output of a layer, in one launch.

    rows of one adapter     [ 16 rows )
    down                    all features, from the first to the last      ─▶ [16, rank], rounded
    up                      512 columns, 64 at a time                     ─▶ added to the layer's output

Each program computes both matmuls for 16 rows and 512 columns. Programs for other columns of the same rows repeat the
first matmul. They read the weight from the L2 cache, which for few rows takes less time than a second launch would.
Tiles depend only on the weights, and features are added up in a fixed order, so the bits of a row do not depend on
other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from radixkv.kernels.cancelling_inputs import sensitive_linear
from radixkv.kernels.gpu.flat_rows import flat_rows
from radixkv.kernels.staging import to_device

# Rows per program: the minimum of a tensor core. The number is fixed, so that a row's bits do not depend on the step.
TILE_ROWS = 16


@dataclass(frozen=True, slots=True)
class LowRankStep:
    """Rows of a step by adapter, and the addresses of the adapters' weights. Built once per step, read by all layers.

        adapters    | 0 ................. | 1 ...... |
        order       | 4 5 6 ... 28 29 2 3 | 40 41 42 |    rows of the step, grouped by adapter
        tiles       | 16 rows | 12 rows   | 3 rows   |    each has rows of one adapter

    Attributes:
        order: int32 `[num_rows]`, rows of the step.
        tiles: int32 `[num_tiles, 3]`, the start and the end of each tile in `order`, and its adapter.
        addresses: int64 `[num_sites, num_adapters, 2]`, of `down` and `up`; 0 where an adapter adds nothing.
    """

    order: torch.Tensor
    tiles: torch.Tensor
    addresses: torch.Tensor

    @classmethod
    def build(
        cls,
        rows: Sequence[Sequence[tuple[int, int]]],
        addresses: npt.NDArray[np.int64],
        device: torch.device | str = "cpu",
    ) -> LowRankStep:
        """Build a step.

        >>> step = LowRankStep.build([[(4, 30), (2, 4)], [(40, 43)]], np.zeros((1, 2, 2), dtype=np.int64))
        >>> step.tiles.tolist()
        [[0, 16, 0], [16, 28, 0], [28, 31, 1]]
        >>> step.order[26:].tolist()
        [2, 3, 40, 41, 42]

        Args:
            rows: half-open ranges of rows of each adapter, no row twice.
            addresses: see the attributes; int64 on the host.
            device: device of the tensors.
        """
        order = [np.arange(start, end, dtype=np.int32) for ranges in rows for start, end in ranges]
        tiles, start = [], 0
        for adapter, ranges in enumerate(rows):
            end = start + sum(last - first for first, last in ranges)
            tiles += [(first, min(first + TILE_ROWS, end), adapter) for first in range(start, end, TILE_ROWS)]
            start = end
        tensors = (
            torch.from_numpy(np.concatenate(order)),
            torch.tensor(tiles, dtype=torch.int32),
            torch.from_numpy(addresses),
        )
        return cls(*(to_device(tensor, device) for tensor in tensors))


# Ranks that weights are padded to. Larger ranks would exceed shared memory.
RANKS = (16, 32, 64, 128)

_TILE_COLUMNS = 64
_COLUMNS_PER_PROGRAM = 512
_TRIED_ROWS = 50  # rows of a trial: three tiles and a part of one


def padded_rank(rank: int) -> int | None:
    """Return the rank that weights of a rank are padded to; None if it is too large.

    >>> padded_rank(3), padded_rank(16), padded_rank(17), padded_rank(129)
    (16, 16, 32, None)
    """
    return next((padded for padded in RANKS if padded >= rank), None)


def add_low_rank(rows: torch.Tensor, out: torch.Tensor, step: LowRankStep, site: int, rank: int) -> None:
    """Compute `reference.add_low_rank` for all adapters of a step, in place.

    Sums are float32, without TF32. The result of `down` is rounded; that of `up` is added to `out` before rounding.

    Args:
        rows: `[..., in_features]` in float32, bfloat16 or float16; any strides.
        out: contiguous `[..., out_features]` like `rows`.
        step: the rows of each adapter, and the addresses of its weights in the dtype of `rows`: `down`
            `[rank, in_features]` and `up` `[out_features, rank]`, contiguous, at multiples of 16 bytes.
        site: the index of the layer in `step.addresses`.
        rank: the padded rank of all weights, one of `RANKS`.

    Raises:
        ValueError: the shapes or dtypes do not fit.
    """
    flat = flat_rows(rows)
    if (out.shape[:-1], out.dtype, out.device) != (rows.shape[:-1], rows.dtype, rows.device):
        raise ValueError(
            f"out: expected shape {(*rows.shape[:-1], out.shape[-1])} in {rows.dtype} on {rows.device}, "
            f"got {tuple(out.shape)} in {out.dtype} on {out.device}"
        )
    if not out.is_contiguous() or rank not in RANKS:
        raise ValueError(f"out: expected contiguous rows, and a rank of {RANKS}, got strides {out.stride()}, {rank}")
    out_features, element_bytes = out.shape[-1], rows.element_size()
    _add_tile[(len(step.tiles), triton.cdiv(out_features, _COLUMNS_PER_PROGRAM))](
        flat,
        out,
        step.order,
        step.tiles,
        step.addresses,
        site,
        step.addresses.shape[1],
        IN_FEATURES=flat.shape[1],
        OUT_FEATURES=out_features,
        RANK=rank,
        TILE_ROWS=TILE_ROWS,
        TILE_FEATURES=256 // element_bytes if rank <= 64 else 128 // element_bytes,
        TILE_COLUMNS=_TILE_COLUMNS,
        COLUMNS_PER_PROGRAM=_COLUMNS_PER_PROGRAM,
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=True,  # triton's default changes with 3.10
    )


def low_rank_rows_agree(down: torch.Tensor, up: torch.Tensor) -> bool:
    """Return whether `add_low_rank` is batch-invariant on this GPU, for some row counts and positions.

    Args:
        down: `[rank, in_features]`; the rank is one of `RANKS`.
        up: `[out_features, rank]` in the dtype of `down`.
    """
    rank, device = down.shape[0], down.device
    rows, down, _ = sensitive_linear(down, None, _TRIED_ROWS)
    _, up, _ = sensitive_linear(up, None, 1)
    addresses = np.array([[[down.data_ptr(), up.data_ptr()]]], dtype=np.int64)

    def compute(count: int, ranges: list[tuple[int, int]]) -> torch.Tensor:
        out = rows.new_zeros(count, up.shape[0])
        add_low_rank(rows[:count], out, LowRankStep.build([ranges], addresses, device), 0, rank)
        return out

    whole = compute(_TRIED_ROWS, [(0, _TRIED_ROWS)])
    in_parts = compute(_TRIED_ROWS, [(20, _TRIED_ROWS), (0, 20)])
    return torch.equal(in_parts, whole) and all(torch.equal(compute(n, [(0, n)]), whole[:n]) for n in (1, 5, 17))


# Triton would compile other kernels for a single adapter and for the first layer.
@triton.jit(do_not_specialize=["site", "num_adapters"])  # type: ignore[untyped-decorator]
def _add_tile(  # type: ignore[no-untyped-def]
    rows,
    out,
    order,
    tiles,
    addresses,
    site,
    num_adapters,
    IN_FEATURES: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    RANK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_FEATURES: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    COLUMNS_PER_PROGRAM: tl.constexpr,
):
    """Compute some columns of a tile of rows of one adapter."""
    tile = tiles + tl.program_id(0) * 3
    address_pair = addresses + (site * num_adapters + tl.load(tile + 2)).to(tl.int64) * 2
    down_address = tl.load(address_pair)
    if down_address == 0:
        return
    dtype: tl.constexpr = rows.dtype.element_ty
    down = tl.multiple_of(down_address.to(tl.pointer_type(dtype)), 16)
    up = tl.multiple_of(tl.load(address_pair + 1).to(tl.pointer_type(dtype)), 16)
    order_indices = tl.load(tile) + tl.arange(0, TILE_ROWS)
    is_row = order_indices < tl.load(tile + 1)
    row = tl.load(order + order_indices, mask=is_row, other=0).to(tl.int64)
    ranks = tl.arange(0, RANK)

    inner = tl.zeros([TILE_ROWS, RANK], tl.float32)
    for feature in tl.range(0, IN_FEATURES, TILE_FEATURES):
        features = feature + tl.arange(0, TILE_FEATURES)
        is_feature = (features < IN_FEATURES)[None, :]
        r = tl.load(rows + row[:, None] * IN_FEATURES + features[None, :], mask=is_row[:, None] & is_feature, other=0.0)
        d = tl.load(down + ranks[:, None] * IN_FEATURES + features[None, :], mask=is_feature, other=0.0)
        inner = tl.dot(r, d.T, inner, input_precision="ieee")
    inner = inner.to(dtype)  # [TILE_ROWS, RANK]

    first = tl.program_id(1) * COLUMNS_PER_PROGRAM
    for column in tl.range(first, min(first + COLUMNS_PER_PROGRAM, OUT_FEATURES), TILE_COLUMNS):
        columns = column + tl.arange(0, TILE_COLUMNS)
        is_column = columns < OUT_FEATURES
        u = tl.load(up + columns[:, None] * RANK + ranks[None, :], mask=is_column[:, None], other=0.0)
        pointers = out + row[:, None] * OUT_FEATURES + columns[None, :]
        is_output = is_row[:, None] & is_column[None, :]
        layer_output = tl.load(pointers, mask=is_output, other=0.0).to(tl.float32)
        update = tl.dot(inner, u.T, input_precision="ieee")
        tl.store(pointers, (layer_output + update).to(dtype), mask=is_output)
