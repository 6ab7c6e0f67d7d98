"""Divides the time limit of a run among its parts."""

from __future__ import annotations

import time


class TimeBudget:
    """The time from the construction of this object to a limit.

    Args:
        limit_s: seconds; None for no limit.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._end_s = None if limit_s is None else time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds until the limit, at least 0; infinite without a limit."""
        return float("inf") if self._end_s is None else max(0.0, self._end_s - time.monotonic())

    def share_s(self, share: float, max_s: float = float("inf")) -> float:
        """Return a share of the seconds left, or `max_s` if that is less; infinite without any limit."""
        return min(share * self.left_s, max_s)
