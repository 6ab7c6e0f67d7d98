from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import llm_overhead


def test_a_single_round_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "overhead.json"
    sizes = ["--prompts", "2", "--prompt-tokens", "9", "--new-tokens", "2", "--rounds", "1"]
    llm_overhead.main([*sizes, "--json", str(file)])
    result = json.loads(file.read_text(encoding="utf-8"))
    assert len(result["ratios"]) == 1
    assert [result["median"]] * 2 == result["quartiles"] == result["ratios"] * 2
    assert result["of_all_rounds"] == pytest.approx(result["median"])
    assert capsys.readouterr().out.startswith("LLM / engine: median ")
