"""Steps are captured without a GPU: a fake replaces functions of `torch.cuda`, and records their calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radixkv.compute.forward import StepOutputs
from radixkv.compute.graphs import capturer as graph_capturer
from radixkv.compute.graphs.capturer import GraphCapturer
from radixkv.config import EngineConfig

OUTPUTS = StepOutputs(torch.zeros(1), torch.zeros(2))
STORAGE: Any = SimpleNamespace()


class CudaCalls:
    """Replaces functions of `torch.cuda`, and records their calls in order.

    Attributes:
        is_error_mode: whether torch is to raise for an operation that waits for the device.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[object] = []
        self.is_error_mode = False
        self.graph = SimpleNamespace(replay=lambda: self.calls.append("replay"))
        self.side_stream = SimpleNamespace(
            wait_stream=lambda stream: self.calls.append(("side stream waits for", stream))
        )
        self.current_stream = SimpleNamespace(
            wait_stream=lambda stream: self.calls.append(("current stream waits for", stream))
        )
        for name, stand_in in {
            "graph_pool_handle": lambda: "memory",
            "Stream": self.create_stream,
            "current_stream": lambda: self.current_stream,
            "stream": self.enter_context,
            "CUDAGraph": lambda: self.graph,
            "graph": self.enter_context,
            "get_sync_debug_mode": lambda: 0,
            "set_sync_debug_mode": self.set_sync_debug_mode,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def create_stream(self) -> object:
        self.calls.append("new stream")
        return self.side_stream

    def set_sync_debug_mode(self, mode: object) -> None:
        self.is_error_mode = mode == "error"

    @contextlib.contextmanager
    def enter_context(self, *what: object, **options: object) -> Iterator[None]:
        self.calls.append(("enter", *what, *options.items()))
        yield
        self.calls.append("exit")

    def compute(self) -> StepOutputs:
        self.calls.append("compute, must not wait" if self.is_error_mode else "compute")
        return OUTPUTS


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaCalls:
    return CudaCalls(monkeypatch)


def capturer_of(device: str = "cuda", **engine: Any) -> GraphCapturer:
    model: Any = SimpleNamespace(device=torch.device(device))
    kernels: Any = SimpleNamespace()
    return GraphCapturer(model, kernels, EngineConfig(**engine))


def test_a_step_is_warmed_up_and_checked_for_synchronization_before_the_capture(
    cuda: CudaCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays: list[Callable[[], StepOutputs]] = []

    def capture_twice(*_: object, capturer: Any, **__: object) -> str:
        replays.extend((capturer(cuda.compute), capturer(cuda.compute)))
        return "graphs"

    monkeypatch.setattr(graph_capturer, "StepGraphs", capture_twice)
    assert capturer_of().capture(STORAGE, 128) == "graphs"
    one_capture = [
        ("side stream waits for", cuda.current_stream),
        ("enter", cuda.side_stream),
        "compute",
        "compute, must not wait",
        "exit",
        ("current stream waits for", cuda.side_stream),
        ("enter", cuda.current_stream),
        ("enter", cuda.graph, ("pool", "memory")),
        "compute",
        "exit",
        "exit",
    ]
    assert cuda.calls == ["new stream", *one_capture, *one_capture], "both captures use one side stream"
    cuda.calls.clear()
    assert replays[0]() is OUTPUTS
    assert cuda.calls == ["replay"]


def test_a_step_that_synchronizes_is_not_captured_and_not_tried_again(
    cuda: CudaCalls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compute_and_synchronize() -> StepOutputs:
        if cuda.is_error_mode:
            raise RuntimeError("called a synchronizing CUDA operation")
        return cuda.compute()

    monkeypatch.setattr(graph_capturer, "StepGraphs", lambda *_, capturer, **__: capturer(compute_and_synchronize))
    capturer = capturer_of()
    assert capturer.capture(STORAGE, 128) is None
    assert not cuda.is_error_mode, "the sync debug mode is restored"
    assert ("enter", cuda.graph, ("pool", "memory")) not in cuda.calls
    assert capturer.capture(STORAGE, 128) is None
    assert caplog.messages == [
        "no step is captured as a CUDA graph: RuntimeError: called a synchronizing CUDA operation"
    ]


def test_graphs_can_be_switched_off_and_there_are_none_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_capturer, "StepGraphs", lambda *_, **__: pytest.fail("nothing is to be captured"))
    assert capturer_of(cuda_graphs=False).capture(STORAGE, 128) is None
    assert capturer_of("cpu").capture(STORAGE, 128) is None
