"""How long work on a model says what it is doing."""

from __future__ import annotations

from collections.abc import Callable

# Is called with what is being done now, such as `trying matmuls with weights of 640 by 2048`; must be cheap.
Report = Callable[[str], None]


def report_nothing(_: str) -> None:
    """Drop a report: for callers that do not watch."""
