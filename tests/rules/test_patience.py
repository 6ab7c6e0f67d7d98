"""Tests measure no times and use timeouts of at least a minute, so that they pass on a busy machine."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .house import ROOT

MIN_TIMEOUT_S = 60
STOPWATCHES = {"perf_counter", "perf_counter_ns", "process_time", "thread_time"}
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


def violations(source: str) -> Iterator[str]:
    """Yield the stopwatches and short timeouts in a source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom) and "timeit" in ast.unparse(node):
            yield ast.unparse(node)
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        waits = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
        waits += node.args[:1] if name == "result" else []
        if name in STOPWATCHES or any(isinstance(wait, ast.Constant) and is_short(wait.value) for wait in waits):
            yield ast.unparse(node)


def is_short(seconds: object) -> bool:
    """Whether a timeout is too short. 0 does not wait, and is allowed."""
    return isinstance(seconds, int | float) and 0 < seconds < MIN_TIMEOUT_S


def test_tests_measure_no_times_and_have_long_timeouts() -> None:
    found = {str(path.relative_to(ROOT)): list(violations(path.read_text(encoding="utf-8"))) for path in TESTS}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_stopwatches_and_short_timeouts_are_detected() -> None:
    source = "import timeit\ntime.perf_counter()\nfuture.result(5)\nfuture.result(0)\nprocess.communicate(timeout=10)"
    assert list(violations(source)) == [
        "import timeit",
        "time.perf_counter()",
        "future.result(5)",
        "process.communicate(timeout=10)",
    ]
