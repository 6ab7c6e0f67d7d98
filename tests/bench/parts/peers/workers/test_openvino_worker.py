"""The worker runs OpenVINO's pipeline step by step, and without AMX if the pipeline can't be built with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.parts.peers.workers import openvino_worker
from bench.parts.peers.workers.loop import WorkerOptions
from bench.parts.peers.workers.task import Task

OPTIONS = WorkerOptions(Path("m"), "bfloat16", 1, "", Path())


class FakeHandle:
    """The handle of a request, which generates the first token of its prompt again and again."""

    def __init__(self, prompt: Any, max_new_tokens: int) -> None:
        self.token_id = int(prompt[0, 0])
        self.num_remaining = max_new_tokens
        self.unread = []

    def step(self) -> None:
        if self.num_remaining:
            self.num_remaining -= 1
            self.unread.append(self.token_id)

    def can_read(self) -> bool:
        return bool(self.unread)

    def read(self) -> dict[int, Any]:
        return {0: SimpleNamespace(generated_ids=[self.unread.pop(0)])}


class FakePipeline:
    """Imitates `ContinuousBatchingPipeline`: each step generates one token for each request."""

    def __init__(self, *_: Any) -> None:
        self.handles = []
        self.max_running = 0

    def add_request(self, number: int, prompt: Any, config: Any) -> FakeHandle:
        assert number == len(self.handles)
        self.handles.append(FakeHandle(prompt, config.max_new_tokens))
        return self.handles[-1]

    def step(self) -> None:
        self.max_running = max(self.max_running, sum(handle.num_remaining > 0 for handle in self.handles))
        for handle in self.handles:
            handle.step()


@pytest.fixture(autouse=True)
def openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    genai = SimpleNamespace(
        GenerationConfig=SimpleNamespace, SchedulerConfig=SimpleNamespace, ContinuousBatchingPipeline=FakePipeline
    )
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=lambda array: array))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)


def set_exit_status(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """Let the process that tries to build a pipeline end with a status."""
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, status))


def test_no_more_requests_than_allowed_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    set_exit_status(monkeypatch, 0)
    engine = openvino_worker.OpenVino(OPTIONS)
    done = engine.run(Task([[5, 1], [6, 1], [7, 1]], 3, at_once=2))
    assert done.token_ids == [[5] * 3, [6] * 3, [7] * 3]
    assert engine._pipeline.max_running == 2
    assert all(0 <= each <= done.wall_s for each in done.first_s)
    assert engine.run(Task([[8]], 1)).token_ids == [[8]]
    engine.close()


@pytest.mark.parametrize(("status", "isa"), [(0, None), (1, None), (-8, "AVX512_CORE_BF16")])
def test_a_pipeline_that_dies_of_a_signal_is_built_without_amx(
    monkeypatch: pytest.MonkeyPatch, status: int, isa: str | None
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")  # so that the variable is restored after the test
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    set_exit_status(monkeypatch, status)
    engine = openvino_worker.OpenVino(OPTIONS)
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") == isa
    assert any("without AMX" in note for note in engine.notes) == bool(isa)
