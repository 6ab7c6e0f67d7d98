"""Partial attention results of tiles whose keys are split, and the kernel that merges them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from radixkv.kernels.attention_plan import AttentionPlan

_MERGE_ROWS = 16


@dataclass(frozen=True, slots=True)
class Partials:
    """Partial results of one layer. The attention kernel writes them, and the merge reads them.

    Attributes:
        rows: float32 `[num_partials, num_kv_heads, tile_rows, head_dim]`, attention over the keys of one split.
        lses: float32 `[num_partials, num_kv_heads, tile_rows]`, base-2 logarithms of the sums of weights; -inf where
            nothing was seen.
    """

    rows: torch.Tensor
    lses: torch.Tensor

    @classmethod
    def allocate(cls, plan: AttentionPlan, num_kv_heads: int, head_dim: int, device: torch.device) -> Partials:
        """Allocate uninitialized memory for all partial results of a plan, which may have none."""
        rows = torch.empty(
            plan.num_partials, num_kv_heads, plan.tile_rows, head_dim, dtype=torch.float32, device=device
        )
        return cls(rows, rows.new_empty(rows.shape[:-1]))

    def merge_into(self, output: torch.Tensor, plan: AttentionPlan) -> None:
        """Merge the split tiles into the output, in one launch. Does nothing if the plan splits no tile.

        Args:
            output: `[num_tokens, num_query_heads, head_dim]`, contiguous.
            plan: the plan that these partial results were allocated for.
        """
        if not plan.num_partials:
            return
        num_kv_heads, head_dim = self.rows.shape[1], self.rows.shape[3]
        _merge_partials[(plan.merges.shape[0], num_kv_heads, plan.tile_rows // _MERGE_ROWS)](
            self.rows,
            self.lses,
            output,
            plan.merges,
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
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
):
    """Add up the partial results of some rows of a split tile, weighted by their share of the softmax sum, in order."""
    item = merges + tl.program_id(0) * 5
    kv_head = tl.program_id(1)
    first_token = tl.load(item)
    num_tokens = tl.load(item + 1)
    first_row = tl.load(item + 2)
    first_partial = tl.load(item + 3)
    end_partial = first_partial + tl.load(item + 4)

    tile_rows = tl.program_id(2) * MERGE_ROWS + tl.arange(0, MERGE_ROWS)
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < HEAD_DIM
    total_max = tl.full([MERGE_ROWS], float("-inf"), tl.float32)
    for partial in range(first_partial, end_partial):
        part_rows = (partial * NUM_KV_HEADS + kv_head).to(tl.int64) * TILE_ROWS + tile_rows
        total_max = tl.maximum(total_max, tl.load(partial_lses + part_rows))
    shift = tl.where(total_max == float("-inf"), 0.0, total_max)  # only rows past the suffix see nothing at all
    total = tl.zeros([MERGE_ROWS], tl.float32)
    acc = tl.zeros([MERGE_ROWS, PADDED_DIM], tl.float32)
    for partial in range(first_partial, end_partial):
        part_rows = (partial * NUM_KV_HEADS + kv_head).to(tl.int64) * TILE_ROWS + tile_rows
        share = tl.exp2(tl.load(partial_lses + part_rows) - shift)
        part = tl.load(partials + part_rows[:, None] * HEAD_DIM + dims[None, :], mask=is_dim[None, :], other=0.0)
        acc += part * share[:, None]
        total += share
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]

    rows = first_row + tile_rows
    tokens = rows // GROUP_SIZE
    out_rows = (first_token + tokens).to(tl.int64) * (NUM_KV_HEADS * GROUP_SIZE) + kv_head * GROUP_SIZE
    out_offsets = (out_rows + rows % GROUP_SIZE) * HEAD_DIM
    in_request = (tokens < num_tokens)[:, None] & is_dim[None, :]
    tl.store(output + out_offsets[:, None] + dims[None, :], acc.to(output.dtype.element_ty), mask=in_request)
