"""Finds requests that have to end early: cancelled, late or finished ones, and those whose caller failed."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator

from sortedcontainers import SortedList

from radixkv.api.result import GenerationFuture
from radixkv.errors import DeadlineExceeded, RadixKVError
from radixkv.scheduling.request import Request


class EarlyEnds:
    """Collects requests that have to end, for the time between two steps.

    Other threads only cancel futures, or finish them. All methods are for the engine's thread.
    """

    def __init__(self) -> None:
        self._deadlines = SortedList()  # of (deadline_s, arrival, request); arrivals differ
        self._cancelled: deque[weakref.ref[Request]] = deque()  # other threads append
        self._finished: deque[weakref.ref[Request]] = deque()  # other threads append
        self._failed: dict[Request, RadixKVError] = {}

    def watch(self, request: Request) -> None:
        """Watch a request's deadline and its future. Complexity: O(log watched)."""
        if request.params.deadline_s is not None:
            self._deadlines.add((request.params.deadline_s, request.arrival, request))
        itself = weakref.ref(request)  # a future that held its request would be garbage for the collector
        request.future.add_done_callback(lambda future: self._cancelled.append(itself) if future.cancelled() else None)
        if isinstance(request.future, GenerationFuture):
            request.future.watch_finish(lambda: self._finished.append(itself))

    def forget(self, request: Request) -> None:
        """Stop watching a request that is over. Complexity: O(log watched)."""
        self._failed.pop(request, None)
        if request.params.deadline_s is not None:
            self._deadlines.remove((request.params.deadline_s, request.arrival, request))

    def fail(self, request: Request, error: RadixKVError) -> None:
        """Let a request end with an error, after the step that may be under way."""
        self._failed[request] = error

    def is_failing(self, request: Request) -> bool:
        """Whether a request has to end with an error."""
        return request in self._failed

    def is_any_due(self, now_s: float) -> bool:
        """Whether any request has to end now."""
        is_late = bool(self._deadlines) and self._deadlines[0][0] <= now_s
        return is_late or bool(self._cancelled or self._finished or self._failed)

    def finished(self) -> Iterator[Request]:
        """Yield the generations whose callers want no more tokens. Those that have none, or have to fail, are left out.

        The caller ends each request before it takes the next one.
        """
        while self._finished:
            request = self._finished.popleft()()
            if request is None or request.is_over or self.is_failing(request):
                continue
            if request.generation is not None and request.generation.token_ids:
                yield request

    def due(self, now_s: float) -> Iterator[tuple[Request, RadixKVError | None]]:
        """Yield the requests that have to end now, each with its error, or None if it was cancelled in time.

        The caller ends each request before it takes the next one.
        """
        while self._cancelled:
            request = self._cancelled.popleft()()
            if request is not None and not request.is_over:
                yield request, deadline_passed() if request.is_late(now_s) else None
        failed, self._failed = self._failed, {}
        yield from ((request, error) for request, error in failed.items() if not request.is_over)
        while self._deadlines and self._deadlines[0][0] <= now_s:
            yield self._deadlines[0][2], deadline_passed()


def deadline_passed() -> DeadlineExceeded:
    """Return the error of a late request."""
    return DeadlineExceeded("deadline: passed before the answer was known")
