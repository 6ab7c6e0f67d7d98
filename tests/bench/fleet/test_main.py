from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.fleet.__main__ import main

pytestmark = pytest.mark.long


def test_a_run_compares_routings_over_both_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.fleet.__main__._DECISIONS", ((16, 2048),))
    trace, result = tmp_path / "chat.jsonl", tmp_path / "fleet.json"
    # Twenty prompts of three blocks, each sent ten times.
    first_ids = [3 * (index % 20) for index in range(200)]
    requests = [
        {
            "timestamp": 900 * index,
            "input_length": 3 * 512,
            "output_length": 1,
            "hash_ids": [first_id, first_id + 1, first_id + 2],
        }
        for index, first_id in enumerate(first_ids)
    ]
    trace.write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="utf-8")
    options = ["--limit", "200", "--replicas", "8", "--routing", "prefix,random", "--decisions", "5"]
    status = main(["--trace", str(trace), *options, "--known-blocks", "20000", "--json", str(result)])
    written = json.loads(result.read_text(encoding="utf-8"))
    assert written["command"].startswith("python -m bench.fleet --trace")
    rows = written["rows"]
    assert [(row["trace"], row["routing"], row["tokens_per_s"]) for row in rows] == [
        (name, routing, rate)
        for name in ("chat.jsonl", "agents")
        for routing, rate in (("prefix", 20_000), ("random", 20_000), ("prefix", 10_000), ("prefix", 5_000))
    ]
    assert rows[0]["share_of_single_cache"] == 1 > rows[1]["share_of_single_cache"]
    assert status == any(row["is_missed"] for row in rows)
    assert [(each["block_size"], each["prompt_tokens"]) for each in written["decisions"]] == [(16, 2560)]
    assert "decision: 64 replicas" in capsys.readouterr().out
