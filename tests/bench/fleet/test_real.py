from __future__ import annotations

import importlib.util
import json

import pytest

from bench.fleet.real import main, ratios


def test_times_are_compared_at_the_same_rate() -> None:
    def row(routing: str, rate: float | None, p50: float) -> dict:
        settings = {"groups": 83, "prompts": 3, "routing": routing, "rate": rate, "of_capacity": rate}
        return {**settings, "ttft_ms": {"p50": p50, "p99": 10 * p50, "mean": 0.0}}

    rows = [row("round-robin", 1.0, 100.0), row("prefix", 1.0, 50.0), row("round-robin", 1.2, 900.0)]
    assert ratios(rows) == [{"groups": 83, "prompts": 3, "rate": 1.0, "of_capacity": 1.0, "p50": 2.0, "p99": 2.0}]
    assert len(ratios([*rows, row("prefix", 1.2, 90.0)])) == 2, "both rates have a row of each routing"
    without_answers = row("prefix", 1.2, 90.0) | {"ttft_ms": None}
    assert len(ratios([*rows, without_answers])) == 1, "a pass without answers has no times to compare"


def test_a_wrong_geometry_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--geometry", "83by3"])
    assert "expected GROUPSxPROMPTS" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra ray is not installed")
def test_a_small_fleet_is_measured(tmp_path) -> None:
    file = tmp_path / "real.json"
    sizes = ["--geometry", "6x5", "--prefix-tokens", "256", "--question-tokens", "32", "--new-tokens", "4"]
    assert main([*sizes, "--concurrency", "2", "--rates", "1.0", "--calls", "5", "--json", str(file)]) == 0
    result = json.loads(file.read_text("utf-8"))
    assert [row["routing"] for row in result["rows"]] == ["round-robin", "prefix"] * 2
    assert [row["requests"] for row in result["rows"]] == [30] * 4
    assert [row["of_capacity"] for row in result["rows"]] == [None, None, 1.0, 1.0]
    assert result["rows"][1]["token_hit_rate"] > result["rows"][0]["token_hit_rate"]
    assert [ratio["of_capacity"] for ratio in result["ratios"]] == [None, 1.0]
    assert (result["kill"]["wrong_answers"], result["kill"]["failed_before_first_token"]) == (0, 0)
    assert result["costs"]["route_ms"] > 0
