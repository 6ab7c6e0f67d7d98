"""The open connections of the HTTP port, bounded in number, and in the time that they may be idle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

_IDLE_POLL_S = 1.0  # between two searches for idle connections


class Connections:
    """Counts connections and closes idle ones: those without a request, or with one whose headers are incomplete.

        accepted ─▶ idle ─▶ answering a request ─▶ idle ─▶ ...
                     └▶ closed: after its time, or if there are too many and it was idle for longest

    For use on one event loop.

    Args:
        max_connections: maximum number of open connections, without those that were accepted but not added yet.
        first_s: seconds within which the first request of a connection must arrive.
        idle_s: seconds after a response within which the next request must arrive.
    """

    def __init__(self, max_connections: int, first_s: float, idle_s: float) -> None:
        self._max_connections = max_connections
        self._first_s = first_s
        self._idle_s = idle_s
        # The time at which each idle connection is closed; the connection that was idle for longest is first.
        self._idle: dict[web.RequestHandler, float] = {}
        self._busy: set[web.RequestHandler] = set()
        self._idle_watch = asyncio.create_task(self._close_idle())

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    def make_room(self) -> bool:
        """Prepare for one more connection, if necessary by closing the one that was idle for longest.

        Returns:
            False if another connection would exceed the maximum, and none is idle.
        """
        if len(self) < self._max_connections:
            return True
        self._forget_closed()
        if len(self) < self._max_connections:
            return True
        if not self._idle:
            return False
        self._end(next(iter(self._idle)))
        return True

    def add(self, connection: web.RequestHandler) -> None:
        """Add a connection that was accepted. Its first request may have arrived already."""
        if connection not in self._busy:
            self._wait_for_request(connection, self._first_s)

    @contextmanager
    def answering(self, connection: web.RequestHandler) -> Iterator[None]:
        """Count a connection as not idle while its request is answered."""
        self._idle.pop(connection, None)
        self._busy.add(connection)
        try:
            yield
        finally:
            self._busy.discard(connection)
            if connection.transport is not None:
                self._wait_for_request(connection, self._idle_s)

    def stop_watching(self) -> None:
        """Stop closing idle connections."""
        self._idle_watch.cancel()

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(_IDLE_POLL_S)
            self._forget_closed()
            now_s = asyncio.get_running_loop().time()
            for connection in [each for each, end_s in self._idle.items() if end_s <= now_s]:
                self._end(connection)

    def _wait_for_request(self, connection: web.RequestHandler, seconds: float) -> None:
        self._idle[connection] = asyncio.get_running_loop().time() + seconds

    def _end(self, connection: web.RequestHandler) -> None:
        del self._idle[connection]
        if connection.transport is not None:
            connection.transport.abort()

    def _forget_closed(self) -> None:
        for connection in [each for each in self._idle if each.transport is None]:
            del self._idle[connection]
