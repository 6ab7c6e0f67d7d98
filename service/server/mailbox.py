"""Brings calls from other threads to an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any


class Mailbox:
    """Calls that are run by the event loop in which the mailbox is made, in the order in which they came.

    Waking the loop costs a system call, and releases the interpreter in the middle of a step. So all calls that come
    before the loop runs share one wake-up:

        engine   post  post  post ......... post
                  └ wake                     └ wake
        loop              run: three calls      run: one
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_waking = False

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have the loop call `function(*arguments)` soon. From any thread. Does nothing once the loop is closed."""
        self._calls.append((function, arguments))
        if not self._is_waking and not self._loop.is_closed():
            self._wake()

    def _wake(self) -> None:
        self._is_waking = True
        self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._is_waking = False  # before reading, so that a call that comes from now on wakes the loop again
        try:
            while self._calls:
                function, arguments = self._calls.popleft()
                function(*arguments)
        finally:
            if self._calls:  # a call raised; the rest runs later
                self._wake()
