from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.adapters import _KINDS, main


@pytest.mark.long
def test_each_kind_of_step_is_timed_with_one_adapter_and_with_eight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "adapters.json"
    main(["--rank", "3", "--rounds", "1", "--json", str(file)])
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["command"].startswith("python -m bench.adapters --rank 3")
    assert len(result["rows"]) == len(_KINDS)
    for row in result["rows"]:
        assert row["ms"].keys() == {"none", "one", "eight", "eight and none"}
        assert min(row["ms"].values()) > 0
        assert row["ratio"] == pytest.approx(row["ms"]["one"] / row["ms"]["eight"])
    assert "one / eight" in capsys.readouterr().out
