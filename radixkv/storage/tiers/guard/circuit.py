"""Decides whether a store that failed is asked again."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable


class CircuitState(enum.Enum):
    """State of a circuit."""

    CLOSED = "closed"  # calls go through
    OPEN = "open"  # no call goes through before the pause is over
    TRYING = "trying"  # one call went through after the pause, and has not come back


class Circuit:
    """Opens after failures in a row, and lets one call through after each pause; each pause is twice the last one.

        CLOSED ── failures in a row ──▶ OPEN ── pause ──▶ TRYING ── answer ──▶ CLOSED
                                          ▲── failure ──────┘

    Args:
        clock: seconds, monotonic.
        max_failures: failures in a row that open it.
        is_known: whether the store is known to work. One that is not is left alone after one failure, until it has
            answered.
        first_pause_s, max_pause_s: the first pause and the longest one.

    Attributes:
        num_opened: times that it went from closed to open.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        max_failures: int = 3,
        is_known: bool = True,
        first_pause_s: float = 1.0,
        max_pause_s: float = 60.0,
    ) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._max_failures = max_failures
        self._first_pause_s, self._max_pause_s = first_pause_s, max_pause_s
        self._state, self._num_failures = CircuitState.CLOSED, 0 if is_known else max_failures - 1
        self._pause_s, self._until_s = first_pause_s, 0.0
        self.num_opened = 0

    @property
    def state(self) -> CircuitState:
        """The state now."""
        return self._state

    def lets_through(self) -> bool:
        """Return whether a call may go to the store. Each that may must end with `succeed`, `fail` or `give_back`."""
        with self._lock:
            if self._state is CircuitState.OPEN and self._clock() >= self._until_s:
                self._state = CircuitState.TRYING
                return True
            return self._state is CircuitState.CLOSED

    def succeed(self) -> bool:
        """Note an answer. Return whether it closed the circuit."""
        with self._lock:
            was_closed = self._state is CircuitState.CLOSED
            if self._state is CircuitState.OPEN:  # an answer to a call from before: it says nothing about now
                return False
            self._state, self._num_failures, self._pause_s = CircuitState.CLOSED, 0, self._first_pause_s
            return not was_closed

    def fail(self) -> bool:
        """Note a failure. Return whether it opened a closed circuit."""
        with self._lock:
            self._num_failures += 1
            if self._state is CircuitState.TRYING:
                self._pause_s = min(self._max_pause_s, 2 * self._pause_s)
                self._open()
                return False
            if self._state is CircuitState.CLOSED and self._num_failures >= self._max_failures:
                self._open()
                self.num_opened += 1
                return True
            return False

    def give_back(self) -> None:
        """Note that a call ended without saying anything about the store: the caller cancelled it."""
        with self._lock:
            if self._state is CircuitState.TRYING:
                self._state, self._until_s = CircuitState.OPEN, self._clock()

    def _open(self) -> None:
        self._state, self._until_s = CircuitState.OPEN, self._clock() + self._pause_s
