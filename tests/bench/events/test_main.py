"""Prefills are measured next to subscribers, and next to more clients than a server accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.events.__main__ import main

pytestmark = pytest.mark.usefixtures("forked_servers")


@pytest.mark.long
def test_three_passes_on_one_server_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "events.json"
    # Six callers more than a server accepts.
    counts = ["--requests", "3", "--warm-up", "1", "--tokens", "32", "--readers", "4", "--callers", "70"]
    assert main([*counts, "--model", "tiny", "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    calls = [(each["callers"], each["accepted"], each["refused"]) for each in written["passes"]]
    assert calls == [(0, 0, 0), (4, 4, 0), (70, 64, 6)]
    assert all(0 < each["ttft_ms"]["p50"] <= each["ttft_ms"]["p99"] for each in written["passes"])
    assert written["command"] == f"python -m bench.events {' '.join(counts)} --model tiny --json {file}"
    assert len(capsys.readouterr().out.splitlines()) == 4
