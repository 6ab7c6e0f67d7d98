"""Stages succeed, fail or time out; the result file is complete after each row, and no stage affects another."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import trials
from bench.gpu.__main__ import ROOT, lay_out, main
from bench.gpu.parts import PARTS
from bench.gpu.product.run_state import STATE_FILE
from bench.gpu.stage import Stage, missing_imports
from radixkv.errors import UnsupportedModel
from radixkv.model.attention.refused_attention import (
    DEQUANTIZED,
    NATIVE,
    POINTERS,
    SPECIALIZED,
    SPECIALIZED_DEQUANTIZED,
    VARIABLE,
)
from tests.patience import PATIENCE_S, wait_until

# The code of stages. `WRITE` writes a result with one row.
WRITE = """
import json, sys, pathlib
print("hello from the stage")
pathlib.Path(sys.argv[2]).write_text(json.dumps({"rows": [1], "is_finished": False}))
"""
# Starts a child process, writes its id, and hangs.
HANG = f"""{WRITE}
import os, subprocess, time
child = subprocess.Popen(["sleep", "3600"])
pathlib.Path("PID_FILE.partial").write_text(str(child.pid))
os.replace("PID_FILE.partial", "PID_FILE")
time.sleep(3600)
"""
# Writes a row, and ends successfully as soon as that row is in the result file of the run.
WATCH = f"""{WRITE}
import time
end_s = time.monotonic() + {PATIENCE_S}
def is_row_in_results():
    stage = json.loads(pathlib.Path("RESULTS").read_text())["stages"].get("watching", {{"result": None}})
    return stage["result"] == {{"rows": [1], "is_finished": False}} and stage["outcome"] == "runs"
while not is_row_in_results():
    assert time.monotonic() < end_s
    time.sleep(0.01)
"""

# A sitecustomize.py that makes transformers impossible to import.
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture
def no_transformers(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide transformers from all processes that are started."""
    folder = tmp_path_factory.mktemp("blocker")
    (folder / "sitecustomize.py").write_text(BLOCKER, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))


def stage(name: str, code: str, **options: Any) -> Stage:
    """Return a stage that runs Python code."""
    return Stage(name, **{"budget_s": PATIENCE_S, "needs": (), "command": shlex.join(["-c", code]), **options})


