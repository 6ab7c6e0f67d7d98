"""Counts and reports of blocks that came from a store or a server and failed verification."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable

from radixkv.offload.tiers.block_object import ObjectFault

_log = logging.getLogger(__name__)
_LOG_PERIOD_S = 60.0


class RejectedBlocks:
    """Blocks from one source that were not used. Warns at most once per minute of each kind of fault. Thread-safe.

    Args:
        source: where they come from, for the log.
        clock: seconds, monotonic.
    """

    def __init__(self, source: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[ObjectFault] = Counter()
        self._logged: Counter[ObjectFault] = Counter()  # the counts as of the last warning
        self._next_log_s: dict[ObjectFault, float] = {}

    def add(self, faults: Iterable[ObjectFault]) -> None:
        """Count faults, and log them."""
        new = Counter(faults)
        if not new:
            return
        now_s = self._clock()
        with self._lock:
            self._counts.update(new)
            due = [fault for fault in new if now_s >= self._next_log_s.get(fault, now_s)]
            numbers = [(fault, self._counts[fault] - self._logged[fault]) for fault in due]
            for fault in due:
                self._logged[fault] = self._counts[fault]
                self._next_log_s[fault] = now_s + _LOG_PERIOD_S
        for fault, number in numbers:
            received = "one that is" if number == 1 else f"{number} that are"
            _log.warning("%s: expected unmodified blocks of this model, got %s %s", self._source, received, fault.value)

    def counts(self) -> dict[ObjectFault, int]:
        """Return the number of blocks since the start, by fault."""
        with self._lock:
            return dict(self._counts)
