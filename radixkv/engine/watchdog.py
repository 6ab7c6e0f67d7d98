"""A watchdog thread that detects stalled steps, and steps that keep failing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_CHECKS_PER_TIMEOUT = 20
_MAX_PERIOD_S = 1.0


class Watchdog:
    """Calls a function when a step stalls. A step includes the calls that run before it.

        running  [ step ][ step ][ step ...............................
        watchdog                        └ timeout_s ┘ on_hang, once     └ is_hanging ends with the step

    Args:
        timeout_s: maximum duration of a step, and of an uninterrupted series of failing steps, in seconds.
        on_hang: called on the watchdog's thread, once for each step that takes longer.

    Attributes:
        timeout_s: as in the arguments.
    """

    def __init__(self, timeout_s: float, on_hang: Callable[[], None]) -> None:
        self.timeout_s = timeout_s
        self._on_hang = on_hang
        self._started_s: float | None = None  # start of the running step
        self._reported_start_s: float | None = None  # start of the last step that was reported
        self._failing_since_s: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="radixkv-watchdog", daemon=True)

    @property
    def is_hanging(self) -> bool:
        """Whether the step that runs now has taken too long."""
        return self._reported_start_s is not None and self._reported_start_s == self._started_s

    @property
    def keeps_failing(self) -> bool:
        """Whether all steps have failed for `timeout_s` seconds."""
        since_s = self._failing_since_s
        return since_s is not None and time.monotonic() - since_s >= self.timeout_s

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def step_begins(self) -> None:
        """Record that a step begins. To be called on the thread that runs steps."""
        self._started_s = time.monotonic()

    def step_ends(self, *, is_failing: bool = False) -> None:
        """Record that the step ended, and whether steps fail now. To be called on the same thread."""
        self._started_s = None
        if not is_failing:
            self._failing_since_s = None
        elif self._failing_since_s is None:
            self._failing_since_s = time.monotonic()

    def _watch(self) -> None:
        while not self._stopped.wait(min(_MAX_PERIOD_S, self.timeout_s / _CHECKS_PER_TIMEOUT)):
            started_s = self._started_s
            if (
                started_s is None
                or started_s == self._reported_start_s
                or time.monotonic() - started_s < self.timeout_s
            ):
                continue
            self._reported_start_s = started_s
            self._on_hang()
