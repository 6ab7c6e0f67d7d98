"""Tests time nothing, and wait at least a minute for what must come: they pass on a machine that is busy elsewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .house import ROOT

LEAST_S = 60
STOPWATCHES = {"perf_counter", "perf_counter_ns", "process_time", "thread_time"}
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


def impatience(source: str) -> Iterator[str]:
    """Timed code and short waits in a source."""
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
    """Whether a limit is short; 0 is none, as nothing is waited for."""
    return isinstance(seconds, int | float) and 0 < seconds < LEAST_S


def test_a_test_times_nothing_and_waits_long_enough() -> None:
    found = {str(path.relative_to(ROOT)): list(impatience(path.read_text(encoding="utf-8"))) for path in TESTS}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_the_rule_sees_what_it_forbids() -> None:
    source = "import timeit\ntime.perf_counter()\nfuture.result(5)\nfuture.result(0)\nprocess.communicate(timeout=10)"
    assert list(impatience(source)) == [
        "import timeit",
        "time.perf_counter()",
        "future.result(5)",
        "process.communicate(timeout=10)",
    ]