def run(tmp_path: Path, *stages: Stage, options: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
    """Run stages as a part named `some`; return the exit status and the report."""
    status = main(["--out", str(tmp_path / "out"), *options], {"some": stages})
    return status, json.loads((tmp_path / "out/some.json").read_text(encoding="utf-8"))


def is_alive(pid: str) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().split()[2] != "Z"


def test_the_outcomes_and_results_of_all_stages_are_in_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = run(
        tmp_path,
        stage("good", WRITE),
        stage("bad", WRITE + "sys.exit(3)"),
        stage("impossible", WRITE, needs=("json", "no_such_module.part")),
        stage("silent", "print('no file')"),
        stage("half written", "import sys; open(sys.argv[2], 'w').write('{')"),
    )
    assert status == 1
    outcomes = {name: (each["outcome"], each["result"]) for name, each in report["stages"].items()}
    rows = {"rows": [1], "is_finished": False}
    assert outcomes == {
        "good": ("ran", rows),
        "bad": ("failed with status 3", rows),
        "impossible": ("not run: no_such_module.part cannot be imported", None),
        "silent": ("ran", None),
        "half written": ("ran", None),
    }
    assert report["is_finished"]
    assert report["stages"]["good"]["output"] == "hello from the stage\n"
    assert report["stages"]["good"]["command"] == shlex.join(["python", "-c", WRITE])
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["some.json"]
    table = capsys.readouterr().out.splitlines()[-5:]
    assert [line.split()[0] for line in table] == ["good", "bad", "impossible", "silent", "half"]


def test_the_status_is_0_if_all_stages_succeed(tmp_path: Path) -> None:
    assert run(tmp_path, stage("good", WRITE))[0] == 0


def test_a_run_succeeds_without_an_optional_stage_whose_imports_are_missing(tmp_path: Path) -> None:
    missing = stage("optional", WRITE, needs=("no_such_module",), is_optional=True)
    assert run(tmp_path, stage("good", WRITE), missing)[0] == 0
    assert run(tmp_path, stage("optional", "raise SystemExit(3)", is_optional=True))[0] == 1


def test_the_trials_that_a_stage_depends_on_run_with_it(tmp_path: Path) -> None:
    rows = [{"kernels": SPECIALIZED, "mode": "fast", "is_right": True}]
    write_trials = f"import json, sys; json.dump({{'rows': {rows!r}}}, open(sys.argv[2], 'w'))"
    stages = [
        stage("trials", write_trials, tries_kernels=True),
        stage("apart", WRITE),
        stage("limited", f"import os; print(os.environ[{VARIABLE!r}])", uses_passed_kernels=True),
        stage("dependent", WRITE, needs_kernels=(SPECIALIZED,)),
        stage("late trials", write_trials, tries_kernels=True),
        stage("last", WRITE, needs_kernels=(SPECIALIZED,)),
    ]

    def stages_with(name: str) -> list[str]:
        _, report = run(tmp_path, *stages, options=("--only", name))
        return list(report["stages"])

    assert stages_with("last") == ["trials", "late trials", "last"]
    assert stages_with("apart") == ["apart"]
    assert stages_with("dependent") == ["trials", "dependent"]
    status, report = run(tmp_path, *stages, options=("--only", "limited"))
    assert status == 0
    refused = report["stages"]["limited"]["output"]
    assert f"{SPECIALIZED} in exact mode" in refused
    assert f"{SPECIALIZED} in fast mode" not in refused
    assert NATIVE not in refused, "the kernels of CPUs are not tried, and therefore not refused"


def test_a_row_is_in_the_file_of_the_run_while_its_stage_runs(tmp_path: Path) -> None:
    watching = stage("watching", WATCH.replace("RESULTS", str(tmp_path / "out/some.json")))
    status, report = run(tmp_path, watching)
    assert status == 0, report["stages"]["watching"]["output"]


def test_a_stage_out_of_time_is_killed_with_its_children_and_its_rows_are_reported(tmp_path: Path) -> None:
    pid_file, budget_s = tmp_path / "pid", 1
    while not pid_file.exists():  # on a busy machine, the stage may be killed before it writes the file
        budget_s *= 2
        slow = stage("slow", HANG.replace("PID_FILE", str(pid_file)), budget_s=budget_s)
        status, report = run(tmp_path, slow, stage("next", WRITE))
    assert status == 1
    assert [each["outcome"] for each in report["stages"].values()] == [f"out of time after {budget_s} s", "ran"]
    assert report["stages"]["slow"]["result"]["rows"] == [1]
    assert not is_alive(pid_file.read_text())


def test_a_terminated_run_leaves_a_complete_file_and_no_process(tmp_path: Path) -> None:
    pid_file, out = tmp_path / "pid", tmp_path / "out"
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from bench.gpu import __main__ as run; from bench.gpu.stage import Stage\n"
        f"stages = (Stage('slow', 600, (), {shlex.join(['-c', HANG.replace('PID_FILE', str(pid_file))])!r}),)\n"
        f"run.main = lambda main=run.main: main(['--out', {str(out)!r}], {{'some': stages}}); run.run_and_exit()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    try:
        wait_until(pid_file.exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert not is_alive(pid_file.read_text())
    report = json.loads((out / "some.json").read_text(encoding="utf-8"))
    assert not report["is_finished"]


def test_no_stage_begins_without_time(tmp_path: Path) -> None:
    status, report = run(tmp_path, stage("late", WRITE), options=("--seconds", "0"))
    assert status == 1
    assert report["stages"]["late"]["outcome"] == "not run: no time left"


def test_the_results_of_the_previous_run_are_kept_in_another_file(tmp_path: Path) -> None:
    assert run(tmp_path, stage("one", WRITE))[0] == 0
    assert run(tmp_path, stage("one", "raise SystemExit(5)"))[0] == 1
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["some.earlier.json", "some.json"]
    earlier = json.loads((tmp_path / "out/some.earlier.json").read_text(encoding="utf-8"))
    assert earlier["stages"]["one"]["outcome"] == "ran"


@pytest.mark.long
@pytest.mark.usefixtures("no_transformers")
def test_other_stages_do_not_use_kernels_that_hang_crash_or_are_wrong(tmp_path: Path) -> None:
    trial = f"-m {trials.__name__} --dry-run --module tests.bench.gpu.broken_trial"
    others = shlex.join([SPECIALIZED_DEQUANTIZED, DEQUANTIZED, POINTERS])
    attention = "-m bench.kernels --kernels paged_attention --peers --dry-run"
    status, report = run(
        tmp_path,
        stage("hanging", "", command=f"{trial} --kernels '{SPECIALIZED}' --limit-s 1", tries_kernels=True),
        stage(
            "others", "", command=f"{trial} --kernels {others} --modes fast --limit-s {PATIENCE_S}", tries_kernels=True
        ),
        stage("attention", "", command=attention, uses_passed_kernels=True),
        stage("specialized", WRITE, needs_kernels=(SPECIALIZED, SPECIALIZED_DEQUANTIZED)),
    )
    stages = report["stages"]
    assert [each["outcome"] for each in stages.values()] == [
        "ran",
        "ran",
        "ran",
        f"not run: {SPECIALIZED}, {SPECIALIZED_DEQUANTIZED}: no trial passed",
    ]
    assert status == 1
    reasons = {
        (row["kernels"], row["mode"]): row["reason"]
        for row in stages["hanging"]["result"]["rows"] + stages["others"]["result"]["rows"]
    }
    assert reasons[SPECIALIZED, "fast"] == reasons[SPECIALIZED, "exact"] == "its trial did not end within 1 s"
    assert reasons[SPECIALIZED_DEQUANTIZED, "fast"] == "its trial ended with status -6: an illegal memory access"
    assert "expected a relative distance of at most 0.03 from the reference, got 0.5" in reasons[DEQUANTIZED, "fast"]
    assert reasons[POINTERS, "fast"] is None
    rows = stages["attention"]["result"]["rows"]
    assert all(row["is_right"] for row in rows)
    variants = ["bfloat16", "bfloat16, blocks in order", "bfloat16, exact", "float8_e4m3fn", "int8", "int4"]
    assert [row["case"].partition("after 70, ")[2] for row in rows] == variants


@pytest.mark.long
@pytest.mark.usefixtures("no_transformers")
def test_a_real_stage_runs_dry_from_links_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["--dry-run", "--only", "copy_blocks", "--out", str(out)]) == 0
    assert [file.name for file in out.iterdir()] == ["kernels.json"]
    report = json.loads((out / "kernels.json").read_text(encoding="utf-8"))
    assert list(report["stages"]) == ["copy_blocks"]
    result = report["stages"]["copy_blocks"]["result"]
    assert result["is_finished"]
    assert result["command"].startswith("python -m bench.kernels --kernels copy_blocks --dry-run --json ")


@pytest.mark.long
def test_all_packages_can_be_imported_without_an_installation(tmp_path: Path) -> None:
    wheel = tmp_path / "wheel"
    wheel.mkdir()
    folder = tmp_path / "links"
    folder.mkdir()
    lay_out(folder, wheel)
    code = "import radixkv.kernels.quantization as k, radixkv.service as s, bench.gpu; print(k.__file__, s.__file__)"
    paths = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert paths.split() == [f"{folder}/radixkv/kernels/quantization.py", f"{folder}/radixkv/service/__init__.py"]
    assert (folder / "sglang_wheel").resolve() == wheel


def test_the_modules_that_stages_run_exist() -> None:
    for stages in PARTS.values():
        for each in stages:
            for command in (each.command, each.dry_command or each.command):
                words = shlex.split(command)
                assert words[0] == "-m"
                assert (ROOT / f"{words[1].replace('.', '/')}.py").exists()
                assert all((ROOT / word).exists() for word in words if word.endswith(".py"))


@pytest.mark.parametrize("part", PARTS)
def test_the_budgets_of_a_part_fit_into_nine_minutes(part: str) -> None:
    max_s = {"look": 120, "product": 535}.get(part, 540)
    assert sum(each.budget_s for each in PARTS[part]) <= max_s


def test_trials_come_before_the_stages_that_use_only_passed_kernels() -> None:
    for stages in PARTS.values():
        first = next(index for index, each in enumerate(stages) if each.tries_kernels)
        limited = [index for index, each in enumerate(stages) if each.uses_passed_kernels or each.needs_kernels]
        assert all(first < index for index in limited)


def test_trials_that_hang_are_reported_before_their_stage_ends() -> None:
    """Importing torch may take five seconds, and a process that is killed may take five to end."""
    limited_stages = [
        each for stages in PARTS.values() for each in stages if each.tries_kernels and "--seconds" in each.command
    ]
    assert limited_stages
    for each in limited_stages:
        words = shlex.split(each.command)
        trial_limit_s, all_trials_s = (float(words[words.index(name) + 1]) for name in ("--limit-s", "--seconds"))
        assert 5 + all_trials_s + 5 <= each.budget_s
        assert 2 * trial_limit_s < all_trials_s, "a trial that is late has time to be repeated"


def test_servers_are_started_before_they_are_used_and_with_the_stage_that_uses_them(tmp_path: Path) -> None:
    stages = [
        stage("trials", "", tries_kernels=True),
        stage("start", WRITE, uses_passed_kernels=True, servers="start"),
        stage("call", WRITE, servers="use"),
        stage("apart", WRITE),
    ]
    assert list(run(tmp_path, *stages, options=("--only", "call"))[1]["stages"]) == ["trials", "start", "call"]
    assert list(run(tmp_path, *stages, options=("--only", "apart"))[1]["stages"]) == ["apart"]


def test_servers_are_stopped_before_a_stage_that_does_not_use_them_and_when_the_run_ends(tmp_path: Path) -> None:
    pids_file = tmp_path / "pids"
    start_server = f"""
import json, subprocess, sys, pathlib
server = subprocess.Popen(["sleep", "3600"], start_new_session=True)
facts = {{"name": "E", "pid": server.pid, "address": "", "metrics_url": "", "start_time": 0}}
pathlib.Path({STATE_FILE.name!r}).write_text(json.dumps({{"servers": {{"E": facts}}}}))
with open({str(pids_file)!r}, "a") as file:
    print(server.pid, file=file)
"""
    # A process that its parent has not waited for is a zombie: state Z.
    is_alive_code = (
        f"pid = open({str(pids_file)!r}).read().split()[0]; assert open(f'/proc/{{pid}}/stat').read().split()[2] != 'Z'"
    )
    stages = [
        stage("start", start_server, servers="start"),
        stage("call", is_alive_code, servers="use"),
        stage("apart", is_alive_code),
        stage("last", start_server),
    ]
    outcomes = {name: each["outcome"] for name, each in run(tmp_path, *stages)[1]["stages"].items()}
    assert outcomes == {"start": "ran", "call": "ran", "apart": "failed with status 1", "last": "ran"}
    assert not any(is_alive(pid) for pid in pids_file.read_text().split())


def test_a_trial_that_is_late_is_repeated_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[str] = []

    def try_attention(name: str, use: object, *, command: object, timeout_s: float) -> None:
        attempts.append(name)
        is_first = attempts.count(name) == 1
        if name == "wrong" or (name == "slow" and is_first):
            raise UnsupportedModel("late" if name == "slow" else "wrong")

    times_s = iter(range(0, 10_000, 10))  # each reading of the clock is ten seconds later: all but `wrong` are late
    monkeypatch.setattr(trials, "try_attention", try_attention)
    monkeypatch.setattr(trials, "time", SimpleNamespace(monotonic=lambda: next(times_s)))
    use = next(iter(trials.uses(torch.device("cpu"), trials._DRY_SHAPE, trials._DRY_KIND, ["fast"])))
    late_trials = [trials.KernelTrial(name, use) for name in ("slow", "good")]
    rows = {row["kernels"]: row for row in trials.measure_trials(late_trials, "module", 10.0, 9000.0, workers=1)}
    assert rows["good"]["is_right"]
    assert (rows["slow"]["is_right"], rows["slow"]["is_repeated"]) == (True, True)
    assert attempts == ["slow", "good", "slow"]
    wrong_trials = [trials.KernelTrial("wrong", use)]
    [row] = trials.measure_trials(wrong_trials, "module", 11.0, 9000.0, workers=1)
    assert (row["is_right"], row["is_repeated"]) == (False, False), "a wrong kernel is not tried again"


def test_missing_modules_and_modules_of_missing_packages_are_found() -> None:
    assert missing_imports(["json", "no_such_package.part", "no_such_module"]) == [
        "no_such_package.part",
        "no_such_module",
    ]


def runs_without_transformers(stage: Stage) -> bool:
    return "transformers" not in stage.needs


@pytest.mark.long
@pytest.mark.usefixtures("no_transformers")
def test_kernel_stages_import_no_transformers(tmp_path: Path) -> None:
    lay_out(tmp_path, None)
    modules = {
        shlex.split(each.command)[1] for stages in PARTS.values() for each in stages if runs_without_transformers(each)
    }
    assert {"bench.kernels", "bench.gpu.trials", "bench.gpu.counted_tests"} <= modules
    modules |= {"radixkv.startup.attention_trial", "bench.gpu.dry_run"}
    code = f"import {', '.join(sorted(modules))}\ntry: import transformers\nexcept ImportError: print('blocked')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "blocked\n"


@pytest.mark.slow
@pytest.mark.usefixtures("no_transformers")
@pytest.mark.parametrize("part", ["look", "kernels", "peers"])
def test_kernel_stages_run_dry_without_transformers(part: str, tmp_path: Path) -> None:
    names = [each.name for each in PARTS[part] if runs_without_transformers(each) and not each.is_optional]
    status = main(["--dry-run", "--part", part, "--only", *names, "--out", str(tmp_path)])
    report = json.loads((tmp_path / f"{part}.json").read_text(encoding="utf-8"))
    assert {name: each["outcome"] for name, each in report["stages"].items()} == dict.fromkeys(names, "ran")
    assert all(each["result"]["is_finished"] for each in report["stages"].values())
    assert status == 0
