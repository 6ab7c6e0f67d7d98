"""Short steps as CUDA graphs: recorded once at load, so that each of them is one launch instead of a thousand."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch

from radixkv.attention import AttentionKernels
from radixkv.config import EngineConfig
from radixkv.forward import StepInputs, StepOutputs, compute_step
from radixkv.kernels.attention_plan import AttentionPlan
from radixkv.kernels.batch import PagedBatch
from radixkv.kv_storage import KVStorage
from radixkv.model import Model
from radixkv.step_buffers import StepBuffers
from radixkv.step_shape import StepShape, step_shapes

if TYPE_CHECKING:  # Triton is not there on every platform
    from radixkv.triton_kernels import TritonKernels

# Does something on the device and records it; what is returned does it again, and returns the same tensors filled anew.
Recorder = Callable[[Callable[[], StepOutputs]], Callable[[], StepOutputs]]

_log = logging.getLogger(__name__)


class CudaRecorder:
    """Records CUDA graphs, which share the memory of what they compute: only one of them is in use at a time."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], StepOutputs]) -> Callable[[], StepOutputs]:
        """See `Recorder`."""
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            compute()  # compiles kernels and makes choices, neither of which can be recorded
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            outputs = compute()

        def replay() -> StepOutputs:
            graph.replay()
            return outputs

        return replay


class StepGraphs:
    """The recorded steps of one model over one pool.

    Args:
        model: the weights.
        storage: the K/V memory, whose address is recorded.
        kernels: what works on it.
        max_sequence_tokens: of the longest sequence.
        max_step_tokens: of a step.
        max_requests: of a step.
        recorder: records each step once.
    """

    def __init__(
        self,
        model: Model,
        storage: KVStorage,
        kernels: TritonKernels,
        *,
        max_sequence_tokens: int,
        max_step_tokens: int,
        max_requests: int,
        recorder: Recorder,
    ) -> None:
        self._model = model
        self._storage = storage
        self._kernels = kernels
        self._num_query_heads = max(kind.num_query_heads for kind in model.attention_kinds)
        self._group_size = self._num_query_heads // model.kv_shape.num_kv_heads
        self._windows = list(dict.fromkeys(kind.window for kind in model.attention_kinds))
        shapes = step_shapes(
            kernels,
            model.kv_shape.dtype,
            self._num_query_heads,
            model.kv_shape.num_kv_heads,
            max_tokens=max_step_tokens,
            max_requests=max_requests,
        )
        table_blocks = -(-max_sequence_tokens // storage.block_size)
        self._buffers = StepBuffers(
            shapes, self._windows, self._group_size, table_blocks, storage.block_size, model.device
        )
        # The largest come first: the others fit into their memory.
        self._replays = {shape: recorder(self._computing(shape)) for shape in reversed(shapes)}

    @property
    def shapes(self) -> list[StepShape]:
        """What is recorded, those with the least room first."""
        return list(reversed(self._replays))

    def drop(self, shape: StepShape) -> None:
        """Forget a recorded step."""
        del self._replays[shape]

    def compute(self, inputs: StepInputs) -> StepOutputs | None:
        """Compute a step as the smallest recorded one that has room for it. Waits for nothing.

        Args:
            inputs: on the host. The step before must be done.

        Returns:
            Tensors that the next step overwrites, with rows that were not asked for behind the others; None if no
            recorded step has room.
        """
        most_rows = self._group_size * inputs.batch.most_query_tokens
        tile_rows = self._kernels.tile_rows(most_rows, self._model.kv_shape.dtype)
        for shape in self.shapes:
            if shape.tile_rows >= tile_rows and (outputs := self.replay(shape, inputs)) is not None:
                return outputs
        return None

    def replay(self, shape: StepShape, inputs: StepInputs) -> StepOutputs | None:
        """Compute a step as this recorded one; None if it has no room for it. See `compute`."""
        batch = inputs.batch
        if batch.num_tokens > shape.num_tokens or batch.num_requests > shape.num_requests:
            return None
        plans = {window: self._plan(batch, window, shape) for window in self._windows}
        if not all(_has_room(shape, plan) for plan in plans.values()):
            return None
        self._buffers.fill(shape, inputs, plans)
        return self._replays[shape]()

    def _computing(self, shape: StepShape) -> Callable[[], StepOutputs]:
        """What is recorded for a shape: nobody's step, which only has its size."""
        inputs, plans = self._buffers.inputs(shape), self._buffers.plans(shape)

        def compute() -> StepOutputs:
            self._kernels.use_plans(inputs.batch, plans)
            return compute_step(self._model, self._storage.pool, self._kernels, inputs)

        return compute

    def _plan(self, batch: PagedBatch, window: int | None, shape: StepShape) -> AttentionPlan:
        return self._kernels.plan(
            batch,
            self._num_query_heads,
            self._model.kv_shape.num_kv_heads,
            self._model.kv_shape.dtype,
            window=window,
            tile_rows=shape.tile_rows,
        )


def record_graphs(
    model: Model, storage: KVStorage, kernels: AttentionKernels, engine: EngineConfig, max_sequence_tokens: int
) -> StepGraphs | None:
    """Record short steps where there are CUDA graphs; None elsewhere, or if `engine.cuda_graphs` is off.

    A model whose forward pass can't be recorded, because it waits for the device, is computed launch by launch, and a
    warning says so.

    Args:
        model: the weights.
        storage: the K/V memory, whose address is recorded.
        kernels: what works on it.
        engine: how large steps are.
        max_sequence_tokens: of the longest sequence.
    """
    if model.device.type != "cuda" or not engine.cuda_graphs:
        return None
    try:
        return StepGraphs(
            model,
            storage,
            cast("TritonKernels", kernels),
            max_sequence_tokens=max_sequence_tokens,
            max_step_tokens=engine.max_step_tokens,
            max_requests=engine.max_running_requests,
            recorder=CudaRecorder(),
        )
    except Exception as error:  # noqa: BLE001 - whatever a forward pass raises that can't be recorded
        _log.warning("no step is recorded as a CUDA graph: %s: %s", type(error).__name__, error)
        return None


def _has_room(shape: StepShape, plan: AttentionPlan) -> bool:
    return (
        len(plan.work) <= shape.num_items
        and len(plan.merges) <= shape.num_tiles
        and plan.num_partials <= shape.num_partials
    )
