"""Runs callbacks of other threads on an event loop, with one wake-up for many callbacks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any


class Mailbox:
    """Callbacks for the event loop in which the mailbox was created, run in the order in which they were posted.

    Waking an event loop takes a system call, and releases the GIL in the middle of an engine step. So all callbacks
    that are posted before the loop runs share one wake-up:

        engine   post  post  post ......... post
                  └ wake                     └ wake
        loop              run three callbacks  run one callback
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_waking = False

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Make the event loop call `function(*arguments)` soon. Thread-safe. Does nothing after the loop was closed."""
        self._calls.append((function, arguments))
        if not self._is_waking and not self._loop.is_closed():
            self._wake()

    def _wake(self) -> None:
        self._is_waking = True
        self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._is_waking = False  # before reading, so that a callback posted from now on wakes the loop again
        try:
            while self._calls:
                function, arguments = self._calls.popleft()
                function(*arguments)
        finally:
            if self._calls:  # a callback raised; the remaining ones run later
                self._wake()
