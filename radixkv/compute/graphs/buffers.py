"""The inputs of captured steps: memory at fixed addresses that is filled for each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from radixkv.compute.forward import StepLayout
from radixkv.compute.graphs.shapes import StepShape
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu.attention_plan import NO_MERGE, NO_ROW, NO_WORK, AttentionPlan
from radixkv.kernels.staging import StagedArrays
from radixkv.model.attention.interface import PlanKey

_NO_SLOT = -1


class StepBuffers:
    """Tokens, layout and attention plans of a step, with room for the largest shape.

    A smaller step is padded with tokens that are not written, rows of logits that are not read, and work items without
    keys.

        shape    [ 32 tokens .............................. )    4 rows of logits
        step     [ 20 tokens ........... )[ padding ....... )    2 rows, and 2 of padding

    Args:
        shapes: shapes of the captured steps; at least one.
        keys: the keys of the attention plans of the model's layers, each once.
        num_kv_heads: KV heads of the pool.
        table_blocks: blocks of the longest sequence.
        block_size: tokens per block.
        device: device of the model.
    """

    def __init__(
        self,
        shapes: Sequence[StepShape],
        keys: Sequence[PlanKey],
        num_kv_heads: int,
        table_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._group_sizes = {key: key.num_query_heads // num_kv_heads for key in keys}
        self._block_size = block_size
        num_tokens = max(shape.num_tokens for shape in shapes)
        num_requests = max(shape.num_requests for shape in shapes)
        num_items = max(shape.num_items for shape in shapes)
        num_merges = max(shape.num_tiles for shape in shapes)
        arrays: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "input_ids": ((num_tokens,), torch.int64),
            "positions": ((num_tokens,), torch.int64),
            "slots": ((num_tokens,), torch.int64),
            "logit_rows": ((num_requests,), torch.int64),
        }
        for key, group_size in self._group_sizes.items():
            arrays[f"work {key}"] = (num_items, len(NO_WORK)), torch.int32
            arrays[f"merges {key}"] = (num_merges, len(NO_MERGE)), torch.int32
            arrays[f"joined rows {key}"] = (num_tokens * group_size, len(NO_ROW)), torch.int32
        # This must be the last array, of which only the rows for the requests of a shape are uploaded.
        arrays["tables"] = (num_requests, table_blocks), torch.int32
        self._arrays = StagedArrays(arrays, device)
        self._arrays.host["slots"].fill_(_NO_SLOT)
        for key in keys:  # start with a step that computes nothing
            self._arrays.host[f"work {key}"][:] = torch.tensor(NO_WORK)
        self._arrays.upload(num_requests)

    def input_ids(self, shape: StepShape) -> torch.Tensor:
        """Tokens of a shape on the device, int64 `[shape.num_tokens]`."""
        return self._arrays.device["input_ids"][: shape.num_tokens]

    def layout(self, shape: StepShape) -> StepLayout:
        """Layout of a shape on the device. Its batch has no host values of a step; kernels use `plans` instead."""
        arrays = self._arrays.device
        batch = PagedBatch(
            query_starts=(0, shape.num_tokens),
            kv_lens=(shape.num_tokens,),
            block_tables=arrays["tables"][: shape.num_requests],
            slots=arrays["slots"][: shape.num_tokens],
            block_size=self._block_size,
            host_tables=np.empty((0, 0), dtype=np.int32),
        )
        return StepLayout(
            arrays["positions"][: shape.num_tokens],
            arrays["logit_rows"][: shape.num_requests],
            batch,
        )

    def plans(self, shape: StepShape) -> dict[PlanKey, AttentionPlan]:
        """Attention plans of a shape on the device."""
        arrays = self._arrays.device
        return {
            key: AttentionPlan(
                tile_rows=shape.tile_rows,
                group_size=group_size,
                window=key.window,
                work=arrays[f"work {key}"][: shape.num_items],
                merges=arrays[f"merges {key}"][: shape.num_tiles],
                joined_rows=arrays[f"joined rows {key}"][: shape.num_tokens * group_size],
                num_partial_rows=shape.num_partial_rows,
            )
            for key, group_size in self._group_sizes.items()
        }

    def fill(self, shape: StepShape, layout: StepLayout, plans: Mapping[PlanKey, AttentionPlan]) -> None:
        """Write a step, without its tokens, into host memory. The previous step may still be running.

        Args:
            shape: a shape with room for the step.
            layout: the layout of the step, on the host.
            plans: its attention plans, on the host.
        """
        batch, arrays = layout.batch, self._arrays.host
        arrays["tables"][: batch.num_requests, : batch.block_tables.shape[1]] = batch.block_tables
        _fill(arrays["positions"][: shape.num_tokens], layout.positions, 0)
        _fill(arrays["slots"][: shape.num_tokens], batch.slots, _NO_SLOT)
        _fill(arrays["logit_rows"][: shape.num_requests], layout.logit_rows, 0)
        for key, plan in plans.items():
            _fill(arrays[f"work {key}"][: shape.num_items], plan.work, NO_WORK)
            _fill(arrays[f"merges {key}"][: shape.num_tiles], plan.merges, NO_MERGE)
            num_rows = shape.num_tokens * self._group_sizes[key]
            _fill(arrays[f"joined rows {key}"][:num_rows], plan.joined_rows, NO_ROW)

    def upload(self, shape: StepShape, input_ids: torch.Tensor) -> None:
        """Copy the step of the last `fill` to the device. The previous step must be finished.

        Args:
            shape: shape of that step.
            input_ids: its tokens, int64 on the host.
        """
        _fill(self._arrays.host["input_ids"][: shape.num_tokens], input_ids, 0)
        self._arrays.upload(shape.num_requests)


def _fill(array: torch.Tensor, rows: torch.Tensor, padding: int | tuple[int, ...]) -> None:
    array[: len(rows)] = rows
    array[len(rows) :] = torch.tensor(padding, dtype=array.dtype)
