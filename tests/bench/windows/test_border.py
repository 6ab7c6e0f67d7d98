import json
from pathlib import Path

import pytest

from bench.windows.border import ONE_POOL, SHARED, main, reused_share
from bench.windows.traffic import TRAFFICS, Traffic


def traffic_named(name: str) -> Traffic:
    return next(traffic for traffic in TRAFFICS if traffic.name == name)


def test_prompts_matched_whole_or_in_half_reuse_more_than_in_one_pool() -> None:
    for name in "13 prompts matched again", "their first halves matched":
        traffic = traffic_named(name)
        assert reused_share(traffic, SHARED, 1) > reused_share(traffic, ONE_POOL, 1)


def test_prompts_in_turn_are_reused_although_one_pool_reuses_none() -> None:
    traffic = traffic_named("5 prompts in turn")
    assert reused_share(traffic, ONE_POOL, 1) < 0.05
    assert reused_share(traffic, SHARED, 1) > 0.9


def test_the_result_contains_the_reused_share_of_an_earlier_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    main(["--seeds", "1", "--only", "13 prompts", "--json", str(first)])
    main(["--seeds", "1", "--only", "13 prompts", "--before", str(first), "--json", str(second)])
    result = json.loads(second.read_text())
    (row,) = result["rows"]
    assert row["reused"]["before"] == row["reused"][SHARED]
    assert result["command"].startswith("python -m bench.windows.border --seeds 1")
    assert "one pool 0.39" in capsys.readouterr().out
