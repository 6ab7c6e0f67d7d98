"""Room for bytes that many may wait for."""

from __future__ import annotations

import asyncio
from collections import deque


class ByteRoom:
    """A bound on bytes in memory, handed out in the order in which they are asked for.

    One event loop uses it.

    Attributes:
        capacity: bytes in all.
        free: bytes that nobody has.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = self.free = capacity
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, num_bytes: int) -> None:
        """Wait for bytes, at most `capacity`, and take them. If the awaiting task is cancelled, none are taken."""
        if not self._waiting and num_bytes <= self.free:
            self.free -= num_bytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(num_bytes)  # they came at the same time
            self._serve()
            raise

    def give(self, num_bytes: int) -> None:
        """Give bytes back."""
        self.free += num_bytes
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            num_bytes, turn = self._waiting[0]
            if not turn.cancelled():
                if num_bytes > self.free:
                    return
                self.free -= num_bytes
                turn.set_result(None)
            self._waiting.popleft()
