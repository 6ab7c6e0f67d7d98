"""Knows the calls whose answers have not left yet, so that a server that stops can wait for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc.aio

Context = grpc.aio.ServicerContext[Any, Any]

_PERIOD_S = 0.005

_logger = logging.getLogger(__name__)
_endings: dict[asyncio.Task[Any], list[Callable[[Context], object]]] = {}  # what ends with a call, by its task


def when_over(context: Context, callback: Callable[[Context], object]) -> None:
    """Call `callback(context)` when a call is over. To be used by the task of the call.

    gRPC's own `add_done_callback` leaves a circle, from the call to itself, that only the garbage collector takes away.
    """
    task = asyncio.current_task()
    assert task is not None, "gRPC runs each call as a task, which ends when its status has left"
    callbacks = _endings.get(task)
    if callbacks is None:
        callbacks = _endings[task] = []
        task.add_done_callback(partial(_end, context))
    callbacks.append(callback)


def _end(context: Context, task: asyncio.Task[Any]) -> None:
    for callback in _endings.pop(task):
        try:
            callback(context)
        except Exception:  # the others are called all the same
            _logger.exception("what ends with a call raised")


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
