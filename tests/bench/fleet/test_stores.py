from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.fleet import stores

pytestmark = pytest.mark.usefixtures("forked_servers")


def test_both_routers_send_all_prompts_and_their_reuse_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    sizes = ["--groups", "3", "--prompts", "2", "--prefix-tokens", "128", "--question-tokens", "16"]
    capacities = ["--pool-tokens", "512", "--host-bytes", "100000000", "--rounds", "1", "--concurrency", "2"]
    assert stores.main([*sizes, *capacities, "--json", str(file)]) == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["least_computed_tokens"] == 3 * 128 + 6 * 16
    assert [row["router knows"] for row in result["rows"]] == ["devices", "stores"]
    for row in result["rows"]:
        assert row["device"] + row["host"] + row["computed"] == 6 * (128 + 16)
        assert row["computed"] >= result["least_computed_tokens"]
    assert capsys.readouterr().out.splitlines()[-1].endswith("; at least 480 per round must be computed")
