"""The softmax of paged attention, a tile of keys at a time, in base 2."""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = 1.4426950408889634


def base_2(scale: float, softcap: float | None) -> tuple[float, float | None]:
    """Return the scale and softcap of `softmax_step`, both in base-2 logarithms.

    With c = softcap, c * tanh(s * scale / c) = c - 2c / (1 + 2^(s * 2 log2(e) scale / c)): one exp2, and right where it
    overflows or vanishes.

    Args:
        scale, softcap: see `Scoring`.

    >>> base_2(0.125, None)
    (0.18033688011112042, None)
    """
    if softcap is None:
        return scale * _LOG2_E, None
    return 2 * _LOG2_E * scale / softcap, softcap * _LOG2_E


@triton.jit
def keys_share(lses, sinks, heads):  # type: ignore[no-untyped-def]
    """Find what share of the softmax sum keys have beside a sink, float32 `[rows]`. Once a row, after its last key.

    Args:
        lses: float32 `[rows]`, base-2 logarithms of the sums of the keys' weights.
        sinks: pointer to the sinks, see `Scoring`.
        heads: int32 `[rows]`, the query heads of the rows.
    """
    return 1.0 / (1.0 + tl.exp2(tl.load(sinks + heads).to(tl.float32) * 1.4426950408889634 - lses))


@triton.jit
def softmax_step(  # type: ignore[no-untyped-def]
    scores, positions, query_positions, row_max, row_sum, window, scale, softcap
):
    """Take one more tile of keys into the softmax of some rows.

    Args:
        scores: float32 `[rows, keys]`, the dot products.
        positions: int32 `[keys]`, positions of the keys in their sequence, or from any point in it.
        query_positions: int32 `[rows, 1]`, positions of the queries, from the same point.
        row_max: float32 `[rows]`, the largest base-2 score so far; -inf before the first tile.
        row_sum: float32 `[rows]`, the sum of all weights so far, relative to `row_max`.
        window: tokens that a query sees, its own included; None for all.
        scale: see `base_2`.
        softcap: see `base_2`.

    Returns:
        The weights `[rows, keys]`, 0 for keys that are not visible; the new `row_max` and `row_sum`; and the factor
        `[rows]` on earlier sums of weighted values.
    """
    if softcap is not None:
        scores = softcap - 2 * softcap / (1.0 + tl.exp2(scores * scale))
        to_log2 = 1.0
    else:
        to_log2 = scale
    visible = positions[None, :] <= query_positions
    if window is not None:
        visible = visible & (positions[None, :] > query_positions - window)
    scores = tl.where(visible, scores, float("-inf"))

    # A row may have seen nothing yet: its maximum is then -inf, which must not be subtracted from itself.
    new_max = tl.maximum(row_max, tl.max(scores, 1) * to_log2)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - shift)
    weights = tl.exp2(scores * to_log2 - shift[:, None])
    return weights, new_max, row_sum * rescale + tl.sum(weights, 1), rescale
