"""An item that can't be determined has a reason, and the other items are reported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import first_look
from bench.gpu.first_look import ask, main, output_of


def test_each_question_has_a_row_with_an_answer_or_the_reason_of_its_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(first_look, "QUESTIONS", {"broken": fail, "good": lambda: {"answer": 42}})
    file = tmp_path / "look.json"
    assert main(["--json", str(file)]) == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["is_finished"]
    broken_row, good_row = result["rows"]
    assert (broken_row["is_right"], broken_row["reason"]) == (False, "RuntimeError: no driver")
    assert (good_row["question"], good_row["is_right"], good_row["answer"]) == ("good", True, {"answer": 42})


def test_missing_hanging_and_failing_programs_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert output_of([sys.executable, "-c", "print(7)"]) == "7"
    assert ask("?", lambda: output_of(["no-such-program"]))["reason"] == "FileNotFoundError: no-such-program: not found"
    with pytest.raises(subprocess.CalledProcessError):
        output_of([sys.executable, "-c", "raise SystemExit(3)"])
    monkeypatch.setattr(first_look, "_LIMIT_S", 0.1)
    with pytest.raises(subprocess.TimeoutExpired):
        output_of([sys.executable, "-c", "import time; time.sleep(3600)"])


def test_a_module_that_exists_but_fails_to_import_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_look, "_IMPORT_CODE", "raise ModuleNotFoundError('No module named httpx')")
    assert ask("imports", first_look._try_imports)["reason"] == (
        "RuntimeError: ModuleNotFoundError: No module named httpx"
    )
