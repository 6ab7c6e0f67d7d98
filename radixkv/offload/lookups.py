"""Asks shared stores which blocks they hold, while the requests wait."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from radixkv.offload.index.offload_index import OffloadIndex
from radixkv.offload.index.prompt_blocks import KeyedBlock
from radixkv.offload.load_or_compute import LoadOrCompute
from radixkv.offload.purge import Purger
from radixkv.offload.tiers.tier import Tier
from radixkv.scheduling.request import Request


class _Lookup(NamedTuple):
    """A lookup of blocks in a tier for a request."""

    request: Request
    tier: str
    blocks: Sequence[KeyedBlock]
    started_s: float


class Lookups:
    """Finds blocks that other servers stored in shared stores.

        begin ──▶ stores: exists? ──▶ ended: the index knows the blocks, and loads can begin

    The time limit of the stores bounds the wait. If computing the blocks is estimated to be faster than a lookup, no
    lookup is made, except for a prefetch.

    Args:
        offload_index: knows which blocks have to be looked up, and is notified of the results.
        tiers: the shared stores by name.
        purger: knows which results are outdated by a purge.
        load_or_compute: estimates how long lookups and computing take.
        clock: seconds, monotonic.
        wake: called on any thread when there is a result, so that the engine calls `ended`.
        block_size: tokens per block.
    """

    def __init__(
        self,
        offload_index: OffloadIndex,
        tiers: Mapping[str, Tier],
        purger: Purger,
        load_or_compute: LoadOrCompute,
        clock: Callable[[], float],
        wake: Callable[[], None],
        block_size: int,
    ) -> None:
        self._index = offload_index
        self._tiers = tiers
        self._purger = purger
        self._load_or_compute = load_or_compute
        self._clock = clock
        self._wake = wake
        self._block_size = block_size
        self._num_open: dict[Request, int] = {}  # number of results that a request waits for
        self._results: queue.SimpleQueue[tuple[_Lookup, list[bool] | None, float]] = queue.SimpleQueue()

    def begin(self, request: Request, first_block: int) -> bool:
        """Look up the blocks of a new request that are not in the index. Returns whether it must wait for `ended`.

        Args:
            request: not admitted yet.
            first_block: number of whole blocks of its prompt on the device.

        Complexity: a hash of all its tokens, if there are shared stores.
        """
        if not self._tiers:
            return False
        blocks = self._index.find_unknown(request.namespace, request.prompt_tokens, first_block)
        if not blocks:
            return False
        tiers = [name for name in self._tiers if not self._purger.is_purging_any(name, blocks)]
        start_token = first_block * self._block_size
        num_tokens = len(blocks) * self._block_size
        queried = [
            name
            for name in tiers
            if request.is_prefetch or self._load_or_compute.is_lookup_worthwhile(name, start_token, num_tokens)
        ]
        if not queried:
            self._load_or_compute.shrink_estimates(tiers)  # so that a tier that was slow is tried again
            return False
        self._num_open[request] = len(queried)
        keys = [each.key for each in blocks]
        for tier in queried:
            lookup = _Lookup(request, tier, blocks, self._clock())
            self._tiers[tier].exists(keys).add_done_callback(partial(self._queue_result, lookup))
        return True

    def ended(self) -> list[Request]:
        """Return the requests whose lookups have ended since the last call."""
        ended: list[Request] = []
        while not self._results.empty():
            (request, tier, blocks, started_s), are_there, ended_s = self._results.get()
            if are_there is not None:
                self._load_or_compute.note_lookup(tier, ended_s - started_s)
                found = [block for block, is_there in zip(blocks, are_there, strict=True) if is_there]
                if found and not self._purger.is_purging_any(tier, found):
                    self._index.discovered(tier, found)
            if request in self._num_open:
                self._num_open[request] -= 1
                if not self._num_open[request]:
                    del self._num_open[request]
                    ended.append(request)
        return ended

    @property
    def are_any_open(self) -> bool:
        """Whether requests wait for lookups."""
        return bool(self._num_open)

    @property
    def has_ended(self) -> bool:
        """Whether lookups have ended since the last `ended`."""
        return not self._results.empty()

    def leave(self, request: Request) -> None:
        """Forget a request."""
        self._num_open.pop(request, None)

    def _queue_result(self, lookup: _Lookup, are_there: Future[list[bool] | None]) -> None:
        """Queue a result. Runs on the thread that ends the call."""
        self._results.put((lookup, None if are_there.cancelled() else are_there.result(), self._clock()))
        self._wake()
