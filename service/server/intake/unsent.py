"""Answers that are on their way to callers, and those that nobody reads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Set

from radixkv.service.server.intake.connection import close_connections
from radixkv.service.server.unfinished_calls import Context

# What has left by then, but was not told because the loop was busy, is told before the second look.
_CONFIRM_S = 0.1

_logger = logging.getLogger(__name__)


class UnsentAnswers:
    """Answers handed to gRPC and not yet to the socket. A connection that leaves one unread too long is closed.

    gRPC can neither tell how far an answer has got nor take it back. What it holds for a caller goes when the
    connection does. Answers that look unread are looked at twice, since a busy loop learns late of those that have
    left. To be used on the event loop alone.

    Args:
        timeout_s: seconds that an answer may be unsent.
        close: closes the connections of these peers; called on another thread.
    """

    def __init__(self, timeout_s: float, close: Callable[[Set[str]], int] = close_connections) -> None:
        self._timeout_s = timeout_s
        self._close = close
        self._since_s: dict[Context, float] = {}  # the first first
        self._is_watched = False
        self._closing: asyncio.Task[None] | None = None

    def add(self, context: Context) -> None:
        """Add a call whose answer, or next part of it, is handed to gRPC."""
        self._since_s[context] = asyncio.get_running_loop().time()
        if not self._is_watched:
            self._watch(self._timeout_s)

    def discard(self, context: Context) -> None:
        """Forget a call whose answer has left, or that is over."""
        self._since_s.pop(context, None)

    def _watch(self, seconds: float) -> None:
        self._is_watched = True
        asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._is_watched = False
        now_s = asyncio.get_running_loop().time()
        late = {context: since_s for context, since_s in self._since_s.items() if now_s - since_s >= self._timeout_s}
        if late:
            self._is_watched = True
            asyncio.get_running_loop().call_later(_CONFIRM_S, self._look_again, late)
        elif self._since_s:
            first_s = next(iter(self._since_s.values()))
            self._watch(max(0.01, first_s + self._timeout_s - now_s))

    def _look_again(self, late: dict[Context, float]) -> None:
        """Close the connections of calls whose late answer is still unsent. A stream may be at its next part."""
        self._is_watched = False
        unread = [context for context, since_s in late.items() if self._since_s.get(context) == since_s]
        if unread:
            peers = {context.peer() for context in unread}
            for context in unread:
                del self._since_s[context]
            self._closing = asyncio.create_task(self._close_all(peers))
        if self._since_s:
            first_s = next(iter(self._since_s.values()))
            self._watch(max(0.01, first_s + self._timeout_s - asyncio.get_running_loop().time()))

    async def _close_all(self, peers: set[str]) -> None:
        num_closed = await asyncio.to_thread(self._close, peers)
        _logger.warning("closed %d connections that left answers unread", num_closed)
