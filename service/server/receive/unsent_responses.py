"""Responses that gRPC has accepted but not sent yet, and protection against callers that do not read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Set

from radixkv.service.server.calls import Context
from radixkv.service.server.connections import close_connections

# Time between the two checks of a response. Notifications that a busy event loop receives late arrive within this time.
_CONFIRM_S = 0.1

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
        self._since_s: dict[Context, float] = {}  # the oldest first
        self._is_scheduled = False
        self._closing: asyncio.Task[None] | None = None

    def add(self, context: Context) -> None:
        """Add a call whose response, or next message of a streamed response, is passed to gRPC."""
        loop = asyncio.get_running_loop()
        self._since_s[context] = loop.time()
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_later(self._timeout_s, self._check)

    def discard(self, context: Context) -> None:
        """Remove a call whose response was sent, or that has ended."""
        self._since_s.pop(context, None)

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        late = {context: since_s for context, since_s in self._since_s.items() if now_s - since_s >= self._timeout_s}
        if late:
            loop.call_later(_CONFIRM_S, self._confirm, late)
        else:
            self._schedule_next()

    def _confirm(self, late: dict[Context, float]) -> None:
        """Close the connections of calls whose late response is still unsent. A stream may have continued."""
        unread = [context for context, since_s in late.items() if self._since_s.get(context) == since_s]
        if unread:
            peers = {context.peer() for context in unread}
            for context in unread:
                del self._since_s[context]
            self._closing = asyncio.create_task(self._close_all(peers))
        self._schedule_next()

    def _schedule_next(self) -> None:
        self._is_scheduled = bool(self._since_s)
        if self._is_scheduled:
            loop = asyncio.get_running_loop()
            oldest_s = next(iter(self._since_s.values()))
            loop.call_later(max(0.01, oldest_s + self._timeout_s - loop.time()), self._check)

    async def _close_all(self, peers: set[str]) -> None:
        num_closed = await asyncio.to_thread(self._close, peers)
        _logger.warning("closed %d connections that left responses unread", num_closed)
