"""Timeouts for tests, long enough for a machine on which ten busy processes share two cores."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 300.0  # for something that takes seconds on an idle machine, such as a program that imports PyTorch


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when `condition()` holds; call it a hundred times per second."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, f"the condition did not hold within {PATIENCE_S:.0f} s"
        time.sleep(0.01)
