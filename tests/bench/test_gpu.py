"""Stages succeed, fail or run out of time; their files are whole, and no stage hinders another."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import ROOT, STAGES, Stage, lay_out, main, missing_imports
from tests.patience import PATIENCE_S

WRITE = """
import json, sys, pathlib
print("hello from the stage")
pathlib.Path(sys.argv[2]).write_text(json.dumps({"rows": [1], "command": "elsewhere", "is_finished": False}))
"""
HANG = f"""{WRITE}
import subprocess, time
pathlib.Path("PID_FILE").write_text(str(subprocess.Popen(["sleep", "3600"]).pid))
time.sleep(3600)
"""


def stage(name: str, code: str, **options: Any) -> Stage:
    return Stage(name, **{"budget_s": PATIENCE_S, "needs": (), "command": shlex.join(["-c", code]), **options})


def run(tmp_path: Path, *stages: Stage, options: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
    status = main(["--out", str(tmp_path / "out"), *options], stages)
    return status, json.loads((tmp_path / "out/gpu.json").read_text(encoding="utf-8"))


def test_each_stage_is_reported_and_what_it_wrote_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run(
        tmp_path,
        stage("good", WRITE),
        stage("bad", WRITE + "sys.exit(3)"),
        stage("impossible", WRITE, needs=("json", "no_such_module.part")),
        stage("silent", "print('no file')", has_result=False),
    )
    assert status == 1
    outcomes = {name: (each["outcome"], each["has_result"]) for name, each in report["stages"].items()}
    assert outcomes == {
        "good": ("ran", True),
        "bad": ("failed with status 3", True),
        "impossible": ("not run: no_such_module.part can't be imported", False),
        "silent": ("ran", False),
    }
    assert report["stages"]["good"]["output"] == "hello from the stage\n"
    files = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert files == ["bad.json", "good.json", "gpu.json"]
    result = json.loads((tmp_path / "out/good.json").read_text(encoding="utf-8"))
    assert result["rows"] == [1]
    assert result["command"] == report["stages"]["good"]["command"] == shlex.join(["python", "-c", WRITE])
    table = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split()[0] for line in table] == ["good", "bad", "impossible", "silent"]


def test_all_good_is_status_0(tmp_path: Path) -> None:
    assert run(tmp_path, stage("good", WRITE))[0] == 0


def test_a_stage_out_of_time_is_killed_with_its_children_and_leaves_a_whole_file(tmp_path: Path) -> None:
    pid_file, budget_s = tmp_path / "pid", 1
    while not pid_file.exists():  # a busy machine takes longer to get there
        budget_s *= 2
        slow = stage("slow", HANG.replace("PID_FILE", str(pid_file)), budget_s=budget_s)
        status, report = run(tmp_path, slow, stage("next", WRITE))
    assert status == 1
    assert [each["outcome"] for each in report["stages"].values()] == [f"out of time after {budget_s} s", "ran"]
    assert json.loads((tmp_path / "out/slow.json").read_text(encoding="utf-8"))["is_finished"] is False
    state = Path(f"/proc/{pid_file.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_no_stage_begins_without_time(tmp_path: Path) -> None:
    status, report = run(tmp_path, stage("late", WRITE), options=("--seconds", "0"))
    assert status == 1
    assert report["stages"]["late"]["outcome"] == "not run: no time left"


def test_no_result_of_an_earlier_run_is_left(tmp_path: Path) -> None:
    assert run(tmp_path, stage("one", WRITE))[0] == 0
    assert run(tmp_path, stage("one", "raise SystemExit(5)"))[0] == 1
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["gpu.json"]


def test_a_real_stage_runs_dry_from_links_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["--dry-run", "--only", "copy_blocks", "--out", str(out)]) == 0
    result = json.loads((out / "copy_blocks.json").read_text(encoding="utf-8"))
    assert result["is_finished"]
    assert result["command"] == "python -m bench.kernels --kernels copy_blocks --dry-run"
    assert list(json.loads((out / "gpu.json").read_text(encoding="utf-8"))["stages"]) == ["copy_blocks"]


def test_the_namespace_is_whole_without_an_installation(tmp_path: Path) -> None:
    wheel = tmp_path / "wheel"
    wheel.mkdir()
    folder = tmp_path / "links"
    folder.mkdir()
    lay_out(folder, wheel)
    code = "import radixkv.kernels.quantization as k, radixkv.service as s, bench.gpu; print(k.__file__, s.__file__)"
    paths = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert paths.split() == [f"{folder}/radixkv/kernels/quantization.py", f"{folder}/radixkv/service/__init__.py"]
    assert (folder / "sglang_wheel").resolve() == wheel


def test_what_stages_run_exists() -> None:
    for each in STAGES:
        for command in (each.command, each.dry_command or each.command):
            words = shlex.split(command)
            assert words[0] == "-m"
            files = [word for word in words if word.endswith(".py")]
            assert files or (ROOT / f"{words[1].replace('.', '/')}.py").exists()
            assert all((ROOT / file).exists() for file in files)


def test_a_module_in_a_package_that_is_not_there_is_missing() -> None:
    assert missing_imports(["json", "no_such_package.part", "no_such_module"]) == [
        "no_such_package.part",
        "no_such_module",
    ]
