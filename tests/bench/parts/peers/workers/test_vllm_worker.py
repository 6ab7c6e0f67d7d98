"""The worker requests token ids from vLLM's API, streamed or not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.parts.peers.workers import vllm_worker
from bench.parts.peers.workers.http_engine import HttpEngine
from bench.parts.peers.workers.loop import WorkerOptions
from bench.parts.peers.workers.task import Task

SERVER = str(Path(__file__).with_name("fake_http_server.py"))


def test_tokens_are_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    def start(command: list[str], port: int, environment: dict[str, str]) -> HttpEngine:
        commands.append(command)
        assert environment["VLLM_CACHE_ROOT"] == str(tmp_path / "vllm-cache")
        return HttpEngine([sys.executable, SERVER, *command], port, {})

    monkeypatch.setattr(vllm_worker, "HttpEngine", start)
    engine = vllm_worker.Vllm(WorkerOptions(Path("m"), "bfloat16", 2, "", tmp_path))
    try:
        done = engine.run(Task([[1], [2]], 3, at_once=2))
        assert done.token_ids == [[0, 1, 2], [0, 1, 2]]
        assert all(0 < each <= done.wall_s for each in done.first_s)
        assert engine.run(Task([[1]], 1)).token_ids == [[0]]
    finally:
        engine.close()
    [command] = commands
    assert command[1:3] == ["serve", "m"]
    assert command[command.index("--dtype") + 1] == "bfloat16"
