"""Every benchmark that bench/README.md lists is a command, and every result names what it was measured with."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

_BENCH = Path(__file__).parents[2] / "bench"
_COMMANDS = sorted(set(re.findall(r"`(bench\.[a-z_.]+)`", (_BENCH / "README.md").read_text(encoding="utf-8"))))


def test_the_page_lists_benchmarks() -> None:
    assert {"bench.replay", "bench.peers"} <= set(_COMMANDS)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", _COMMANDS)
def test_a_benchmark_is_a_command_with_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__")
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("file", sorted((_BENCH / "results").glob("*.json")), ids=lambda file: file.stem)
def test_a_result_names_its_command_commit_machine_and_versions(file: Path) -> None:
    fields = {"command", "commit", "date", "machine", "versions"}
    if file.stem == "simulate_returns":  # an older result; see bench/README.md
        fields = {"command"}
    result = json.loads(file.read_text(encoding="utf-8"))
    assert [name for name in sorted(fields) if not result.get(name)] == []
