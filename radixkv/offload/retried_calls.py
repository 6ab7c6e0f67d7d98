"""Calls to tiers that are retried until they succeed."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

T = TypeVar("T")


class RetriedCalls(Generic[T]):
    """Keeps the tasks of calls to tiers until the calls have succeeded. The owner repeats the failed ones.

        start ──▶ in flight ─┬─ succeeded
                             └─ failed ── take_failed ──▶ started again by the owner

    Only the engine's thread uses it; the calls may end on any thread.

    Args:
        wake: called on any thread when a call has failed, so that the engine repeats it.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
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


def _has_succeeded(call: Future[int | None]) -> bool:
    return not call.cancelled() and call.result() is not None
