"""Merges what rows attended to piece by piece, on a CPU, by the logarithms of their sums of weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radixkv.kernels.cpu_attention_work import Strip
from radixkv.kernels.row_pieces import ELEMENTS_A_CALL


def shares(lses: torch.Tensor) -> torch.Tensor:
    """Turn logarithms of the sums of weights into shares of the softmax sum, in place.

    Args:
        lses: `[num_pieces, num_kv_heads, num_rows]`, -inf where a row has no piece. Pieces that every row has
            are the last ones: its tail, and its sink if there are sinks.
    """
    weights = lses.sub_(lses.amax(0))
    for piece in torch.split(weights.view(-1), ELEMENTS_A_CALL):
        piece.exp_()
    total = weights[0].clone()
    for weight in weights[1:].unbind():
        total.add_(weight)
    return weights.div_(total)


def merge(
    strips: Sequence[Strip], partials: Sequence[torch.Tensor], tail: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Add up partial results, weighted by their share of the softmax sum, in the order of their positions.

    Products and sums are separate operations: a processor may round both at once or one by one, depending on the place
    of a number in the tensor.

    Args:
        strips, partials: in order; each partial `[num_units, num_kv_heads, rows of the strip, head_dim]`, may be
            overwritten.
        tail: `[num_kv_heads, num_rows, head_dim]`, the last piece of each row; may be overwritten.
        shares: float32 `[num_pieces, num_kv_heads, num_rows, 1]`.

    Returns:
        Float32 `[num_kv_heads, num_rows, head_dim]`.
    """
    num_rows = tail.shape[1]
    merged: torch.Tensor | None = None
    for strip, partial in zip(strips, partials, strict=True):
        first, end = strip.first_row, strip.end_row
        pieces = partial.float().mul_(shares[strip.first_piece : strip.first_piece + strip.num_units, :, first:end])
        first_piece, *others = pieces.unbind()
        if merged is None and end - first == num_rows:
            merged = first_piece
        else:
            if merged is None:
                # The only number that changes nothing it is added to, not even -0.0.
                merged = shares.new_full(tail.shape, -0.0)
            merged[:, first:end].add_(first_piece)
        for piece in others:
            merged[:, first:end].add_(piece)
    last = tail.float().mul_(shares[-1])
    return last if merged is None else merged.add_(last)
