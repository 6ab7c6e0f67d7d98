"""Runs tests, and writes the number of passed tests after each of them, with a row per test file.

python -m bench.gpu.counted_tests --json build/tests.json tests/kernels/gpu/test_norm.py
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu.stage import missing_imports
from bench.parts.result_file import write_json

if TYPE_CHECKING:
    import pytest

Row = dict[str, Any]

_MAX_FAILURES = 20
_MAX_FAILURE_CHARACTERS = 2_000  # of the end of the text of a failure

# Each test compiles its own kernels, so each worker keeps one core busy.
_MAX_WORKERS = 8


class OutcomeCounter:
    """A pytest plugin that counts the outcomes of tests by file.

    Args:
        file: result file, written after each phase of a test; None to write no file.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._rows: dict[str, Row] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one phase of a test: its setup, its call, or its teardown."""
        test_file = report.nodeid.partition("::")[0]
        row = self._rows.setdefault(
            test_file, {"tests": test_file, "passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0, "failures": []}
        )
        row["seconds"] += report.duration
        if report.failed:
            row["failed"] += 1
            row["failures"].append({"test": report.nodeid, "reason": str(report.longrepr)[-_MAX_FAILURE_CHARACTERS:]})
        elif report.skipped:
            row["skipped"] += 1
        elif report.when == "call":
            row["passed"] += 1
        self.write(is_finished=False)

    def write(self, *, is_finished: bool, **values: object) -> None:
        """Rewrite the result file. The values are added to it."""
        if self._file is not None:
            rows = [{**row, "is_right": not row["failed"]} for row in self._rows.values()]
            counts = ", ".join(f"{sum(row[key] for row in rows)} {key}" for key in ("passed", "failed", "skipped"))
            write_json(self._file, {"rows": rows, "is_finished": is_finished, "summary": counts, **values})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests. Returns pytest's status."""
    import pytest  # so that a machine without it can import this module

    parser = argparse.ArgumentParser(description="Run tests and count them, file by file.")
    parser.add_argument("--json", type=Path)
    options, pytest_arguments = parser.parse_known_args(arguments)
    worker_arguments = [] if missing_imports(["xdist"]) else ["-n", str(min(_MAX_WORKERS, os.cpu_count() or 1))]
    counter, start_s = OutcomeCounter(options.json), time.monotonic()
    common_arguments = ["-q", "-p", "no:cacheprovider", "-W", "default", "--maxfail", str(_MAX_FAILURES)]
    status = int(pytest.main([*common_arguments, *worker_arguments, *pytest_arguments], plugins=[counter]))
    counter.write(is_finished=True, status=status, seconds=time.monotonic() - start_s)
    return status


if __name__ == "__main__":
    sys.exit(main())
