"""Computes matrix products whose rows have the same bits, whatever their number. For CPUs.

A library adds up each row of a product in an order that depends on the number of rows. Here products are made of tiles
of a few sizes only, all of sizes whose rows were seen to agree:

    37 rows      [-------- 32 --------)[-- 16: 5 and zeros --)
"""

from __future__ import annotations

import torch

from radixkv.kernels.sum_order import cancelling_product

SIZES = (512, 256, 128, 64, 32, 16)  # the last one pads; 16 rows cost two thirds of 32 (float32, 896 x 896)


def tiled_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sizes: tuple[int, ...]
) -> torch.Tensor:
    """Compute `torch.nn.functional.linear` in tiles of rows.

    Args:
        rows: `[..., in_features]`.
        weight: `[out_features, in_features]`; any strides.
        bias: `[out_features]`, or None.
        sizes: rows of a tile, in descending order, each a multiple of the last.

    Returns:
        A new tensor `[..., out_features]`.
    """
    flat = rows.reshape(-1, rows.shape[-1])  # [num_rows, in_features]
    num_rows = flat.shape[0]
    padding = -num_rows % sizes[-1]
    if padding:
        flat = torch.cat((flat, flat.new_zeros(padding, flat.shape[1])))
    output = flat.new_empty(flat.shape[0], weight.shape[0])
    start = 0
    for size in sizes:
        while flat.shape[0] - start >= size:
            tile, out = flat[start : start + size], output[start : start + size]
            if bias is None:
                torch.mm(tile, weight.t(), out=out)
            else:
                torch.addmm(bias, tile, weight.t(), out=out)
            start += size
    return output[:num_rows].view(*rows.shape[:-1], weight.shape[0])


def agreeing_sizes(
    weight: torch.Tensor, bias: torch.Tensor | None = None, sizes: tuple[int, ...] = SIZES
) -> tuple[int, ...]:
    """Return the tile sizes whose rows have the same bits as those of the smallest size, at any place in the tile.

    The order of the sums does not depend on the numbers, so the numbers of `cancelling_product` show it.

    Args:
        weight: `[out_features, in_features]` in the dtype, on the device and with the strides that are used later.
        bias: `[out_features]`, or None: a product with a bias is another function of the library.
        sizes: candidates, in descending order.

    Returns:
        Sizes for `tiled_linear`; empty if even the smallest tile treats its rows differently.
    """
    rows, weight, bias = cancelling_product(weight, bias, sizes[0])
    order = torch.randperm(sizes[0], generator=torch.Generator().manual_seed(0)).to(weight.device)
    expected = tiled_linear(rows, weight, bias, sizes[-1:])
    agreeing = tuple(
        size
        for size in sizes
        if torch.equal(tiled_linear(rows, weight, bias, (size,)), expected)
        and torch.equal(tiled_linear(rows[order], weight, bias, (size,)), expected[order])
    )
    return agreeing if sizes[-1] in agreeing else ()
