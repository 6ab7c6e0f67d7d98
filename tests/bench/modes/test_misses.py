from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from bench.modes.misses import _ratio, main


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
    assert rows["no store"]["ttft_ratio"] == rows["no store"]["processor_ratio"] == {"median": 1, "low": 1, "high": 1}
    assert all(row["ttft_ratio"]["low"] <= row["ttft_ratio"]["high"] for row in rows.values())
    assert "0 answers differ" in capsys.readouterr().out


def test_the_interval_is_that_of_the_median() -> None:
    ratios = [0.9, 1.0, 1.1] * 300 + [50.0] * 10
    told = _ratio(ratios, np.random.default_rng(0))
    assert told == {"median": 1.0, "low": 1.0, "high": 1.0}
    few = _ratio([0.9, 1.0, 1.1], np.random.default_rng(0))
    assert (few["low"], few["high"]) == (0.9, 1.1)
