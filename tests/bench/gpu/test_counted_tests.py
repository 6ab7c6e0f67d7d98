"""Passed tests are counted per file, and the result file is complete after each of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import counted_tests
from bench.gpu.__main__ import ROOT, lay_out

TESTS = """
import json, pathlib, pytest

def rows():
    file = pathlib.Path("counted.json")
    return json.loads(file.read_text())["rows"] if file.exists() else []

def test_right():
    pass

def test_that_the_one_before_was_counted():
    assert rows()[-1]["passed"] == 1

def test_wrong():
    assert 1 + 1 == 3

@pytest.mark.skip
def test_left_out():
    pass
"""


def test_each_file_has_a_row_with_counts_and_failures(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (tmp_path / "test_some.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "test_others.py").write_text("def test_right(): pass", encoding="utf-8")
    command = [sys.executable, "-m", counted_tests.__name__, "--json", "counted.json", "-n", "0"]
    done = subprocess.run(
        [*command, "test_others.py", "test_some.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    result = json.loads((tmp_path / "counted.json").read_text(encoding="utf-8"))
    assert result["is_finished"]
    assert result["status"] == 1
    others, some = result["rows"]
    assert {key: others[key] for key in ("tests", "passed", "failed", "skipped", "is_right")} == {
        "tests": "test_others.py",
        "passed": 1,
        "failed": 0,
        "skipped": 0,
        "is_right": True,
    }
    assert (some["passed"], some["failed"], some["skipped"], some["is_right"]) == (2, 1, 1, False)
    [failure] = some["failures"]
    assert failure["test"] == "test_some.py::test_wrong"
    assert "assert (1 + 1) == 3" in failure["reason"]
    assert some["seconds"] > 0


@pytest.mark.long
def test_tests_run_from_links_without_plugins_for_timeouts_and_instant_failures(tmp_path: Path) -> None:
    lay_out(tmp_path, None)
    without_plugins = [argument for name in ("timeout", "instafail") for argument in ("-p", f"no:{name}")]
    command = [sys.executable, "-m", counted_tests.__name__, "--json", "counted.json", "-n", "0", *without_plugins]
    tests = "tests/kernels/gpu/test_attention_plan.py"
    done = subprocess.run([*command, tests], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    [row] = json.loads((tmp_path / "counted.json").read_text(encoding="utf-8"))["rows"]
    assert (row["tests"], row["failed"]) == (tests, 0)
    assert row["passed"] > 0
