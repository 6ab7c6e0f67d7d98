"""Notices a step that takes far too long, from a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_LOOKS_PER_TIMEOUT = 20
_MAX_PERIOD_S = 1.0


class Watchdog:
    """Tells when a step hangs.

        running  [ step ][ step ][ step ...............................
        told                            └ timeout_s ┘ on_hang, once     └ is_hanging ends with the step

    Args:
        timeout_s: how long a step may take.
        on_hang: called on the watchdog's thread, once for each step that takes longer.

    Attributes:
        timeout_s: as above.
    """

    def __init__(self, timeout_s: float, on_hang: Callable[[], None]) -> None:
        self.timeout_s = timeout_s
        self._on_hang = on_hang
        self._started_s: float | None = None
        self._told_start_s: float | None = None  # of the step that was told of
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="radixkv-watchdog", daemon=True)

    @property
    def is_hanging(self) -> bool:
        """Whether the step that runs now has taken too long."""
        return self._told_start_s is not None and self._told_start_s == self._started_s

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def step_begins(self) -> None:
        """To be called on the thread that runs steps."""
        self._started_s = time.monotonic()

    def step_ends(self) -> None:
        """To be called on the same thread."""
        self._started_s = None

    def _watch(self) -> None:
        while not self._stopped.wait(min(_MAX_PERIOD_S, self.timeout_s / _LOOKS_PER_TIMEOUT)):
            started_s = self._started_s
            if started_s is None or started_s == self._told_start_s or time.monotonic() - started_s < self.timeout_s:
                continue
            self._told_start_s = started_s
            self._on_hang()
