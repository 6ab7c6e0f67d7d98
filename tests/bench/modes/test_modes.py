from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.modes.__main__ import main
from bench.modes.mode import all_modes
from bench.modes.traffic import traffics

_QUARTER = "a quarter fits"
_SMALL = [
    "--traffic",
    _QUARTER,
    "--documents",
    "4",
    "--rounds",
    "2",
    "--document-tokens",
    "192",
    "--question-tokens",
    "9",
]


def test_all_modes_give_the_same_answers_and_reuse_what_they_should(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, picture = tmp_path / "modes.json", tmp_path / "modes.png"
    assert main([*_SMALL, "--new-tokens", "2", "--json", str(table), "--plot", str(picture)]) == 0
    result = json.loads(table.read_text(encoding="utf-8"))
    assert result["command"].startswith("python -m bench.modes --traffic")
    assert {row["traffic"] for row in result["rows"]} == {_QUARTER}
    assert {row["different_answers"] for row in result["rows"]} == {0}
    rates = {row["mode"]: row["hit_rate"] for row in result["rows"]}
    assert len(rates) == 5
    assert rates["no cache"] == rates["K/V within a request"] == 0
    whole = 192 / (2 * 201)  # each document's whole blocks, in one round of two
    assert rates["prefix cache"] < 0.5 * whole
    assert rates["prefix cache"] < rates["prefix cache, host memory"] <= whole
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "a quarter fits: 4 documents" in capsys.readouterr().out


def test_traffic_asks_about_each_document_in_each_round() -> None:
    fits, quarter, once = traffics(3, 2, 8, 4, 1)
    prompts = list(fits.prompts(100, seed=1))
    assert prompts == list(quarter.prompts(100, seed=1))
    assert len({prompt[:32] for prompt in prompts}) == 3
    assert len(set(prompts)) == len(prompts) == 6
    assert len({prompt[:32] for prompt in once.prompts(100, seed=1)}) == 6


def test_modes_differ_by_name(tmp_path: Path) -> None:
    assert len({mode.name for mode in all_modes(tmp_path)}) == 5
