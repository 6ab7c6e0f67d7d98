"""A clock that a simulation advances."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """A clock that a simulation advances, with callbacks at given times.

    Attributes:
        now_s: the current time in seconds.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._serials = itertools.count()  # so that callbacks of the same time are called in the order of `call_at`

    def __call__(self) -> float:
        """Return the current time in seconds."""
        return self.now_s

    @property
    def next_s(self) -> float | None:
        """The time of the next callback; None if there is none."""
        return self._events[0][0] if self._events else None

    def call_at(self, when_s: float, callback: Callable[[], object]) -> None:
        """Call a function when the clock reaches `when_s`."""
        heapq.heappush(self._events, (when_s, next(self._serials), callback))

    def advance(self, now_s: float) -> None:
        """Call the functions that are due up to `now_s`, each at its own time, and then set the time to `now_s`.

        If `now_s` has passed, the time stays the same, and functions that are due by now are called.
        """
        now_s = max(now_s, self.now_s)
        while self._events and self._events[0][0] <= now_s:
            when_s, _, callback = heapq.heappop(self._events)
            self.now_s = max(self.now_s, when_s)
            callback()
        self.now_s = now_s
