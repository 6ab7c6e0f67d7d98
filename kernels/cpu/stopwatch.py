"""Times calls on a machine that may run other programs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

_MIN_CALLS, _MAX_CALLS = 2, 20
_MIN_TOTAL_S = 5e-3  # time of all calls but the first in total: shorter totals are mostly noise
# The machine counts as busy as soon as calls that waited for a processor have taken this time in total.
_MAX_DISTURBED_S = 0.03
# A call counts as one that waited if its threads waited for longer than this time, and for longer than this share of
# the call. Shorter waits may be due to the time that waking a thread takes.
_MIN_WAIT_S, _MIN_WAIT_SHARE = 2e-4, 0.25

_THREADS = Path("/proc/self/task")
_NS_PER_S = 1_000_000_000

Call = Callable[[torch.Tensor], torch.Tensor]


class CallTime(NamedTuple):
    """The time of a call.

    Attributes:
        seconds: how long the call took.
        has_waited: whether threads of the call waited for a processor that other programs used.
    """

    seconds: float
    has_waited: bool


class Stopwatch:
    """Times calls with rows.

    Args:
        now: the clock, in seconds.
        waited: returns the total seconds for which threads of this process have waited for a processor; see
            `waited_s`.

    Attributes:
        now: the argument `now`.
    """

    def __init__(self, now: Callable[[], float], waited: Callable[[], float] = lambda: 0.0) -> None:
        self.now = now
        self._waited = waited
        self._disturbed_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether timings are unreliable: calls that waited for a processor have taken at least 30 ms in total."""
        return self._disturbed_s >= _MAX_DISTURBED_S

    @classmethod
    def here(cls) -> Stopwatch:
        """Return a stopwatch for torch's threads. With one thread it measures CPU time, to exclude other processes."""
        return cls(time.thread_time) if torch.get_num_threads() == 1 else cls(time.perf_counter, waited_s)

    def time(self, call: Call, rows: torch.Tensor) -> tuple[torch.Tensor, CallTime]:
        """Time one call. Returns its result and its time."""
        waited_before_s, start_s = self._waited(), self.now()
        result = call(rows)
        took_s = self.now() - start_s
        has_waited = self._waited() - waited_before_s > max(_MIN_WAIT_S, _MIN_WAIT_SHARE * took_s)
        if has_waited:
            self._disturbed_s += took_s
        return result, CallTime(took_s, has_waited)

    def shortest_s(self, calls: Iterator[Call], rows: torch.Tensor, earlier: Sequence[CallTime] = ()) -> float:
        """Time calls, and return the seconds of the shortest one: disturbances and initialization only add time.

        Calls that waited are ignored if there are others. On a busy machine two calls are enough.

        Args:
            calls: equivalent functions, called in turn.
            rows: the argument of each call.
            earlier: times of calls that were made before.
        """
        times = list(earlier)
        while len(times) < _MIN_CALLS or not (self.is_busy or _are_enough(times)):
            times.append(self.time(next(calls), rows)[1])
        return min((call_time.seconds for call_time in times if not call_time.has_waited), default=min(times).seconds)


def _are_enough(times: Sequence[CallTime]) -> bool:
    undisturbed_s = [call_time.seconds for call_time in times if not call_time.has_waited]
    is_long_enough = sum(undisturbed_s[1:]) >= _MIN_TOTAL_S or len(undisturbed_s) >= _MAX_CALLS
    return len(undisturbed_s) >= _MIN_CALLS and is_long_enough


def waited_s() -> float:
    """Return the total time for which threads of this process were ready to run but had no processor, in seconds.

    0 if the system does not report it.
    """
    waited_ns = 0
    for thread in os.listdir(_THREADS) if _THREADS.is_dir() else ():
        with contextlib.suppress(OSError):  # there is no such file, or the thread has just ended
            waited_ns += int((_THREADS / thread / "schedstat").read_bytes().split()[1])
    return waited_ns / _NS_PER_S
