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
_MIN_TOTAL_S = 5e-3  # of all calls but the first: shorter totals are mostly noise
_MAX_LOST_S = 0.03  # total time of calls that waited, from which on the machine counts as busy
# A call counts as one that waited if its threads waited for this time, and for this share of the call. Waking a thread
# takes some time, too.
_WAITED_S, _WAITED_SHARE = 2e-4, 0.25

_THREADS = Path("/proc/self/task")
_SECOND_NS = 1_000_000_000

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
        waited: returns the seconds for which threads of this process waited for a processor; see `waited_s`.

    Attributes:
        now: the argument `now`.
    """

    def __init__(self, now: Callable[[], float], waited: Callable[[], float] = lambda: 0.0) -> None:
        self.now = now
        self._waited = waited
        self._lost_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether timings are unreliable: calls that waited for a processor have taken at least 30 ms in total."""
        return self._lost_s >= _MAX_LOST_S

    @classmethod
    def here(cls) -> Stopwatch:
        """Return a stopwatch for torch's threads. With one thread it measures CPU time, to exclude other processes."""
        return cls(time.thread_time) if torch.get_num_threads() == 1 else cls(time.perf_counter, waited_s)

    def time(self, call: Call, rows: torch.Tensor) -> tuple[torch.Tensor, CallTime]:
        """Time one call. Returns its result and its time."""
        waited_s, start_s = self._waited(), self.now()
        result = call(rows)
        took_s = self.now() - start_s
        has_waited = self._waited() - waited_s > max(_WAITED_S, _WAITED_SHARE * took_s)
        self._lost_s += took_s * has_waited
        return result, CallTime(took_s, has_waited)

    def shortest(self, calls: Iterator[Call], rows: torch.Tensor, known: Sequence[CallTime] = ()) -> float:
        """Return the seconds of the shortest call. Disturbances, and initialization in the first call, only add time.

        Calls that waited are ignored if there are others. On a busy machine two calls are enough.

        Args:
            calls: equivalent functions, called in turn.
            rows: the argument of each call.
            known: times of calls that were made before.
        """
        times = list(known)
        while len(times) < _MIN_CALLS or not (self.is_busy or _is_enough(times)):
            times.append(self.time(next(calls), rows)[1])
        return min((each.seconds for each in times if not each.has_waited), default=min(times).seconds)


def _is_enough(times: Sequence[CallTime]) -> bool:
    undisturbed = [each.seconds for each in times if not each.has_waited]
    is_long = sum(undisturbed[1:]) >= _MIN_TOTAL_S or len(undisturbed) >= _MAX_CALLS
    return len(undisturbed) >= _MIN_CALLS and is_long


def waited_s() -> float:
    """Return the total time for which threads of this process were ready to run but had no processor, in seconds.

    0 if the system does not report it.
    """
    waited_ns = 0
    for thread in os.listdir(_THREADS) if _THREADS.is_dir() else ():
        with contextlib.suppress(OSError):  # there is no such file, or the thread has just ended
            waited_ns += int((_THREADS / thread / "schedstat").read_bytes().split()[1])
    return waited_ns / _SECOND_NS
