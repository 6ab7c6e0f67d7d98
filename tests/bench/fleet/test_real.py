from __future__ import annotations

import importlib.util
import json

import pytest

from bench.fleet.grouped_prompts import Told
from bench.fleet.real import judge_kill, main


def test_answers_beside_a_kill_are_judged() -> None:
    before = [Told(0.0, 0.1, 1.0, (1, 2, 3), 0)] * 5
    after = [
        Told(0.0, 0.1, 0.5, (1, 2, 3), 0),
        Told(0.5, 0.1, 1.5, (1, 2), 0, "cut"),
        Told(0.5, None, 1.5, (), 0, "refused"),
        Told(0.5, 0.1, 3.5, (1, 2, 3), 0),
        Told(5.0, 0.1, 1.0, (1, 9, 3), 0),
    ]
    judged = judge_kill(before, after, 1.0)
    assert (judged["requests"], judged["under_way"]) == (5, 3)
    assert (judged["failed_before_first_token"], judged["ended_after_first_token"]) == (1, 1)
    assert (judged["wrong_answers"], judged["longest_gap_s"]) == (1, 3.5)
    assert judged["errors"] == ["cut", "refused"]


def test_a_wrong_geometry_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--geometry", "83by3"])
    assert "expected GROUPSxPROMPTS" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra ray is not installed")
def test_a_small_fleet_is_measured(tmp_path) -> None:
    file = tmp_path / "real.json"
    sizes = ["--geometry", "6x5", "--prefix-tokens", "256", "--question-tokens", "32", "--new-tokens", "4"]
    assert main([*sizes, "--concurrency", "2", "--calls", "5", "--json", str(file)]) == 0
    result = json.loads(file.read_text("utf-8"))
    assert [row["routing"] for row in result["rows"]] == ["prefix", "round-robin"]
    assert [row["requests"] for row in result["rows"]] == [30, 30]
    assert result["rows"][0]["token_hit_rate"] > result["rows"][1]["token_hit_rate"]
    assert (result["kill"]["wrong_answers"], result["kill"]["failed_before_first_token"]) == (0, 0)
    assert result["costs"]["route_ms"] > 0
