from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import diagnosis_cost


@pytest.mark.long
def test_misses_and_hits_are_measured_with_and_without_the_profiler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cost.json"
    diagnosis_cost.main(["--prompts", "4", "--prompt-tokens", "80", "--json", str(file)])
    result = json.loads(file.read_text(encoding="utf-8"))
    names = [(row["kind"], row["engine"]) for row in result["rows"]]
    assert names == [(kind, engine) for kind in ("miss", "hit") for engine in ("off", "off again", "on")]
    assert all(row["processor_ratio_of_sums"] > 0 for row in result["rows"])
    assert "misses were examined" in capsys.readouterr().out
