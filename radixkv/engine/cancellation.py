"""Cancellation: collects requests that are cancelled, late, finished early by their caller, or that must fail."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from sortedcontainers import SortedList

from radixkv.api.result import GenerationFuture
from radixkv.errors import DeadlinePassed, RadixKVError
from radixkv.scheduling.request import Request


class Cancellations:
    """Collects the requests that must end early, until the engine ends them between two steps.

    Other threads only cancel or finish futures. All methods are for the engine's thread.
    """

    def __init__(self) -> None:
        self._deadlines = SortedList()  # of (deadline_s, arrival, request); arrivals are unique
        self._cancelled: deque[weakref.ref[Request]] = deque()  # appended to by other threads
        self._finished: deque[weakref.ref[Request]] = deque()  # appended to by other threads
        self._failed: dict[Request, RadixKVError] = {}

    def watch(self, request: Request) -> None:
        """Watch a request's deadline and its future. Complexity: O(log watched)."""
        if request.params.deadline_s is not None:
            self._deadlines.add((request.params.deadline_s, request.arrival, request))
        weak = weakref.ref(request)  # a strong reference would form a cycle that only the garbage collector frees

        def note_cancellation(future: Future[Any]) -> None:
            if future.cancelled():
                self._cancelled.append(weak)

        request.future.add_done_callback(note_cancellation)
        if isinstance(request.future, GenerationFuture):
            request.future.watch_finish(lambda: self._finished.append(weak))

    def forget(self, request: Request) -> None:
        """Stop watching a request that has ended. Complexity: O(log watched)."""
        if self._failed:
            self._failed.pop(request, None)
        if request.params.deadline_s is not None:
            self._deadlines.remove((request.params.deadline_s, request.arrival, request))

    def fail(self, request: Request, error: RadixKVError) -> None:
        """Mark a request to fail with `error` between two steps."""
        self._failed[request] = error

    def is_failing(self, request: Request) -> bool:
        """Whether a request is marked to fail."""
        return request in self._failed

    def is_any_due(self, now_s: float) -> bool:
        """Whether any request must end now."""
        if self._cancelled or self._finished or self._failed:
            return True
        return bool(self._deadlines) and self._deadlines[0][0] <= now_s

    def take_finished(self) -> Iterator[Request]:
        """Yield the generations that their callers finished, if they have a token and are not marked to fail.

        The engine must end each request before it takes the next one.
        """
        while self._finished:
            request = self._finished.popleft()()
            if request is None or request.is_over or self.is_failing(request):
                continue
            if request.generation is not None and request.generation.token_ids:
                yield request

    def take_due(self, now_s: float) -> Iterator[tuple[Request, RadixKVError | None]]:
        """Yield the requests that must end now, each with its error; None if it was cancelled and is not late.

        The engine must end each request before it takes the next one.
        """
        while self._cancelled:
            request = self._cancelled.popleft()()
            if request is not None and not request.is_over:
                yield request, deadline_error() if request.is_late(now_s) else None
        failed, self._failed = self._failed, {}
        for request, error in failed.items():
            if not request.is_over:
                yield request, error
        while self._deadlines and self._deadlines[0][0] <= now_s:
            yield self._deadlines[0][2], deadline_error()


def deadline_error() -> DeadlinePassed:
    """Return the error of a request whose deadline has passed."""
    return DeadlinePassed("deadline: passed before the answer was known")
