"""Engines take turns; one that can't be installed, does not start or dies is reported, and the others continue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import peers
from bench.parts.peers.engines import PeerSetting
from bench.parts.peers.environments import NotInstalled
from bench.parts.peers.machine_limits import Machine
from bench.parts.peers.worker_process import WorkerProcess
from tests.bench.parts.peers.fake_processes import make_fake_worker

WORKER_MODES = {"radixkv": "", "vllm": "differs", "transformers": "late", "transformers-batching": "dies"}


@pytest.fixture
def fake_engines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace engines by fake workers. The value is the list of the engines that were called, in order."""
    called: list[str] = []

    def build(name: str, setting: PeerSetting, *_: Any) -> WorkerProcess:
        if name == "openvino":
            raise NotInstalled("openvino: no network")
        return make_fake_worker(name, WORKER_MODES[name], setting.threads)

    original_run = WorkerProcess.run

    def run(self: WorkerProcess, *arguments: Any) -> Any:
        called.append(self.name)
        return original_run(self, *arguments)

    monkeypatch.setattr(peers, "build_worker", build)
    monkeypatch.setattr(peers, "measure_machine", lambda dtype, threads: Machine(1e10, threads * 1e11, 4))
    monkeypatch.setattr(WorkerProcess, "run", run)
    return called


def test_working_engines_are_compared_and_others_are_reported(
    fake_engines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, plot = tmp_path / "peers.json", tmp_path / "peers.svg"
    arguments = ["--quick", "--rows", "warm", "demo-4", "--dtypes", "float32", "--threads", "1"]
    arguments += ["--engines", "radixkv", "openvino", "vllm", "transformers", "transformers-batching"]
    arguments += ["--cache", str(tmp_path)]
    assert peers.main([*arguments, "--json", str(file), "--plot", str(plot)]) == 1
    result = json.loads(file.read_text(encoding="utf-8"))
    warm, demo = result["rows"]
    assert (warm["row"], demo["row"], demo["threads"]) == ("warm", "demo-4", 2)
    assert set(warm["engines"]) == set(demo["engines"]) == {"radixkv", "vllm"}
    assert warm["ratio"] == warm["engines"]["radixkv"]["wall_s"] / warm["engines"]["vllm"]["wall_s"]
    assert warm["engines"]["vllm"]["different_first_tokens"] == warm["engines"]["vllm"]["first_tokens"] == 8
    assert result["skipped"] == {"openvino": "openvino: no network"}
    assert [failure.split(": ")[1] for failure in result["failures"]] == ["transformers", "transformers-batching"] * 2
    assert result["engines"]["radixkv"]["notes"] == ["float32, OMP_NUM_THREADS=1", "float32, OMP_NUM_THREADS=2"]
    assert result["command"].startswith("python -m bench.peers --quick --rows warm demo-4")
    assert fake_engines[:7] == ["radixkv", "vllm", "transformers-batching", "vllm", "radixkv", "radixkv", "vllm"]
    out = capsys.readouterr().out
    assert "skipped openvino: openvino: no network" in out
    assert "vllm 8 of 8" in out
    assert plot.exists()


def test_starts_are_measured_while_no_other_engine_runs(
    fake_engines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[str] = []
    started: list[str] = []
    original_enter, original_stop = WorkerProcess.__enter__, WorkerProcess.stop

    def enter(self: WorkerProcess) -> WorkerProcess:
        assert not running
        running.append(self.name)
        started.append(self.name)
        return original_enter(self)

    def stop(self: WorkerProcess) -> None:
        running.remove(self.name)
        original_stop(self)

    monkeypatch.setattr(WorkerProcess, "__enter__", enter)
    monkeypatch.setattr(WorkerProcess, "stop", stop)
    file = tmp_path / "peers.json"
    arguments = ["--quick", "--rows", "start", "--dtypes", "float32", "--threads", "1", "--cache", str(tmp_path)]
    assert peers.main([*arguments, "--engines", "radixkv", "openvino", "vllm", "--json", str(file)]) == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    [row] = result["rows"]
    assert set(result["engines"]) == {"radixkv", "vllm"}, "their versions are reported"
    assert started == ["radixkv", "vllm", "vllm", "radixkv", "radixkv", "vllm"]
    assert fake_engines == []
    assert [len(each["wall_s_each"]) for each in row["engines"].values()] == [2, 2]
    assert all(each["wall_s"] > 0 for each in row["engines"].values())
    assert row["ratio"] == row["engines"]["radixkv"]["wall_s"] / row["engines"]["vllm"]["wall_s"]


def test_an_interrupted_run_reports_its_results_so_far(
    fake_engines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_measure = peers.PeerComparison.measure

    def measure(self: peers.PeerComparison, setting: PeerSetting, rows: Any) -> None:
        if setting.model == "tiny":
            raise KeyboardInterrupt
        original_measure(self, setting, rows)

    monkeypatch.setattr(peers.PeerComparison, "measure", measure)
    file = tmp_path / "peers.json"
    arguments = ["--quick", "--rows", "warm", "demo-4", "--dtypes", "float32", "--threads", "1", "--engines", "radixkv"]
    assert peers.main([*arguments, "--cache", str(tmp_path), "--json", str(file)]) == 0
    assert [row["row"] for row in json.loads(file.read_text(encoding="utf-8"))["rows"]] == ["warm"]
    assert set(fake_engines) == {"radixkv"}
