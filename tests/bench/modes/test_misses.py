from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from bench.modes.misses import _ratio, _row, _Times, main


def test_full_stores_get_what_each_new_prompt_pushes_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "misses.json"
    sizes = ["--requests", "5", "--prompt-tokens", "128", "--disk", str(tmp_path), "--stores", "host and disk"]
    assert main([*sizes, "--json", str(result)]) == 0
    told = json.loads(result.read_text(encoding="utf-8"))
    assert told["command"] == shlex.join(["python", "-m", "bench.modes.misses", *sizes, "--json", str(result)])
    assert told["different_answers"] == 0
    rows = {row["stores"]: row for row in told["rows"]}
    saved = {name: row["saved_blocks"] for name, row in rows.items()}
    num_blocks = saved["host and disk"]["host"]
    assert num_blocks >= 13 * 2, "twelve prompts filled pool and store, five pushed out as many"
    assert saved == {
        "no store": {},
        "no store again": {},
        "host and disk": {"host": num_blocks, "disk": num_blocks},
    }
    itself = {"mean": 1, "standard_error": 0, "is_surely_within": True}
    assert rows["no store"]["ttft_ratio"] == rows["no store"]["processor_ratio"] == itself
    assert all(row["ttft_ratio"]["mean"] > 0 for row in rows.values())
    assert "0 answers differ" in capsys.readouterr().out


def test_a_store_is_compared_with_both_engines_without_one() -> None:
    times = {"no store": [_Times(1.0, 2.0)] * 8, "no store again": [_Times(4.0, 2.0)] * 8}
    times["host"] = [_Times(2.0, 3.0)] * 8
    host, again = _row("host", times, {}), _row("no store again", times, {})
    assert (host["ttft_ratio"]["mean"], host["processor_ratio"]["mean"]) == (1.0, 1.5)
    assert (again["ttft_ratio"]["mean"], again["processor_ratio"]["mean"]) == (4.0, 1.0)


def test_few_requests_that_met_something_else_change_nothing() -> None:
    alike = np.array([0.99, 1.0, 1.01] * 300)
    told = _ratio(alike)
    met = _ratio(np.concatenate([alike, [50.0] * 10]))
    assert told["mean"] == pytest.approx(1.0)
    assert met["mean"] == pytest.approx(1.0, abs=5e-4)
    assert told["is_surely_within"]
    assert met["is_surely_within"]


def test_the_standard_error_is_that_of_many_trimmed_means() -> None:
    draw = np.random.default_rng(0)
    told = [_ratio(draw.normal(1.0, 0.1, 200)) for _ in range(400)]
    spread = np.std([each["mean"] for each in told])
    assert np.mean([each["standard_error"] for each in told]) == pytest.approx(spread, rel=0.1)


def test_a_ratio_that_is_not_known_well_enough_is_not_surely_within_the_bound() -> None:
    assert _ratio(np.array([0.9, 1.0, 1.1] * 300))["is_surely_within"]
    assert not _ratio(np.array([0.9, 1.0, 1.1] * 3))["is_surely_within"]
    assert not _ratio(np.full(100, 1.03))["is_surely_within"]
