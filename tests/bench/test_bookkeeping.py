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


def test_prefills_and_decode_steps_are_measured(tmp_path, capsys, monkeypatch):
    written = []  # the number of rows and the state of each result that was written

    def write(path, result):
        written.append((len(result["rows"]), result["is_finished"]))
        write_json(path, result)

    monkeypatch.setattr(bookkeeping, "write_json", write)
    file = tmp_path / "bookkeeping.json"
    arguments = ["--shape", "tiny", "--prompts", "100", "--batches", "4", "--generations", "2", "--new-tokens", "5"]
    bookkeeping.main([*arguments, "--step-tokens", "64", "--rounds", "1", "--json", str(file)])
    assert written == [(1, False), (2, False), (3, False), (3, True)]
    result = json.loads(file.read_text(encoding="utf-8"))
    cases = [(row["kind"], row["requests"], row["prompt_tokens"], row["steps"]) for row in result["rows"]]
    assert cases == [("prefill", 1, 100, 2), ("prefill", 4, 16, 1), ("decode", 2, 64, 4)]
    for row in result["rows"]:
        assert sum(row["parts_ms"].values()) == pytest.approx(row["bookkeeping_ms"])
        assert row["share"] == pytest.approx(row["bookkeeping_ms"] / row["step_ms"])
        assert {"schedule", "commit", "answer", "rest"} <= row["parts_ms"].keys()
    assert "prefill   1 x   100" in capsys.readouterr().out


def test_the_time_of_an_inner_call_is_not_counted_for_the_outer_one(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(bookkeeping, "time", SimpleNamespace(perf_counter=clock))

    class Phases:
        def outer(self):
            clock.now_s += 1
            self.inner()
            self.inner()

        def inner(self):
            clock.now_s += 10

    phases, stopwatch = Phases(), PhaseStopwatch()
    with stopwatch.watch(phases, "outer", "outer"), stopwatch.watch(phases, "inner", "inner"):
        phases.outer()
    assert stopwatch.num_calls == {"outer": 1, "inner": 2}
    assert stopwatch.seconds == {"inner": 20, "outer": 1}
    phases.inner()  # is not watched any more
    assert stopwatch.num_calls["inner"] == 2


def test_logits_that_differ_from_those_of_the_model_end_the_benchmark(bench, monkeypatch):
    bench.check(100)
    monkeypatch.setattr(bookkeeping.torch, "equal", lambda *_: False)
    with pytest.raises(AssertionError, match="other logits than the model"):
        bench.check(100)


def test_a_prompt_that_reuses_tokens_ends_the_benchmark(bench, monkeypatch):
    monkeypatch.setattr(bench, "_numbers", itertools.repeat(7))
    bench.finish(bench.submit(BookkeepingCase(1, 40)))
    with pytest.raises(AssertionError, match="reuses 1 tokens"):
        bench.finish(bench.submit(BookkeepingCase(1, 40)))
