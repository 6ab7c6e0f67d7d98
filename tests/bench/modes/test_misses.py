from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from bench.modes.misses import _summary, main


@pytest.mark.long
def test_full_stores_receive_the_blocks_that_each_new_prompt_evicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "misses.json"
    sizes = ["--sets", "2", "--requests", "5", "--prompt-tokens", "128", "--disk", str(tmp_path)]
    sizes += ["--stores", "host and disk"]
    assert main([*sizes, "--json", str(result)]) == 0
    written = json.loads(result.read_text(encoding="utf-8"))
    assert written["command"] == shlex.join(["python", "-m", "bench.modes.misses", *sizes, "--json", str(result)])
    assert written["different_answers"] == 0
    rows = {row["stores"]: row for row in written["rows"]}
    saved = {name: row["saved_blocks"] for name, row in rows.items()}
    num_blocks = saved["host and disk"]["host"]
    assert num_blocks >= 2 * 13 * 2, "twelve prompts filled pool and store, and five evicted as many blocks, twice"
    assert saved == {
        "no store": {},
        "no store again": {},
        "host and disk": {"host": num_blocks, "disk": num_blocks},
    }
    ratio_to_itself = {"mean": 1, "standard_error": 0, "is_surely_within": True, "sets": [1, 1]}
    assert rows["no store"]["ttft_ratio"] == rows["no store"]["processor_ratio"] == ratio_to_itself
    assert all(row["ttft_ratio"]["mean"] > 0 for row in rows.values())
    assert "0 answers differ" in capsys.readouterr().out


def test_the_standard_error_is_that_between_sets() -> None:
    summary = _summary(np.array([1.0, 1.02, 0.98, 1.0]))
    assert summary["mean"] == pytest.approx(1.0)
    assert summary["standard_error"] == pytest.approx(np.std([1.0, 1.02, 0.98, 1.0], ddof=1) / 2)


def test_a_ratio_that_is_not_known_well_enough_is_not_surely_within_the_bound() -> None:
    assert _summary(np.array([1.0, 1.01] * 4))["is_surely_within"]
    assert not _summary(np.array([0.9, 1.1] * 4))["is_surely_within"]
    assert not _summary(np.full(8, 1.03))["is_surely_within"]
    assert not _summary(np.array([1.0]))["is_surely_within"]
