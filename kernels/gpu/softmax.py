"""The softmax of paged attention, a tile of keys at a time, in base 2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from radixkv.kernels.gpu.attention_plan import AttentionPlan

_LOG2_E = 1.4426950408889634


def base_2(scale: float, softcap: float | None) -> tuple[float, float | None]:
    """Return the scale and softcap that `softmax_step` takes, so that its scores are base-2 logarithms of weights.

    With a softcap c, a score s is capped by c * tanh(s * scale / c) = c - 2c / (1 + 2^(s * 2 log2(e) scale / c)). This
    takes one exp2, and is correct even if the exp2 overflows or underflows. The returned scale is 2 log2(e) scale / c.

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
    """Compute the keys' share of a softmax sum that includes a sink, float32 `[rows]`, after the last key of a row.

    Args:
        lses: float32 `[rows]`, base-2 logarithms of the sums of the keys' weights.
        sinks: pointer to the sinks, see `Scoring`.
        heads: int32 `[rows]`, the query heads of the rows.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634  # a kernel cannot read the module's constant
    return 1.0 / (1.0 + tl.exp2(tl.load(sinks + heads).to(tl.float32) * LOG2_E - lses))


@triton.jit
def softmax_step(  # type: ignore[no-untyped-def]
    scores, positions, query_positions, row_max, row_sum, window, scale, softcap
):
    """Update the online softmax of some rows with a tile of keys.

    Args:
        scores: float32 `[rows, keys]`, the dot products.
        positions: int32 `[keys]`, positions of the keys in their sequence, relative to any origin.
        query_positions: int32 `[rows, 1]`, positions of the queries, relative to the same origin.
        row_max: float32 `[rows]`, the largest base-2 score so far; -inf before the first tile.
        row_sum: float32 `[rows]`, the sum of all weights so far, relative to `row_max`.
        window: tokens that a query attends to, including its own; None for all.
        scale: see `base_2`.
        softcap: see `base_2`.

    Returns:
        The weights `[rows, keys]`, 0 for keys that are not visible; the new `row_max` and `row_sum`; and the factor
        `[rows]` by which earlier sums of weighted values must be multiplied.
    """
    if softcap is not None:
        scores = softcap - 2 * softcap / (1.0 + tl.exp2(scores * scale))
        to_log2 = 1.0
    else:
        to_log2 = scale
    is_visible = positions[None, :] <= query_positions
    if window is not None:
        is_visible = is_visible & (positions[None, :] > query_positions - window)
    scores = tl.where(is_visible, scores, float("-inf"))

    # If no key has been visible to a row yet, its maximum is -inf, and -inf - (-inf) would be NaN.
    new_max = tl.maximum(row_max, tl.max(scores, 1) * to_log2)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - shift)
    weights = tl.exp2(scores * to_log2 - shift[:, None])
    return weights, new_max, row_sum * rescale + tl.sum(weights, 1), rescale


_MERGE_ROWS = 16


@dataclass(frozen=True, slots=True)
class Partials:
    """Partial results of one layer. The attention kernel writes them, and the merge reads them.

    Attributes:
        rows: float32 `[num_partial_rows, num_kv_heads, head_dim]`, attention of a row to the keys of one split.
        lses: float32 `[num_partial_rows, num_kv_heads]`, base-2 logarithms of the sums of weights; -inf if no key was
            visible.
    """

    rows: torch.Tensor
    lses: torch.Tensor

    @classmethod
    def allocate(cls, plan: AttentionPlan, num_kv_heads: int, head_dim: int, device: torch.device) -> Partials:
        """Allocate uninitialized memory for all partial results of a plan, which may have none."""
        rows = torch.empty(plan.num_partial_rows, num_kv_heads, head_dim, dtype=torch.float32, device=device)
        return cls(rows, rows.new_empty(rows.shape[:-1]))

    def merge_into(self, output: torch.Tensor, plan: AttentionPlan, sinks: torch.Tensor | None) -> None:
        """Merge the split tiles into the output, in one launch. Does nothing if the plan splits no tile.

        Args:
            output: `[num_tokens, num_query_heads, head_dim]`, contiguous.
            plan: the plan that these partial results were allocated for.
            sinks: see `Scoring`. The sink of a row is added here, once, and not in each split.
        """
        if not plan.num_partial_rows:
            return
        num_kv_heads, head_dim = self.rows.shape[1:]
        _merge_partials[(plan.merges.shape[0], num_kv_heads, plan.tile_rows // _MERGE_ROWS)](
            self.rows,
            self.lses,
            output,
            plan.merges,
            sinks,
            NUM_KV_HEADS=num_kv_heads,
            GROUP_SIZE=plan.group_size,
            HEAD_DIM=head_dim,
            PADDED_DIM=triton.next_power_of_2(head_dim),
            TILE_ROWS=plan.tile_rows,
            MERGE_ROWS=_MERGE_ROWS,
            num_warps=4,
            enable_fp_fusion=True,  # triton's default changes with 3.10
        )


@triton.jit  # type: ignore[untyped-decorator]
def _merge_partials(  # type: ignore[no-untyped-def]
    partials,
    partial_lses,
    output,
    merges,
    sinks,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
):
    """Sum the partial results of some rows of a split tile in order, weighted by their share of the softmax sum."""
    item = merges + tl.program_id(0) * 5
    kv_head = tl.program_id(1)
    first_token = tl.load(item)
    num_tokens = tl.load(item + 1)
    first_row = tl.load(item + 2)
    first_partial_row = tl.load(item + 3)
    num_partials = tl.load(item + 4)
    if num_tokens == 0:  # an idle merge in a CUDA graph
        return

    tile_rows = tl.program_id(2) * MERGE_ROWS + tl.arange(0, MERGE_ROWS)
    rows = first_row + tile_rows
    tokens = rows // GROUP_SIZE
    is_row = tokens < num_tokens
    num_tile_rows = tl.minimum(num_tokens * GROUP_SIZE - first_row, TILE_ROWS)
    dims = tl.arange(0, PADDED_DIM)
    is_number = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    total_max = tl.full([MERGE_ROWS], float("-inf"), tl.float32)
    for partial in range(num_partials):
        part_rows = (first_partial_row + partial * num_tile_rows + tile_rows).to(tl.int64) * NUM_KV_HEADS + kv_head
        total_max = tl.maximum(total_max, tl.load(partial_lses + part_rows, mask=is_row, other=float("-inf")))
    shift = tl.where(total_max == float("-inf"), 0.0, total_max)  # -inf only in rows past the suffix
    total = tl.zeros([MERGE_ROWS], tl.float32)
    acc = tl.zeros([MERGE_ROWS, PADDED_DIM], tl.float32)
    for partial in range(num_partials):
        part_rows = (first_partial_row + partial * num_tile_rows + tile_rows).to(tl.int64) * NUM_KV_HEADS + kv_head
        share = tl.exp2(tl.load(partial_lses + part_rows, mask=is_row, other=float("-inf")) - shift)
        part = tl.load(partials + part_rows[:, None] * HEAD_DIM + dims[None, :], mask=is_number, other=0.0)
        acc += part * share[:, None]
        total += share
    total = tl.where(total > 0, total, 1.0)
    acc = acc / total[:, None]
    if sinks is not None:
        acc *= keys_share(shift + tl.log2(total), sinks, kv_head * GROUP_SIZE + rows % GROUP_SIZE)[:, None]

    out_rows = (first_token + tokens).to(tl.int64) * (NUM_KV_HEADS * GROUP_SIZE) + kv_head * GROUP_SIZE
    out_offsets = (out_rows + rows % GROUP_SIZE) * HEAD_DIM
    tl.store(output + out_offsets[:, None] + dims[None, :], acc.to(output.dtype.element_ty), mask=is_number)


@triton.jit  # type: ignore[untyped-decorator]
def partial_rows(joined, is_joined, partial, TILE_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the rows of the partial results that a work item writes, int32 `[TILE_ROWS]`.

    Args:
        joined: pointers to `AttentionPlan.joined_rows` of the item's rows, `[TILE_ROWS]`.
        is_joined: which of these rows exist and are joined, `[TILE_ROWS]`.
        partial: the last column of the item.
    """
    first = tl.load(joined + 1, mask=is_joined, other=0)
    num_tile_rows = tl.load(joined + 2, mask=is_joined, other=0)
    return tl.where(is_joined, first + partial * num_tile_rows, partial + tl.arange(0, TILE_ROWS))
