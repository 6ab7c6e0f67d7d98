"""Captures short steps as CUDA graphs, if the model can be captured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import torch

from radixkv.compute.forward import StepOutputs
from radixkv.compute.graphs.graphs import StepGraphs
from radixkv.config import EngineConfig
from radixkv.model.attention.interface import AttentionKernels, PlanningKernels
from radixkv.model.model import Model
from radixkv.storage.device_pool import KVStorage

_log = logging.getLogger(__name__)


class GraphCapturer:
    """Captures the steps of a model over a pool. It can be used again for another pool.

    A model whose forward pass waits for the device cannot be captured. Its steps are launched kernel by kernel, and one
    warning is logged.

    Args:
        model: the weights.
        kernels: the operations on the pool.
        engine: the configuration, with the size of steps.
    """

    def __init__(self, model: Model, kernels: AttentionKernels, engine: EngineConfig) -> None:
        self._model = model
        self._kernels = kernels
        self._engine = engine
        self._is_on = model.device.type == "cuda" and engine.cuda_graphs
        self._side_stream: torch.cuda.Stream | None = None  # for all graphs: libraries keep memory per stream

    def capture(self, storage: KVStorage, max_sequence_tokens: int, *, only_largest: bool = False) -> StepGraphs | None:
        """Capture steps over a pool.

        Args:
            storage: the K/V memory, whose address is captured.
            max_sequence_tokens: tokens of the longest sequence.
            only_largest: whether only the largest step is captured, to measure how much memory captured steps need: the
                others share its memory.

        Returns:
            The graphs; None on a CPU, if `engine.cuda_graphs` is off, or if the model can't be captured.
        """
        if not self._is_on:
            return None
        memory = torch.cuda.graph_pool_handle()
        try:
            return StepGraphs(
                self._model,
                storage,
                cast("PlanningKernels", self._kernels),
                max_sequence_tokens=max_sequence_tokens,
                max_step_tokens=self._engine.step_tokens,
                max_requests=self._engine.max_running_requests,
                capturer=lambda compute: self._capture(compute, memory),
                only_largest=only_largest,
            )
        except Exception as error:  # noqa: BLE001 - any error of a forward pass that can't be captured
            self._is_on = False
            _log.warning("no step is captured as a CUDA graph: %s: %s", type(error).__name__, error)
            return None

    def _capture(self, compute: Callable[[], StepOutputs], memory: Any) -> Callable[[], StepOutputs]:
        """Capture one step; see `graphs.Capturer`. Graphs share their memory, since only one is in use at a time."""
        current = torch.cuda.current_stream()
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._side_stream.wait_stream(current)
        with torch.cuda.stream(self._side_stream):
            compute()  # compiles and chooses kernels, which is impossible during a capture
            _require_no_wait(compute)  # raises before the capture, since a failed capture may break PyTorch's allocator
        current.wait_stream(self._side_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(current), torch.cuda.graph(graph, pool=memory):  # restores the stream even on failure
            outputs = compute()

        def replay() -> StepOutputs:
            graph.replay()
            return outputs

        return replay


def _require_no_wait(compute: Callable[[], StepOutputs]) -> None:
    """Run a computation, and raise if the host would wait for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        compute()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
