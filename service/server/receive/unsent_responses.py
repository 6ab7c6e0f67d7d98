"""Responses that gRPC has accepted but not sent yet, and protection against callers that do not read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Set

from radixkv.service.server.calls import Context
from radixkv.service.server.connections import close_connections

# Time between the two checks of a response. Notifications that a busy event loop receives late arrive within this time.
_CONFIRM_S = 0.1
_MIN_DELAY_S = 0.01  # until the next search for late responses

_logger = logging.getLogger(__name__)


class UnsentResponses:
    """Closes connections that leave a response unread for too long.

    gRPC does not report how much of a response was sent, and cannot cancel a response that it has accepted. Its memory
    is freed only when the connection is closed. A response that seems unread is checked twice, because a busy event
    loop is notified late of responses that were sent. For use on one event loop.

    Args:
        timeout_s: seconds that a response may remain unsent.
        close: closes the connections of these peers; runs on another thread.
    """

    def __init__(self, timeout_s: float, close: Callable[[Set[str]], int] = close_connections) -> None:
        self._timeout_s = timeout_s
        self._close = close
        # When the response of each call was passed to gRPC, the oldest first.
        self._passed_at_s: dict[Context, float] = {}
        self._is_scheduled = False
        self._close_task: asyncio.Task[None] | None = None  # the event loop itself holds only weak references to tasks

    def add(self, context: Context) -> None:
        """Add a call whose response, or next message of a streamed response, is passed to gRPC."""
        loop = asyncio.get_running_loop()
        self._passed_at_s[context] = loop.time()
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_later(self._timeout_s, self._check)

    def discard(self, context: Context) -> None:
        """Remove a call whose response was sent, or that has ended."""
        self._passed_at_s.pop(context, None)

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        late_responses = {
            context: passed_at_s
            for context, passed_at_s in self._passed_at_s.items()
            if now_s - passed_at_s >= self._timeout_s
        }
        if late_responses:
            loop.call_later(_CONFIRM_S, self._confirm, late_responses)
        else:
            self._schedule_next()

    def _confirm(self, late_responses: dict[Context, float]) -> None:
        """Close the connections of calls whose late response is still unsent. A stream may have continued."""
        unread = [
            context for context, passed_at_s in late_responses.items() if self._passed_at_s.get(context) == passed_at_s
        ]
        if unread:
            peers = {context.peer() for context in unread}
            for context in unread:
                del self._passed_at_s[context]
            self._close_task = asyncio.create_task(self._close_all(peers))
        self._schedule_next()

    def _schedule_next(self) -> None:
        self._is_scheduled = bool(self._passed_at_s)
        if self._is_scheduled:
            loop = asyncio.get_running_loop()
            oldest_s = next(iter(self._passed_at_s.values()))
            loop.call_later(max(_MIN_DELAY_S, oldest_s + self._timeout_s - loop.time()), self._check)

    async def _close_all(self, peers: set[str]) -> None:
        num_closed = await asyncio.to_thread(self._close, peers)
        _logger.warning("closed %d connections that left responses unread", num_closed)
