"""Captured steps: CUDA graphs that are captured at load, so that a short step is one launch instead of a thousand."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from radixkv.compute.forward import StepLayout, StepOutputs, compute_step
from radixkv.compute.graphs.buffers import StepBuffers
from radixkv.compute.graphs.shapes import StepShape, max_captured_tokens, step_shapes
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu.attention_plan import AttentionPlan
from radixkv.kernels.gpu.dequantize_plan import MAX_SHORT_TOKENS
from radixkv.model.attention.interface import PlanKey, PlanningKernels
from radixkv.model.model import Model
from radixkv.storage.device_pool import KVStorage

# Runs a computation on the device and captures it. The returned function replays it into the same tensors.
Capturer = Callable[[Callable[[], StepOutputs]], Callable[[], StepOutputs]]

# Computes a prepared step, given its tokens, int64 on the host. The previous step must be finished.
Replay = Callable[[torch.Tensor], StepOutputs]

Plans = Mapping[PlanKey, AttentionPlan]


class StepGraphs:
    """The captured steps of one model over one pool.

    Args:
        model: the weights.
        storage: the K/V memory, whose address is captured.
        kernels: the operations on it.
        max_sequence_tokens: tokens of the longest sequence.
        max_step_tokens: maximum number of tokens of a step.
        max_requests: maximum number of requests of a step.
        capturer: captures each step once.
        only_largest: whether only the largest step is captured.

    Attributes:
        num_dropped: captured steps that were dropped.
    """

    def __init__(
        self,
        model: Model,
        storage: KVStorage,
        kernels: PlanningKernels,
        *,
        max_sequence_tokens: int,
        max_step_tokens: int,
        max_requests: int,
        capturer: Capturer,
        only_largest: bool = False,
    ) -> None:
        self._model = model
        self._storage = storage
        self._kernels = kernels
        self._keys = list(dict.fromkeys(kind.plan_key for kind in model.attention_kinds))
        num_query_heads = max(key.num_query_heads for key in self._keys)
        num_kv_heads = model.kv_shape.num_kv_heads
        self._group_size = num_query_heads // num_kv_heads  # of the layers with the most query heads per KV head
        shapes = step_shapes(
            kernels,
            model.kv_shape.dtype,
            num_query_heads,
            num_kv_heads,
            max_tokens=min(max_step_tokens, self._max_tokens()),
            max_requests=max_requests,
        )
        table_blocks = -(-max_sequence_tokens // storage.block_size)
        self._buffers = StepBuffers(shapes, self._keys, num_kv_heads, table_blocks, storage.block_size, model.device)
        # The largest steps are captured first, so that smaller ones fit into their memory. `prepare` tries smaller
        # steps first.
        chosen = shapes[-1:] if only_largest else shapes
        captured = [(shape, capturer(self._computation_of(shape))) for shape in reversed(chosen)]
        self._replays = dict(reversed(captured))
        self.num_dropped = 0
        self._num_prepared = 0

    def _max_tokens(self) -> int:
        """Tokens of the largest captured step. Longer steps may use kernel variants that are not captured."""
        if len(self._kernels.variants()) > 1:
            return MAX_SHORT_TOKENS
        return max_captured_tokens(self._model.num_parameters, self._model.kv_shape.num_layers)

    @property
    def shapes(self) -> list[StepShape]:
        """Shapes of the captured steps, the smallest first."""
        return list(self._replays)

    def drop(self, shape: StepShape) -> None:
        """Forget a captured step."""
        del self._replays[shape]
        self.num_dropped += 1

    def prepare(self, layout: StepLayout) -> Replay | None:
        """Prepare a step for the smallest captured step that has room for it. Does not wait for the device.

        Captured steps whose tiles have fewer rows than the kernels prefer are tried last.

        Args:
            layout: the layout on the host. The previous step may still be running.

        Returns:
            A function that computes the step, to be called before another step is prepared; None if no captured step
            has room. It returns tensors that the next step overwrites. Rows of padding come last.
        """
        batch, dtype = layout.batch, self._model.kv_shape.dtype
        if len(layout.logit_rows) > batch.num_requests:
            return None  # captured steps compute one row of logits per request
        min_rows = self._kernels.tile_rows(self._group_size * batch.max_query_len, dtype)
        num_kv_heads = self._model.kv_shape.num_kv_heads
        preferred_rows = max(
            self._kernels.tile_rows_for(batch, num_query_heads // num_kv_heads, dtype, window)
            for num_query_heads, window in self._keys
        )
        plans: dict[int, Plans] = {}  # by the rows of a tile: the plans depend on nothing else
        for shape in sorted(self._replays, key=lambda shape: shape.tile_rows < preferred_rows):
            if shape.tile_rows < min_rows or not shape.has_room(batch):
                continue
            if shape.tile_rows not in plans:
                plans[shape.tile_rows] = self._plan(batch, shape.tile_rows)
            if all(map(shape.has_room_for, plans[shape.tile_rows].values())):
                return self._fill_buffers(shape, layout, plans[shape.tile_rows])
        return None

    def prepare_as(self, shape: StepShape, layout: StepLayout) -> Replay | None:
        """Prepare a step for the captured step of this shape; None if it has no room. See `prepare`."""
        plans = self._plan(layout.batch, shape.tile_rows)
        if not (shape.has_room(layout.batch) and all(map(shape.has_room_for, plans.values()))):
            return None
        return self._fill_buffers(shape, layout, plans)

    def _fill_buffers(self, shape: StepShape, layout: StepLayout, plans: Plans) -> Replay:
        """Write a step into the buffers. Returns the function that computes it."""
        self._buffers.fill(shape, layout, plans)
        self._num_prepared += 1
        step_number = self._num_prepared

        def replay(input_ids: torch.Tensor) -> StepOutputs:
            assert step_number == self._num_prepared, "another step was prepared since"
            self._buffers.upload(shape, input_ids)
            return self._replays[shape]()

        return replay

    def _computation_of(self, shape: StepShape) -> Callable[[], StepOutputs]:
        """Return the computation that is captured for a shape. It reads its inputs from the buffers."""
        input_ids, layout = self._buffers.input_ids(shape), self._buffers.layout(shape)
        plans = self._buffers.plans(shape)

        def compute() -> StepOutputs:
            self._kernels.use_plans(layout.batch, plans)
            return compute_step(self._model, self._storage, self._kernels, input_ids, layout)

        return compute

    def _plan(self, batch: PagedBatch, tile_rows: int) -> Plans:
        kv_shape = self._model.kv_shape
        return {
            key: self._kernels.plan(
                batch,
                key.num_query_heads,
                kv_shape.num_kv_heads,
                kv_shape.dtype,
                window=key.window,
                tile_rows=tile_rows,
            )
            for key in self._keys
        }
