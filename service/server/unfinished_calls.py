"""Knows the calls whose answers have not left yet, so that a server that stops can wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio

Context = grpc.aio.ServicerContext[Any, Any]

_PERIOD_S = 0.005


def when_over(context: Context, callback: Callable[[Context], object]) -> None:
    """Call `callback(context)` when a call is over. To be used by the task of the call.

    gRPC's own `add_done_callback` leaves a circle, from the call to itself, that only the garbage collector takes away.
    """
    task = asyncio.current_task()
    assert task is not None, "gRPC runs each call as a task, which ends when its status has left"
    task.add_done_callback(lambda _: callback(context))


class UnfinishedCalls:
    """The calls between the start of their handler and the last byte of their answer, handed to the socket by gRPC.

    To be used on the event loop alone.
    """

    def __init__(self) -> None:
        self._contexts: set[Context] = set()

    def add(self, context: Context) -> None:
        """Add a call that begins. It is removed when it is finished."""
        self._contexts.add(context)
        when_over(context, self._contexts.discard)

    async def finish(self, timeout_s: float) -> bool:
        """Wait for the calls that are unfinished now, at most `timeout_s` seconds. Later calls are not waited for.

        Returns:
            Whether they are finished.
        """
        before = self._contexts.copy()
        end = asyncio.get_running_loop().time() + timeout_s
        while self._contexts & before and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(_PERIOD_S)
        return not self._contexts & before
