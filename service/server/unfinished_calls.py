"""The calls whose answers have not left yet, so that a server that stops can wait for them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

Context = grpc.aio.ServicerContext[Any, Any]

_PERIOD_S = 0.005


class UnfinishedCalls:
    """Calls from the moment their handler starts until gRPC has handed the last byte of the answer to the socket.

    Belongs to the event loop.
    """

    def __init__(self) -> None:
        self._contexts: set[Context] = set()

    def add(self, context: Context) -> None:
        """Note a call that begins."""
        self._contexts.add(context)
        context.add_done_callback(self._contexts.discard)  # type: ignore[arg-type]  # a class in its stubs

    async def finish(self, timeout_s: float) -> bool:
        """Wait for the calls that are there now, however many come after them, for `timeout_s` seconds at most.

        Returns:
            Whether they are finished.
        """
        before = self._contexts.copy()
        end = asyncio.get_running_loop().time() + timeout_s
        while self._contexts & before and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(_PERIOD_S)
        return not self._contexts & before
