"""Calls functions later, all on one thread."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import Protocol


class Alarms(Protocol):
    """Time as a guarded store sees it; tests have one that stands still."""

    def now_s(self) -> float:
        """Return the time, monotonic."""

    def call_later(self, delay_s: float, function: Callable[[], None]) -> Callable[[], None]:
        """Call a function after a delay. Return what cancels that."""


class AlarmClock:
    """One thread that sleeps until the next call is due. A daemon: it keeps no process."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serials = itertools.count()
        self._changed = threading.Condition()
        self._is_closed = False
        threading.Thread(target=self._run, name="alarm-clock", daemon=True).start()

    def now_s(self) -> float:
        """Return the time, monotonic."""
        return time.monotonic()

    def call_later(self, delay_s: float, function: Callable[[], None]) -> Callable[[], None]:
        """Call a function after a delay; it must be short. Return what cancels that.

        Complexity: O(log n) of calls that are due later. A cancelled call stays among them, without its function.
        """
        serial = next(self._serials)
        holder = [function]
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + delay_s, serial, lambda: holder[0]() if holder else None))
            if self._due[0][1] == serial:
                self._changed.notify()
        return holder.clear

    def close(self) -> None:
        """End the thread; what is due later is never called."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_closed and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._is_closed:
                    return
                _, _, function = heapq.heappop(self._due)
            function()
