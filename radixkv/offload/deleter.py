"""Deletes blocks from the tiers, and retries deletions that failed."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait

from radixkv.offload.index.offload_index import OffloadIndex
from radixkv.offload.tiers.tier import Tier


class Deleter:
    """Deletes blocks from tiers. Failed deletions are retried later, in one call per tier.

    Until then a tier holds blocks that are not in the index, but that the next process would find.

    Args:
        offload_index: knows which blocks have been stored again.
        tiers: the tiers by name.
        wake: called on a store's thread when a call has failed, so that the engine calls `retry`.
    """

    def __init__(
        self, offload_index: OffloadIndex, tiers: Mapping[str, Tier], wake: Callable[[], None] = lambda: None
    ) -> None:
        self._index = offload_index
        self._tiers = tiers
        self._wake = wake
        self._open: dict[Future[int | None], tuple[str, Sequence[bytes]]] = {}  # calls in flight
        self._ended: queue.SimpleQueue[Future[int | None]] = queue.SimpleQueue()
        self._failed: dict[str, dict[bytes, None]] = {}

    def delete(self, name: str, keys: Sequence[bytes]) -> Future[int | None]:
        """Delete blocks from a tier. Returns the number of deleted blocks, None if the call fails."""
        deleted = self._tiers[name].delete(keys)
        self._open[deleted] = name, keys
        deleted.add_done_callback(self._end)
        return deleted

    def delete_unknown(self, name: str, keys: Sequence[bytes]) -> None:
        """Delete those blocks from a tier that are not in its index.

        Blocks that are being saved are deleted by a later `retry`, since the tier may still store them.
        """
        tier_index = self._index.tiers[name]
        if useless := [key for key in keys if key not in tier_index]:
            self.delete(name, useless)
        if undecided := [key for key in keys if key in tier_index and not tier_index.holds(key)]:
            self._failed.setdefault(name, {}).update(dict.fromkeys(undecided))

    @property
    def has_failed(self) -> bool:
        """Whether there are deletions to retry."""
        self._note_ended()
        return bool(self._failed)

    def unanswered(self, name: str) -> list[bytes]:
        """List the keys of a tier whose deletion is not confirmed. Complexity: O(these keys)."""
        self._note_ended()
        in_flight = [key for store, keys in self._open.values() if store == name for key in keys]
        return [*in_flight, *self._failed.get(name, ())]

    def retry(self) -> None:
        """Retry failed deletions, except of blocks that have been stored again.

        Complexity: O(keys of failed calls).
        """
        self._note_ended()
        failed, self._failed = self._failed, {}
        for name, keys in failed.items():
            self.delete_unknown(name, list(keys))

    def finish(self, limit_s: float) -> bool:
        """Retry failed deletions and wait for all calls. Returns whether everything is deleted."""
        self.retry()
        ended, open_calls = wait(list(self._open), limit_s)
        return not open_calls and not self._failed and all(map(_has_answered, ended))

    def _end(self, deleted: Future[int | None]) -> None:
        """Queue the result of a call. Runs on a thread of the store."""
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
