"""Places for messages that are being received. Connections take turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from radixkv.errors import DeadlineExceeded, QueueFull

# While others wait, a message may take this long, so that callers who send slowly can't keep the places.
_GRACE_S = 0.25
_RETRY_S = 1.0


class Places:
    """A bounded number of messages that are received at once.

        call ─▶ waiting, by connection ─▶ receiving, a place each ─▶ received
                   │ too many: the last of the longest line            │ too slow
                   ▼                                                   ▼
                refused                                             refused

    A call that has no place is not read, so gRPC holds at most one window of it. To be used on the event loop alone.

    Args:
        num_places: messages that are received at once.
        num_waiting: calls that may wait for a place.
        timeout_s: seconds that a message may take.
    """

    def __init__(self, num_places: int, num_waiting: int, timeout_s: float) -> None:
        self._num_free = num_places
        self._most_waiting = num_waiting
        self._timeout_s = timeout_s
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # by connection, the next one first
        self._num_waiting = 0
        self._receiving: dict[asyncio.Timeout, float] = {}  # with the time of its start, the first first
        self._is_watched = False

    async def receive(self, connection: str, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """Wait for a place and read a message.

        Args:
            connection: the name of the connection that the message comes from.
            read: reads it.

        Raises:
            QueueFull: too many calls wait, this connection's the most; or it was slow while others waited.
            DeadlineExceeded: it did not come in time.
        """
        await self._enter(connection)
        try:
            return await self._read(read)
        finally:
            self._leave()

    async def _read(self, read: Callable[[], Awaitable[bytes]]) -> bytes:
        clock = asyncio.get_running_loop().time
        start_s = clock()
        timeout = asyncio.timeout(self._timeout_s)
        self._receiving[timeout] = start_s
        try:
            async with timeout:
                return await read()
        except TimeoutError as error:
            if clock() - start_s < self._timeout_s:
                raise QueueFull(
                    f"message: expected to come within {_GRACE_S} s while others wait, got less of it",
                    retry_after_s=_RETRY_S,
                ) from error
            raise DeadlineExceeded(f"message: expected to come within {self._timeout_s:g} s, got less of it") from error
        finally:
            del self._receiving[timeout]

    async def _enter(self, connection: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(connection, deque()).append(turn)
        self._num_waiting += 1
        if self._num_waiting > self._most_waiting:
            self._refuse_one()
        self._watch()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave()  # the place came, but the caller has gone
            else:
                self._forget(connection, turn)
            raise

    def _leave(self) -> None:
        """Give a place to the next connection in turn."""
        while self._lines:
            connection = next(iter(self._lines))
            line = self._lines.pop(connection)
            turn = line.popleft()
            self._num_waiting -= 1
            if line:
                self._lines[connection] = line  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1

    def _refuse_one(self) -> None:
        """Refuse the last call of the connection that has the most."""
        connection, line = max(self._lines.items(), key=lambda item: len(item[1]))
        turn = line[-1]
        self._forget(connection, turn)
        turn.set_exception(
            QueueFull(
                f"service: expected at most {self._most_waiting} calls that wait to be received, got more",
                retry_after_s=_RETRY_S,
            )
        )

    def _forget(self, connection: str, turn: asyncio.Future[None]) -> None:
        line = self._lines.get(connection)
        if line is None or turn not in line:
            return
        line.remove(turn)
        self._num_waiting -= 1
        if not line:
            del self._lines[connection]

    def _watch(self) -> None:
        """Look after slow messages while others wait."""
        if not self._is_watched:
            self._is_watched = True
            asyncio.get_running_loop().call_later(_GRACE_S / 4, self._end_slow)

    def _end_slow(self) -> None:
        """End the slowest messages, one for each call that waits."""
        self._is_watched = False
        now_s = asyncio.get_running_loop().time()
        if self._num_waiting:
            self._watch()
        # One that is past its own time ends by itself, and can't be ended earlier any more.
        slow = [each for each, start_s in self._receiving.items() if _GRACE_S <= now_s - start_s < self._timeout_s]
        for timeout in slow[: self._num_waiting]:
            timeout.reschedule(now_s)
