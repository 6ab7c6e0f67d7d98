"""The servers are measured in turn, and the benchmark fails if a server admits unauthenticated callers."""

from __future__ import annotations

import json

import pytest

from bench.hostile import credentials

pytestmark = pytest.mark.usefixtures("forked_servers")


@pytest.mark.long
def test_four_kinds_of_credentials_are_measured_in_turn(tmp_path, capsys):
    file = tmp_path / "credentials.json"
    credentials.main(["--rounds", "2", "--calls", "3", "--json", str(file)])
    result = json.loads(file.read_text(encoding="utf-8"))
    assert [(row["arm"], row["calls"]) for row in result["rows"]] == [(name, 6) for name in credentials.ARMS]
    assert all(row["call_us"] > 0 for row in result["rows"])
    assert result["rows"][1]["added_to_tls_us_by_round"] == [0, 0]
    assert {"versions", "machine", "command", "rounds"} <= result.keys()
    assert "certificate" in capsys.readouterr().out
