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
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        timeouts = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
        if method == "result":  # Future.result(timeout)
            timeouts += node.args[:1]
        constants = [timeout.value for timeout in timeouts if isinstance(timeout, ast.Constant)]
        if method in STOPWATCHES or any(is_short(seconds) for seconds in constants):
            yield ast.unparse(node)


def is_short(seconds: object) -> bool:
    """Whether a timeout is too short. A timeout of 0 is allowed, because a call with it does not wait."""
    return isinstance(seconds, int | float) and 0 < seconds < MIN_TIMEOUT_S


def test_tests_measure_no_times_and_have_long_timeouts() -> None:
    assert TESTS
    calls_by_path = {str(path.relative_to(ROOT)): list(violations(path.read_text(encoding="utf-8"))) for path in TESTS}
    assert {path: calls for path, calls in calls_by_path.items() if calls} == {}


def test_stopwatches_and_short_timeouts_are_detected() -> None:
    source = "import timeit\ntime.perf_counter()\nfuture.result(5)\nfuture.result(0)\nprocess.communicate(timeout=10)"
    assert list(violations(source)) == [
        "import timeit",
        "time.perf_counter()",
        "future.result(5)",
        "process.communicate(timeout=10)",
    ]
