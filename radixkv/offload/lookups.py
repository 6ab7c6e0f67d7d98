"""Asks shared stores what they have, while the requests that want it wait."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from radixkv.offload.index.offload_index import OffloadIndex
from radixkv.offload.index.prompt_blocks import KeyedBlock
from radixkv.offload.load_or_compute import LoadOrCompute
from radixkv.offload.purge import SharedPurger
from radixkv.offload.tiers.tier import Tier
from radixkv.scheduling.request import Request


class _Question(NamedTuple):
    """Blocks that a store was asked for on behalf of a request."""

    request: Request
    store: str
    blocks: Sequence[KeyedBlock]
    started_s: float


class Lookups:
    """Finds blocks that other servers stored.

        begin ──▶ stores: exists? ──▶ ended: `OffloadIndex` knows what there is, and loads can begin

    A store's time limit bounds the wait. Nobody asks where computing is supposed to be faster than the answer.

    Args:
        offload_index: tells what has to be asked for, and is told the answers.
        tiers: the shared stores, by name.
        purger: tells which answers are not to be believed.
        choice: knows how long answers and computing take.
        clock: seconds, monotonic.
        wake: called on a store's thread when an answer came, so that `ended` is asked.
        block_size: tokens a block.
    """

    def __init__(
        self,
        offload_index: OffloadIndex,
        tiers: Mapping[str, Tier],
        purger: SharedPurger,
        choice: LoadOrCompute,
        clock: Callable[[], float],
        wake: Callable[[], None],
        block_size: int,
    ) -> None:
        self._index = offload_index
        self._tiers = tiers
        self._purger = purger
        self._choice = choice
        self._clock = clock
        self._wake = wake
        self._block_size = block_size
        self._num_open: dict[Request, int] = {}  # answers that a request waits for
        self._answers: queue.SimpleQueue[tuple[_Question, list[bool] | None, float]] = queue.SimpleQueue()

    def begin(self, request: Request, first_block: int) -> bool:
        """Ask for what a new request could use and nobody knows of. Returns whether it is to wait for `ended`.

        Args:
            request: not admitted yet.
            first_block: whole blocks of its prompt that are on the device.

        Complexity: a hash of all its tokens, if there are shared stores.
        """
        if not self._tiers:
            return False
        blocks = self._index.unknown(request.namespace, request.prompt_tokens, first_block)
        stores = [name for name in self._tiers if not self._purger.is_purging_any(name, blocks)]
        start, num_tokens = first_block * self._block_size, len(blocks) * self._block_size
        asked = [name for name in stores if self._choice.is_worth_asking(name, start, num_tokens)]
        if not blocks or not asked:
            self._choice.doubt(stores if blocks else ())
            return False
        self._num_open[request] = len(asked)
        keys = [each.key for each in blocks]
        for store in asked:
            question = _Question(request, store, blocks, self._clock())
            self._tiers[store].exists(keys).add_done_callback(partial(self._end, question))
        return True

    def ended(self) -> list[Request]:
        """Return the requests whose answers have come since the last call."""
        ended: list[Request] = []
        while not self._answers.empty():
            (request, store, blocks, started_s), are_there, ended_s = self._answers.get()
            if are_there is not None:
                self._choice.note_answer(store, ended_s - started_s)
                found = [block for block, is_there in zip(blocks, are_there, strict=True) if is_there]
                if found and not self._purger.is_purging_any(store, found):
                    self._index.discovered(store, found)
            if request in self._num_open:
                self._num_open[request] -= 1
                if not self._num_open[request]:
                    del self._num_open[request]
                    ended.append(request)
        return ended

    @property
    def has_ended(self) -> bool:
        """Whether answers have come that `ended` has not seen."""
        return not self._answers.empty()

    def leave(self, request: Request) -> None:
        """Forget a request."""
        self._num_open.pop(request, None)

    def _end(self, question: _Question, are_there: Future[list[bool] | None]) -> None:
        """Note an answer, on a thread of the store."""
        self._answers.put((question, None if are_there.cancelled() else are_there.result(), self._clock()))
        self._wake()
