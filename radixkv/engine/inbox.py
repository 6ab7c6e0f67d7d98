"""Brings functions from other threads to the engine's thread."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from radixkv.errors import Draining

_T = TypeVar("_T")


class Inbox:
    """Functions that the engine's thread runs between two steps, in the order in which they came.

        other threads     put, call ─▶ [ function, function ... ] ─▶ run_next, run_all     engine's thread

    Every call that was accepted is run, or cancelled: `close` lets no more in, and `run_all` after it empties the
    inbox.
    """

    def __init__(self) -> None:
        self._functions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards `_is_closed`, and additions to `_calls`
        self._is_closed = False
        self._calls: set[Future[Any]] = set()  # not done yet

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be run."""
        return self._functions.empty()

    def put(self, function: Callable[[], None]) -> None:
        """Have the engine's thread run a function that raises nothing."""
        self._functions.put(function)

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Have the engine's thread call a short function.

        Returns:
            Its result, or what it raised.

        Raises:
            Draining: the inbox is closed.
        """
        future: Future[_T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:  # noqa: BLE001 - the caller gets it, and the engine goes on
                    future.set_exception(error)

        with self._lock:
            if self._is_closed:
                raise Draining("engine: stopped")
            self._calls.add(future)
            self._functions.put(run)
        future.add_done_callback(self._calls.discard)
        return future

    def run_next(self, timeout_s: float | None) -> None:
        """Wait for the next function and run it; return after `timeout_s` seconds if none comes, None for never."""
        with contextlib.suppress(queue.Empty):
            self._functions.get(timeout=timeout_s)()

    def run_all(self) -> None:
        """Run the functions that are in the inbox now."""
        for _ in range(self._functions.qsize()):
            self._functions.get()()

    def cancel_calls(self) -> None:
        """Cancel the calls that are not done. From any thread."""
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def close(self) -> None:
        """Accept no more calls."""
        with self._lock:
            self._is_closed = True
