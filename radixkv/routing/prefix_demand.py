"""The work that requests for each prefix bring."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

_MEMORY_S = 30.0
_MAX_PREFIXES = 4096


class PrefixDemand:
    """Estimates, for the prefixes that were asked for last, how many replicas their requests would keep busy.

    Args:
        memory_s: seconds over which demand is averaged: what came `t` seconds ago counts `exp(-t / memory_s)`.
        max_prefixes: prefixes to remember; the one that was not asked for the longest is forgotten.
        clock: seconds, never going back.
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
        self._known: OrderedDict[int, tuple[float, float]] = OrderedDict()  # seconds of work, and when that was

    def __len__(self) -> int:
        return len(self._known)

    def of(self, key: int) -> float:
        """Return seconds of work a second. Complexity: O(1)."""
        work_s, then_s = self._known.get(key, (0.0, 0.0))
        return work_s * math.exp((then_s - self._clock()) / self._memory_s) / self._memory_s

    def add(self, key: int, work_s: float) -> None:
        """Note a request for a prefix. Complexity: O(1)."""
        self._known[key] = (self.of(key) * self._memory_s + work_s, self._clock())
        self._known.move_to_end(key)
        if len(self._known) > self._max_prefixes:
            self._known.popitem(last=False)
