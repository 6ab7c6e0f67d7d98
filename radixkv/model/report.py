"""Progress reports of long operations on a model."""

from __future__ import annotations

from collections.abc import Callable

# Called with a description of the current operation, such as `trying matmuls with 640 by 2048 weights`; must be cheap.
Report = Callable[[str], None]


def report_nothing(_: str) -> None:
    """Ignore a report."""
