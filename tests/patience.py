"""Waits of tests, long enough for a machine where ten busy processes share two cores."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 120.0  # for what takes milliseconds on an idle machine


def wait_until(condition: Callable[[], bool]) -> None:
    """Return once `condition()` holds. It is asked a hundred times a second."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, f"expected it within {PATIENCE_S:.0f} s"
        time.sleep(0.01)
