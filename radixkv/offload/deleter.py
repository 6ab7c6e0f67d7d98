"""Deletes blocks from the tiers, and retries what a tier could not be asked."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait

from radixkv.offload.index.offload_index import OffloadIndex
from radixkv.offload.tiers.tier import Tier


class Deleter:
    """Tells stores what to delete. What a store could not be asked is asked again later, all of it in one call.

    Until then it holds blocks that nobody finds, and a next process would find them.

    Args:
        offload_index: knows what stores have been given again.
        tiers: the stores, by name.
        wake: called on a store's thread when it could not be asked, so that `retry` is called.
    """

    def __init__(
        self, offload_index: OffloadIndex, tiers: Mapping[str, Tier], wake: Callable[[], None] = lambda: None
    ) -> None:
        self._index = offload_index
        self._tiers = tiers
        self._wake = wake
        self._open: dict[Future[int | None], tuple[str, Sequence[bytes]]] = {}  # calls that have not ended
        self._ended: queue.SimpleQueue[Future[int | None]] = queue.SimpleQueue()
        self._failed: dict[str, dict[bytes, None]] = {}

    def delete(self, name: str, keys: Sequence[bytes]) -> Future[int | None]:
        """Tell a store to delete blocks. Returns the number of those that it had, None if it could not be asked."""
        deleted = self._tiers[name].delete(keys)
        self._open[deleted] = name, keys
        deleted.add_done_callback(self._end)
        return deleted

    def delete_unknown(self, name: str, keys: Sequence[bytes]) -> None:
        """Tell a store to delete those blocks of which its tier_index does not know.

        Of those that are on their way to it nobody knows yet whether it takes them; they are left for `retry`.
        """
        tier_index = self._index.tiers[name]
        if useless := [key for key in keys if key not in tier_index]:
            self.delete(name, useless)
        if undecided := [key for key in keys if key in tier_index and not tier_index.holds(key)]:
            self._failed.setdefault(name, {}).update(dict.fromkeys(undecided))

    @property
    def has_failed(self) -> bool:
        """Whether a store may have to be asked again."""
        self._note_ended()
        return bool(self._failed)

    def unanswered(self, name: str) -> list[bytes]:
        """List the keys that a store was told to delete, and perhaps has not. Complexity: O(keys of such calls)."""
        self._note_ended()
        in_flight = [key for store, keys in self._open.values() if store == name for key in keys]
        return [*in_flight, *self._failed.get(name, ())]

    def retry(self) -> None:
        """Ask again what could not be asked, but not for blocks that the store has been given again.

        Complexity: O(keys of calls that failed since the last time).
        """
        self._note_ended()
        failed, self._failed = self._failed, {}
        for name, keys in failed.items():
            self.delete_unknown(name, list(keys))

    def finish(self, limit_s: float) -> bool:
        """Ask once more what could not be asked, and wait for the stores. Returns whether all of it is deleted."""
        self.retry()
        ended, open_calls = wait(list(self._open), limit_s)
        return not open_calls and not self._failed and all(map(_has_answered, ended))

    def _end(self, deleted: Future[int | None]) -> None:
        """Note the end of a call, on a thread of the store."""
        self._ended.put(deleted)
        if not _has_answered(deleted):
            self._wake()

    def _note_ended(self) -> None:
        while not self._ended.empty():
            deleted = self._ended.get()
            name, keys = self._open.pop(deleted)
            if not _has_answered(deleted):
                self._failed.setdefault(name, {}).update(dict.fromkeys(keys))


def _has_answered(deleted: Future[int | None]) -> bool:
    return not deleted.cancelled() and deleted.result() is not None
