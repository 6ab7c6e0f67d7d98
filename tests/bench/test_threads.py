"""The benchmark of threads runs its servers in turn, and compares both conditions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import threads
from bench.threads import ThreadSetting, table


@pytest.mark.long
def test_each_row_is_measured_on_a_quiet_and_on_a_busy_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "threads.json"
    options = ["--models", "tiny", "--threads", "1", "--rounds", "1", "--new-tokens", "4", "--busy", "1"]
    assert threads.main([*options, "--json", str(file)]) == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    measured = {(row["condition"], row["row"]) for row in result["rows"]}
    assert measured == {(condition, row) for condition in threads.CONDITIONS for row in threads.ROWS}
    assert all(0 < row["min_ms"] <= row["ms"] <= row["max_ms"] for row in result["rows"])
    assert "busy/quiet" in capsys.readouterr().out


def test_the_table_compares_busy_with_quiet() -> None:
    rows = [
        {"model": "tiny", "threads": 2, "checkout": None, "condition": condition, "row": row, "ms": milliseconds}
        for row in threads.ROWS
        for condition, milliseconds in (("quiet", 10.0), ("busy", 25.0))
    ]
    assert table(rows, [ThreadSetting("tiny", 2, None)]).splitlines()[3].split() == ["busy/quiet", "2.50x"]
