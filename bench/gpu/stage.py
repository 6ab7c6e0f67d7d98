"""A stage of a run on a GPU: a process with a time limit, and the modules and kernels that it needs."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Outcome = dict[str, Any]

# Unbuffered, so that the output of a stage is complete if it is killed. No stage uses the network.
_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}

_OUTPUT_CHARACTERS = 20_000
_CHECK_PERIOD_S = 0.1  # between two checks of the file of a stage
_REPORT_PERIOD_S = 5.0  # between two reports of a stage that prints but writes no row
_KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Stage:
    """One process of the run. It is called with `--json FILE`, and rewrites this file after each row.

    Attributes:
        name: name of the stage.
        budget_s: seconds after which the process is killed.
        needs: modules without which the process is not started.
        command: arguments of `python`.
        dry_command: arguments of `python` for a small run on a CPU; None for `command` with `--dry-run`.
        takes_sglang: whether the command has the option `--sglang FOLDER`.
        tries_kernels: whether the rows of the stage report which attention kernels passed their trial.
        uses_passed_kernels: whether the stage uses only attention kernels that passed their trial.
        needs_kernels: attention kernels of which at least one must have passed; otherwise the stage is not started.
        is_optional: whether the run succeeds if this stage is not started, for example because a module is missing.
        servers: `start` for the stage that starts the servers of the part, `use` for a stage that needs them, and
            None for any other stage, before which the servers are stopped.
    """

    name: str
    budget_s: float
    needs: tuple[str, ...]
    command: str
    dry_command: str | None = None
    takes_sglang: bool = False
    tries_kernels: bool = False
    uses_passed_kernels: bool = False
    needs_kernels: tuple[str, ...] = ()
    is_optional: bool = False
    servers: Literal["start", "use"] | None = None


def missing_imports(names: Sequence[str]) -> list[str]:
    """Return the modules that are not found on this machine. A module that is found may still fail to import."""
    return [name for name in names if not _is_found(name)]


def _is_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that contains the module is missing
        return False


def run_stage(
    name: str,
    command: Sequence[str],
    folder: Path,
    budget_s: float,
    report: Callable[[Outcome], None],
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run one stage until it ends or reaches its time limit.

    Args:
        name: name of the stage.
        command: arguments of `python`, without the result file.
        folder: folder with the import namespace; the stage's own files are written there too.
        budget_s: seconds after which the stage and all processes it started are killed.
        report: is called with the outcome so far: about a tenth of a second after each row, and every few seconds while
            the stage prints but writes no row.
        environment: variables of the stage, in addition to those of this process.

    Returns:
        `outcome` in words (`ran` on success), `seconds`, `command`, `result` as the stage wrote it last, None if it
        wrote none, and the end of its `output`.
    """
    files = _StageFiles(folder / f"{name}.json", folder / f"{name}.log", shlex.join(["python", *command]))
    with files.log.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, *command, "--json", str(files.result_file)],
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT, **(environment or {})},
            start_new_session=True,
        )
        try:
            ending = _watch(process, files, budget_s, report)
        finally:
            _kill_group(process)  # also the processes that the stage started
    return files.read_outcome(ending)


class _StageFiles:
    """The files of a stage, and what was last read from them."""

    def __init__(self, result_file: Path, log: Path, command: str) -> None:
        self.result_file = result_file
        self.log = log
        self._command = command
        self._start_s = time.monotonic()
        self._read_stamp: tuple[int, int] | None = None  # of the result file that was last read
        self._reported_s = self._start_s
        self._logged_bytes = 0
        self._result: Any = None

    def has_update(self) -> bool:
        """Whether there is a new row, or, some seconds after the last report, new output."""
        return self._has_new_rows() or (
            time.monotonic() - self._reported_s > _REPORT_PERIOD_S and self.log.stat().st_size != self._logged_bytes
        )

    def _has_new_rows(self) -> bool:
        return self._stamp() not in (None, self._read_stamp)

    def _stamp(self) -> tuple[int, int] | None:
        """Return a value that changes whenever the result file is replaced; None if there is no file."""
        try:
            status = self.result_file.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def read_outcome(self, ending: str) -> Outcome:
        """Read the files, and return the outcome as `run_stage` does, with the given words for how the stage ended."""
        stamp = self._stamp()
        if stamp is not None:
            try:
                self._result = json.loads(self.result_file.read_text(encoding="utf-8"))
            except ValueError:  # the file is partly written; the rows that were read earlier are kept
                stamp = None
        self._read_stamp = stamp
        output = self.log.read_text(encoding="utf-8", errors="replace")
        self._reported_s = time.monotonic()
        self._logged_bytes = self.log.stat().st_size
        return {
            "outcome": ending,
            "seconds": time.monotonic() - self._start_s,
            "command": self._command,
            "result": self._result,
            "output": output[-_OUTPUT_CHARACTERS:],
        }


def _watch(
    process: subprocess.Popen[bytes], files: _StageFiles, budget_s: float, report: Callable[[Outcome], None]
) -> str:
    """Wait for the process, and report its rows and output. Returns how it ended, or that it timed out."""
    end_s = time.monotonic() + budget_s
    while (left_s := end_s - time.monotonic()) > 0:
        try:
            status = process.wait(timeout=min(_CHECK_PERIOD_S, left_s))
        except subprocess.TimeoutExpired:
            if files.has_update():
                report(files.read_outcome("runs"))
        else:
            return "ran" if status == 0 else f"failed with status {status}"
    return f"out of time after {budget_s:.0f} s"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all processes of the group have ended
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a process that blocks in a driver cannot be killed
        process.wait(_KILL_TIMEOUT_S)
