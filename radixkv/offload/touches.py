"""Marks the blocks that requests use on the device as used in the shared stores, and writes lost ones again."""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from radixkv.offload.index.offload_index import OffloadIndex
from radixkv.offload.tiers.tier import Tier

_PERIOD_S = 0.25  # between two touches
_KEYS_PER_TOUCH = 512
_KEYS_PER_S = 2048.0  # on average; a key takes 6 us of a store's thread
# Maximum number of blocks that are written again at once, and per second on average. Without a limit, servers that use
# more blocks than fit into a store would write each other's evicted blocks again endlessly.
_MAX_REWRITES = 64
_REWRITES_PER_S = 16.0


class _Touched(NamedTuple):
    """The result of a touch: which of the keys the store has; None if the call failed."""

    tier: str
    keys: Sequence[bytes]
    are_there: list[bool] | None


class Touches:
    """Touches used blocks in the shared stores, which would otherwise see only loads, and no hits on the device.

        hit, hit, published ──▶ send, at most once per period ──▶ stores ──▶ process_results: requeue lost blocks

    A hit costs the engine's thread one entry in a dictionary. While a touch is in flight, uses are collected for the
    next one. If a call fails, its uses are dropped.

    Args:
        offload_index: collects the uses, and queues blocks to be written again.
        tiers: the shared stores by name.
        clock: seconds, monotonic.
        wake: called on any thread when there is a result, so that the engine calls `process_results`.

    Attributes:
        num_touched_blocks: used blocks that a store still had, by tier.
        num_rewritten_blocks: used blocks that a store had lost, and that were queued again, by tier.
    """

    def __init__(
        self,
        offload_index: OffloadIndex,
        tiers: Mapping[str, Tier],
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self.num_touched_blocks: Counter[str] = Counter()
        self.num_rewritten_blocks: Counter[str] = Counter()
        self._index = offload_index
        self._tiers = tiers
        self._clock = clock
        self._wake = wake
        self._due_s = clock()
        self._num_in_flight = 0
        self._results: queue.SimpleQueue[_Touched] = queue.SimpleQueue()
        self._num_allowed_rewrites = float(_MAX_REWRITES)  # as of `_budgeted_s`
        self._budgeted_s = self._due_s

    def seconds_until_due(self) -> float | None:
        """Return the seconds until `process_results` or `send` must be called; None if neither has anything to do."""
        if not self._results.empty():
            return 0.0
        if self._num_in_flight or not self._index.used_nodes:
            return None
        return max(0.0, self._due_s - self._clock())

    def send(self) -> None:
        """Touch the blocks that were used since the last touch, if the next touch is due."""
        now_s = self._clock()
        if not self._tiers or now_s < self._due_s or self._num_in_flight or not self._index.used_nodes:
            return
        used = self._index.used_nodes.take(_KEYS_PER_TOUCH)
        self._due_s = now_s + max(_PERIOD_S, len(used) / _KEYS_PER_S)
        for name, tier in self._tiers.items():
            keys = [key for key in used if not self._index.tiers[name].is_pending(key)]
            if keys:
                self._num_in_flight += 1
                tier.touch(keys).add_done_callback(partial(self._queue_result, name, keys))

    def process_results(self) -> None:
        """Process the results of touches: queue the blocks that a store has lost and the device still has."""
        while not self._results.empty():
            self._process(self._results.get())

    def finish(self, limit_s: float) -> None:
        """On shutdown, touch the blocks used since the last touch, and queue lost blocks, within `limit_s` seconds."""
        deadline_s = time.monotonic() + limit_s
        while self._num_in_flight or self._index.used_nodes:
            self._due_s = self._clock()
            self.send()
            try:
                if self._num_in_flight:
                    self._process(self._results.get(timeout=max(0.0, deadline_s - time.monotonic())))
            except queue.Empty:
                return

    def _process(self, touched: _Touched) -> None:
        tier, keys, are_there = touched
        self._num_in_flight -= 1
        if are_there is None:
            return
        gone = [key for key, is_there in zip(keys, are_there, strict=True) if not is_there]
        self.num_touched_blocks[tier] += len(keys) - len(gone)
        if gone:
            self._rewrite(tier, gone)

    def _rewrite(self, tier: str, gone: Sequence[bytes]) -> None:
        """Queue as many lost blocks as the limit allows, beginnings of prompts first, since most prompts need them."""
        now_s = self._clock()
        earned = (now_s - self._budgeted_s) * _REWRITES_PER_S
        self._num_allowed_rewrites = min(float(_MAX_REWRITES), self._num_allowed_rewrites + earned)
        self._budgeted_s = now_s
        self._index.lost(tier, gone)
        first = max(0, len(gone) - int(self._num_allowed_rewrites))  # beginnings of prompts come last in `gone`
        num_blocks = self._index.store_again(tier, gone[first:])
        self._num_allowed_rewrites -= num_blocks
        self.num_rewritten_blocks[tier] += num_blocks

    def _queue_result(self, tier: str, keys: Sequence[bytes], touched: Future[list[bool] | None]) -> None:
        """Queue a result. Runs on the thread that ends the call."""
        self._results.put(_Touched(tier, keys, None if touched.cancelled() else touched.result()))
        self._wake()
