"""Times calls on a machine that may have other work."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

_FEWEST_CALLS, _MOST_CALLS = 2, 20
_LEAST_S = 5e-3  # of all calls together but the first one: shorter ones are lost in what else the machine does
_MOST_LOST_S = 0.03  # of all calls that waited

# A call waited if its threads did for this time, and for this part of it: to wake a thread takes time, too.
_WAITED_S, _WAITED_SHARE = 2e-4, 0.25

_THREADS = Path("/proc/self/task")
_SECOND_NS = 1_000_000_000

Call = Callable[[torch.Tensor], torch.Tensor]


class Took(NamedTuple):
    """The time of a call.

    Attributes:
        seconds: that it took.
        has_waited: whether other programs had the processor for a part of it.
    """

    seconds: float
    has_waited: bool


class Stopwatch:
    """Times calls with rows.

    Args:
        now: seconds.
        waited: seconds for which threads of this process waited for a processor, as `waited_s` returns it.

    Attributes:
        now: as above.
    """

    def __init__(self, now: Callable[[], float], waited: Callable[[], float] = lambda: 0.0) -> None:
        self.now = now
        self._waited = waited
        self._lost_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether calls that waited for a processor took 30 ms together, so that timings are unreliable.

        With two threads a call takes as long as others may have a processor, 8 ms in place of 0.03; one thread wins.
        """
        return self._lost_s >= _MOST_LOST_S

    @classmethod
    def here(cls) -> Stopwatch:
        """Return one for torch's threads. With one thread it measures CPU time, which other processes do not affect."""
        return cls(time.thread_time) if torch.get_num_threads() == 1 else cls(time.perf_counter, waited_s)

    def time(self, call: Call, rows: torch.Tensor) -> tuple[torch.Tensor, Took]:
        """Call once. Returns the answer, and what it took."""
        waited_s, start_s = self._waited(), self.now()
        answer = call(rows)
        took_s = self.now() - start_s
        has_waited = self._waited() - waited_s > max(_WAITED_S, _WAITED_SHARE * took_s)
        self._lost_s += took_s * has_waited
        return answer, Took(took_s, has_waited)

    def shortest(self, calls: Iterator[Call], rows: torch.Tensor, known: Sequence[Took] = ()) -> float:
        """Return the seconds of the shortest call: preparing the first one and other programs only add to it.

        Calls that waited do not count if there are others. On a busy machine two calls are enough.

        Args:
            calls: equal ones, to be made in turn.
            rows: for each.
            known: what some of them took already.
        """
        took = list(known)
        while len(took) < _FEWEST_CALLS or not (self.is_busy or _is_enough(took)):
            took.append(self.time(next(calls), rows)[1])
        return min((each.seconds for each in took if not each.has_waited), default=min(took).seconds)


def _is_enough(took: Sequence[Took]) -> bool:
    undisturbed = [each.seconds for each in took if not each.has_waited]
    is_long = sum(undisturbed[1:]) >= _LEAST_S or len(undisturbed) >= _MOST_CALLS
    return len(undisturbed) >= _FEWEST_CALLS and is_long


def waited_s() -> float:
    """Return how long threads of this process were ready to run and had no processor, in seconds since they began.

    0 if the system does not report it.
    """
    waited_ns = 0
    for thread in os.listdir(_THREADS) if _THREADS.is_dir() else ():
        with contextlib.suppress(OSError):  # there is no such file, or the thread has just ended
            waited_ns += int((_THREADS / thread / "schedstat").read_bytes().split()[1])
    return waited_ns / _SECOND_NS
