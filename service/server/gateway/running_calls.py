"""The gateway's running calls by request id, so that they can be aborted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from radixkv.api.result import GenerationFuture


class RunningCall:
    """A call and the futures of its completions.

    Attributes:
        futures: one future per completion.
        is_aborted: whether the gateway has aborted the call.
    """

    def __init__(self) -> None:
        self.futures: list[GenerationFuture] = []
        self.is_aborted = False

    def abort(self) -> None:
        """Cancel completions that still run, because the gateway has aborted the call."""
        self.is_aborted = True
        self.cancel()

    def cancel(self) -> None:
        """Cancel completions that still run."""
        for future in self.futures:
            future.cancel()


class RunningCalls:
    """The running calls. For use on one event loop."""

    def __init__(self) -> None:
        self._calls: dict[str, list[RunningCall]] = {}  # two calls may have the same id

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))

    @contextlib.contextmanager
    def running(self, request_id: str) -> Iterator[RunningCall]:
        """Register a call while the context lasts, and cancel the completions of the call that still run at the end."""
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
        """Abort all calls with these request ids. Unknown ids are ignored."""
        for request_id in request_ids:
            for call in self._calls.get(request_id, ()):
                call.abort()
