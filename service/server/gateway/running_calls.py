"""Knows the gateway's running calls by their request's id, so that they can be aborted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from radixkv.api.result import GenerationFuture


class RunningCall:
    """A call, and the futures of its answers.

    Attributes:
        futures: one for each answer.
        is_aborted: whether the gateway wants no more of it.
    """

    def __init__(self) -> None:
        self.futures: list[GenerationFuture] = []
        self.is_aborted = False

    def abort(self) -> None:
        """Cancel what is not answered yet, and remember why."""
        self.is_aborted = True
        self.cancel()

    def cancel(self) -> None:
        """Cancel what is not answered yet."""
        for future in self.futures:
            future.cancel()


class RunningCalls:
    """All calls between their start and their end. To be used on the event loop alone."""

    def __init__(self) -> None:
        self._calls: dict[str, list[RunningCall]] = {}  # two calls may have the same id

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))

    @contextlib.contextmanager
    def running(self, request_id: str) -> Iterator[RunningCall]:
        """Note a call while the context lasts; what it has not answered at its end is cancelled."""
        call = RunningCall()
        self._calls.setdefault(request_id, []).append(call)
        try:
            yield call
        finally:
            call.cancel()
            self._calls[request_id].remove(call)
            if not self._calls[request_id]:
                del self._calls[request_id]

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort all calls with these ids. Ids that are not running are ignored."""
        for request_id in request_ids:
            for call in self._calls.get(request_id, ()):
                call.abort()
