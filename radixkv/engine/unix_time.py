"""Unix times for callers, from times of the engine's clock."""

from __future__ import annotations

import time
from collections.abc import Callable

from radixkv.api.result import Retained
from radixkv.api.retention import Grant


def unix_time_of(when_s: float, clock: Callable[[], float]) -> float:
    """Return the Unix time at which a clock shows `when_s`.

    It is slightly earlier if the thread is interrupted between reading the two clocks.
    """
    return time.time() + when_s - clock()


def retained_until(grant: Grant, clock: Callable[[], float]) -> Retained:
    """Return a grant with its expiry in Unix time; `clock` is the clock of the grant."""
    return Retained(grant, None if grant.expires_s is None else unix_time_of(grant.expires_s, clock))
