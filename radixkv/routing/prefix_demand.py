"""The demand for each prefix: the work that recent requests for it caused."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

_MEMORY_S = 30.0
_MAX_PREFIXES = 4096


class PrefixDemand:
    """Estimates how many replicas the requests for each recent prefix would keep busy.

    Args:
        memory_s: time constant of the average: work from `t` seconds ago has the weight `exp(-t / memory_s)`.
        max_prefixes: number of prefixes to track; the least recently requested one is dropped.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        *,
        memory_s: float = _MEMORY_S,
        max_prefixes: int = _MAX_PREFIXES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory_s = memory_s
        self._max_prefixes = max_prefixes
        self._clock = clock
        # By prefix: the decayed seconds of work, and the time up to which they are decayed.
        self._work: OrderedDict[int, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._work)

    def of(self, key: int) -> float:
        """Return the number of replicas that requests for a prefix would keep busy. Complexity: O(1)."""
        work_s, then_s = self._work.get(key, (0.0, 0.0))
        return work_s * math.exp((then_s - self._clock()) / self._memory_s) / self._memory_s

    def add(self, key: int, work_s: float) -> None:
        """Record a request for a prefix that takes `work_s` seconds to compute. Complexity: O(1)."""
        self._work[key] = (self.of(key) * self._memory_s + work_s, self._clock())
        self._work.move_to_end(key)
        if len(self._work) > self._max_prefixes:
            self._work.popitem(last=False)
