"""Deletes blocks from the tiers, and retries deletions that failed."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Generic, NamedTuple, TypeVar

from radixkv.offload.index.offload_index import OffloadIndex
from radixkv.offload.tiers.tier import Tier

T = TypeVar("T")


class RetriedCalls(Generic[T]):
    """Keeps the tasks of calls that delete from tiers until the calls have succeeded. The owner repeats failed ones.

        start ──▶ in flight ─┬─ succeeded
                             └─ failed ── take_failed ──▶ started again by the owner

    Only the engine's thread uses it; the calls may end on any thread.

    Args:
        wake: called on any thread when a call has failed, so that the engine repeats it.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._in_flight: dict[Future[int | None], T] = {}
        self._ended: queue.SimpleQueue[Future[int | None]] = queue.SimpleQueue()
        self._failed: list[T] = []

    def start(self, task: T, call: Future[int | None]) -> None:
        """Record a call that has begun.

        Args:
            task: what the call does.
            call: future of the number of deleted blocks, None if the call fails.
        """
        self._in_flight[call] = task
        call.add_done_callback(self._queue_ended)

    def add_failed(self, task: T) -> None:
        """Add a task whose call has not been made, so that `take_failed` returns it."""
        self._failed.append(task)

    def unconfirmed(self) -> list[T]:
        """List the tasks in flight and those that failed. Complexity: O(these tasks)."""
        self._note_ended()
        return [*self._in_flight.values(), *self._failed]

    @property
    def has_failed(self) -> bool:
        """Whether there are calls to repeat."""
        self._note_ended()
        return bool(self._failed)

    def take_failed(self) -> list[T]:
        """Return the tasks that failed, and forget them. The caller starts them again."""
        self._note_ended()
        failed, self._failed = self._failed, []
        return failed

    def wait(self, limit_s: float) -> bool:
        """Wait for the calls in flight, at most `limit_s`. Returns whether all calls have succeeded."""
        ended, in_flight = wait(list(self._in_flight), limit_s)  # callbacks may run after `wait` has returned
        return not in_flight and not self.has_failed and all(map(_has_succeeded, ended))

    def _queue_ended(self, call: Future[int | None]) -> None:
        """Queue the result of a call. Runs on the thread that ends the call."""
        self._ended.put(call)
        if not _has_succeeded(call):
            self._wake()

    def _note_ended(self) -> None:
        while not self._ended.empty():
            call = self._ended.get()
            task = self._in_flight.pop(call)
            if not _has_succeeded(call):
                self._failed.append(task)


class _DeleteTask(NamedTuple):
    """Keys of blocks to delete from a tier."""

    tier: str
    keys: Sequence[bytes]


class Deleter:
    """Deletes blocks from tiers. Failed deletions are retried later, in one call per tier.

    Until a deletion succeeds, the tier may hold blocks that are not in the index, but that the next process would find.

    Args:
        offload_index: knows which blocks have been stored again.
        tiers: the tiers by name.
        wake: called on any thread when a call has failed, so that the engine calls `retry`.
    """

    def __init__(
        self, offload_index: OffloadIndex, tiers: Mapping[str, Tier], wake: Callable[[], None] = lambda: None
    ) -> None:
        self._index = offload_index
        self._tiers = tiers
        self._calls = RetriedCalls[_DeleteTask](wake)

    def delete(self, name: str, keys: Sequence[bytes]) -> Future[int | None]:
        """Delete blocks from a tier. Returns a future of the number of deleted blocks; None if the call fails."""
        deleted = self._tiers[name].delete(keys)
        self._calls.start(_DeleteTask(name, keys), deleted)
        return deleted

    def delete_unknown(self, name: str, keys: Sequence[bytes]) -> None:
        """Delete those blocks from a tier that are not in its index.

        Whether a block that is being saved must be deleted is known only after the save, so a later `retry` decides it.
        """
        tier_index = self._index.tiers[name]
        if useless := [key for key in keys if key not in tier_index]:
            self.delete(name, useless)
        if undecided := [key for key in keys if key in tier_index and not tier_index.holds(key)]:
            self._calls.add_failed(_DeleteTask(name, undecided))

    @property
    def has_failed(self) -> bool:
        """Whether there are deletions to retry."""
        return self._calls.has_failed

    def unconfirmed(self, name: str) -> list[bytes]:
        """List the keys of a tier whose deletion is not confirmed. Complexity: O(unconfirmed keys of all tiers)."""
        return [key for tier, keys in self._calls.unconfirmed() if tier == name for key in keys]

    def retry(self) -> None:
        """Retry failed deletions, except of blocks that have been stored again.

        Complexity: O(keys of failed calls).
        """
        failed_keys: dict[str, dict[bytes, None]] = {}
        for name, keys in self._calls.take_failed():
            failed_keys.setdefault(name, {}).update(dict.fromkeys(keys))
        for name, unique_keys in failed_keys.items():
            self.delete_unknown(name, list(unique_keys))

    def finish(self, limit_s: float) -> bool:
        """Retry failed deletions, and wait for all calls, at most `limit_s`. Returns whether everything is deleted."""
        self.retry()
        return self._calls.wait(limit_s)


def _has_succeeded(call: Future[int | None]) -> bool:
    return not call.cancelled() and call.result() is not None
