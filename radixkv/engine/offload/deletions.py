"""The end of a purge: what the stores have deleted."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from radixkv.cache.purge import Purged


class Deletion(NamedTuple):
    """Blocks that a store was told to delete.

    Attributes:
        store: its name.
        num_deleted: blocks that it had; None if it could not be asked.
    """

    store: str
    num_deleted: Future[int | None]


class PurgeBegun(NamedTuple):
    """A purge that is done but for the stores.

    Attributes:
        purged: what became of the blocks on the device.
        deletions: what the stores were told.
    """

    purged: Purged
    deletions: Sequence[Deletion]


def not_asked() -> Future[int | None]:
    """Return the answer of a store that could not be asked."""
    answer: Future[int | None] = Future()
    answer.set_result(None)
    return answer


def when_deleted(begun: Future[PurgeBegun]) -> Future[Purged]:
    """Return a future of the whole outcome, which comes when all stores have answered."""
    done: Future[Purged] = Future()

    def wait_for_stores(begun: Future[PurgeBegun]) -> None:
        if begun.cancelled():
            done.cancel()
        elif not done.set_running_or_notify_cancel():
            return
        elif (error := begun.exception()) is not None:
            done.set_exception(error)
        else:
            _Wait(done, begun.result()).begin()

    begun.add_done_callback(wait_for_stores)
    return done


class _Wait:
    """Waits for the last store."""

    def __init__(self, done: Future[Purged], begun: PurgeBegun) -> None:
        self._done = done
        self._begun = begun
        self._lock = threading.Lock()
        self._num_left = len(begun.deletions) + 1

    def begin(self) -> None:
        for deletion in self._begun.deletions:
            deletion.num_deleted.add_done_callback(lambda _: self._note_end())
        self._note_end()

    def _note_end(self) -> None:
        with self._lock:
            self._num_left -= 1
            if self._num_left:
                return
        self._done.set_result(self._begun.purged._replace(stored_blocks=_sums(self._begun.deletions)))


def _sums(deletions: Sequence[Deletion]) -> dict[str, int | None]:
    """Add up what each store has deleted; None if it could not be asked once."""
    sums: dict[str, int | None] = {}
    for store, deleted in deletions:
        known, number = sums.get(store, 0), None if deleted.cancelled() else deleted.result()
        sums[store] = None if known is None or number is None else known + number
    return sums
