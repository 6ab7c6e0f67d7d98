from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.windows.lengths import RULES, SHAPES, Shape, main, pools_of, reused_share


def test_pools_take_the_memory_of_one() -> None:
    half = Shape("half", 512, 1, 1)
    num_blocks, num_parts = pools_of(half, 1000, "own pool")
    assert (num_blocks, num_parts) == (1600, 400)
    assert pools_of(half, 1000, "one pool") == (1000, 0)
    assert pools_of(Shape("long", 4096, 1, 1), 1000, "own pool") == (1000, 0)
    assert pools_of(Shape("all", 4096, 1, 0), 1000, "own pool") == (8000, 1000)


@pytest.mark.parametrize("rule", RULES)
def test_prompts_that_come_again_are_found(rule: str) -> None:
    shape = Shape("half", 512, 1, 1)
    assert 0 < reused_share(shape, 256, rule, 2048, num_requests=40, seed=1) < 1


def test_a_table_and_a_file_have_every_model_and_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lengths.json"
    main(["--tokens", "512", "--capacity-tokens", "32768", "--requests", "5", "--json", str(file)])
    result = json.loads(file.read_text())
    assert [row["model"] for row in result["rows"]] == [shape.name for shape in SHAPES]
    assert "bench.windows.lengths --tokens 512" in result["command"]
    assert capsys.readouterr().out.count("prompts of 512 tokens: reused one pool") == len(SHAPES)
