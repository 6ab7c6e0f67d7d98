"""Shares add up, and only new prompts with correct results are measured."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

from bench import bookkeeping
from bench.bookkeeping import BookkeepingBench, BookkeepingCase, PhaseStopwatch
from bench.exactness import build_runner
from bench.parts.result_file import write_json
from tests.fakes import FakeClock

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def bench():
    runner = build_runner("tiny", 1, torch.float32, torch.device("cpu"), 1024, is_exact=True)
    return BookkeepingBench(runner, step_tokens=64, seed=0)


def test_it_measures_prefills_and_decode_steps(tmp_path, capsys, monkeypatch):
    written = []

    def write(path, result):
        written.append((len(result["rows"]), result["is_finished"]))
        write_json(path, result)

    monkeypatch.setattr(bookkeeping, "write_json", write)
    file = tmp_path / "bookkeeping.json"
    arguments = ["--shape", "tiny", "--prompts", "100", "--batches", "4", "--generations", "2", "--new-tokens", "5"]
    bookkeeping.main([*arguments, "--step-tokens", "64", "--rounds", "1", "--json", str(file)])
    assert written == [(1, False), (2, False), (3, False), (3, True)]
    result = json.loads(file.read_text(encoding="utf-8"))
    shape = [(row["kind"], row["requests"], row["prompt_tokens"], row["steps"]) for row in result["rows"]]
    assert shape == [("prefill", 1, 100, 2), ("prefill", 4, 16, 1), ("decode", 2, 64, 4)]
    for row in result["rows"]:
        assert sum(row["parts_ms"].values()) == pytest.approx(row["bookkeeping_ms"])
        assert row["share"] == pytest.approx(row["bookkeeping_ms"] / row["step_ms"])
        assert {"schedule", "commit", "answer", "rest"} <= row["parts_ms"].keys()
    assert "prefill   1 x   100" in capsys.readouterr().out


def test_a_call_within_a_call_counts_once(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(bookkeeping, "time", SimpleNamespace(perf_counter=clock))

    class Clocked:
        def outer(self):
            clock.now_s += 1
            self.inner()
            self.inner()

        def inner(self):
            clock.now_s += 10

    clocked, stopwatch = Clocked(), PhaseStopwatch()
    with stopwatch.watch(clocked, "outer", "outer"), stopwatch.watch(clocked, "inner", "inner"):
        clocked.outer()
    assert stopwatch.num_calls == {"outer": 1, "inner": 2}
    assert stopwatch.seconds == {"inner": 20, "outer": 1}
    clocked.inner()
    assert stopwatch.num_calls["inner"] == 2


def test_another_answer_than_the_models_is_not_measured(bench, monkeypatch):
    bench.check(100)
    monkeypatch.setattr(bookkeeping.torch, "equal", lambda *_: False)
    with pytest.raises(AssertionError, match="other logits than the model"):
        bench.check(100)


def test_reuse_is_not_measured(bench, monkeypatch):
    monkeypatch.setattr(bench, "_numbers", itertools.repeat(7))
    bench.finish(bench.submit(BookkeepingCase(1, 40)))
    with pytest.raises(AssertionError, match="reuses 1 tokens"):
        bench.finish(bench.submit(BookkeepingCase(1, 40)))
