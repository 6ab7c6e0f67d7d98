"""The gap is only the host's work between the end of a step and the start of the next one."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from bench import step_gap
from bench.step_gap import IdleRunner, decoding_core
from tests.fakes import FakeClock


def test_steps_that_are_started_ahead_and_steps_that_are_not_are_measured(tmp_path, capsys):
    file = tmp_path / "gap.json"
    options = "--requests 1 3 --prompts 70 --waiting 0 2 --steps 5 --rounds 2"
    step_gap.main([*options.split(), "--json", str(file)])
    result = json.loads(file.read_text(encoding="utf-8"))
    cases = [(row["requests"], row["prompt_tokens"], row["waiting"]) for row in result["rows"]]
    assert cases == [(1, 70, 0), (1, 70, 2), (3, 70, 0), (3, 70, 2)]
    for row in result["rows"]:
        assert row["ratio"] == pytest.approx(row["ahead_ms"] / row["after_ms"])
        assert row["ahead_ms"] > 0
    assert "requests  prompt" in capsys.readouterr().out


@pytest.mark.parametrize("num_waiting", [0, 3])
@pytest.mark.parametrize("is_ahead", [True, False])
def test_reporting_tokens_is_in_the_gap_only_if_no_step_is_started_ahead(is_ahead, num_waiting, monkeypatch):
    runner = IdleRunner(is_asynchronous=is_ahead)
    core = decoding_core(runner, num_requests=2, prompt_tokens=70, num_steps=5, num_waiting=num_waiting)
    assert len(core._scheduler.running) == 2
    publish_token, clock = core._completer._publish_token, FakeClock()
    monkeypatch.setattr(step_gap, "time", SimpleNamespace(perf_counter=clock))

    def slow_publish_token(*arguments):
        clock.now_s += 1
        publish_token(*arguments)

    monkeypatch.setattr(core._completer, "_publish_token", slow_publish_token)
    core.step()
    runner.gaps_s.clear()
    for _ in range(4):
        core.step()
    assert len(runner.gaps_s) == 4
    if is_ahead:
        assert runner.gaps_s == [0, 0, 0, 0]
    else:
        assert runner.gaps_s == [2, 2, 2, 2], "the clock advances by a second for the token of each of two requests"
