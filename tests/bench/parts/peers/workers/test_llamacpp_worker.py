"""The worker asks llama.cpp's API, and fills every slot before a shared prefix is timed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.parts.peers.workers import llamacpp_worker
from bench.parts.peers.workers.http_engine import HttpEngine
from bench.parts.peers.workers.loop import Options
from bench.parts.peers.workers.task import Task

SERVER = str(Path(__file__).with_name("fake_http_server.py"))
OPTIONS = Options(Path("m.gguf"), "float32", 2, "", Path())


def test_tokens_come_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    def start(command: list[str], port: int) -> HttpEngine:
        commands.append(command)
        return HttpEngine([sys.executable, SERVER, *command], port)

    (tmp_path / "llama-server").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(llamacpp_worker, "HttpEngine", start)
    engine = llamacpp_worker.LlamaCpp(OPTIONS)
    try:
        done = engine.run(Task([[1], [2, 3]], 3, at_once=2))
        assert done.token_ids == [[0, 1, 2], [0, 1, 2]]
        assert done.cached_tokens == [0, 1]
        assert len(engine.run(Task([[1, 2]], 1, fills_cache=True)).token_ids) == 16
    finally:
        engine.close()
    [command] = commands
    assert command[command.index("--cache-type-k") + 1] == "f32"


def test_without_a_server_it_says_where_it_looked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"expected llama-server under {tmp_path}"):
        llamacpp_worker.LlamaCpp(OPTIONS)
