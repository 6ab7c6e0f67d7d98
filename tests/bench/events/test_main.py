"""Prefills are measured next to subscribers, and next to more clients than a server accepts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench.events.__main__ import main, resident_mib

pytestmark = pytest.mark.usefixtures("forked_servers")


@pytest.mark.long
def test_three_passes_on_one_server_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "events.json"
    counts = [
        "--requests",
        "3",
        "--warm-up",
        "1",
        "--tokens",
        "32",
        "--readers",
        "4",
        "--callers",
        "70",
    ]  # 6 more than a server accepts
    assert main([*counts, "--model", "tiny", "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    calls = [(each["callers"], each["accepted"], each["refused"]) for each in written["passes"]]
    assert calls == [(0, 0, 0), (4, 4, 0), (70, 64, 6)]
    assert all(0 < each["ttft_ms"]["p50"] <= each["ttft_ms"]["p99"] for each in written["passes"])
    assert written["command"] == f"python -m bench.events {' '.join(counts)} --model tiny --json {file}"
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_the_memory_of_a_process_is_measured_where_the_system_reports_it() -> None:
    memory_mib = resident_mib(os.getpid())
    assert memory_mib is None or memory_mib > 1
    assert resident_mib(-1) is None
