"""The calls in flight: callbacks that run when a call ends, and waiting for all calls when the server drains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc.aio

Context = grpc.aio.ServicerContext[Any, Any]

_POLL_S = 0.005


def add_done_callback(callback: Callable[[], object]) -> None:
    """Call `callback()` when the current call has ended. Must be called in the task of the call.

    gRPC's own `ServicerContext.add_done_callback` leaves a reference cycle through the call, which only the garbage
    collector frees.
    """
    current_call().add_done_callback(partial(_call_without_task, callback))


def current_call() -> asyncio.Task[Any]:
    """Return the task of the current call, which ends after the call's status was sent."""
    task = asyncio.current_task()
    assert task is not None, "gRPC runs each call as a task"
    return task


def _call_without_task(callback: Callable[[], object], _task: object) -> None:
    callback()


class InFlightCalls:
    """The calls that a drain waits for: their request has arrived, and their response is not completely written yet.

    Not thread-safe: use it on one event loop.
    """

    def __init__(self) -> None:
        self._calls: set[object] = set()

    def add(self, call: object) -> None:
        """Add a call whose request has arrived."""
        self._calls.add(call)

    def discard(self, call: object) -> None:
        """Remove a call that has ended."""
        self._calls.discard(call)

    async def wait_for_end(self, timeout_s: float) -> bool:
        """Wait for the calls that are in flight now, at most `timeout_s` seconds. Later calls are not waited for.

        Returns:
            Whether they have all ended.
        """
        awaited_calls = self._calls.copy()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while self._calls & awaited_calls and loop.time() < end_s:
            await asyncio.sleep(_POLL_S)
        return not self._calls & awaited_calls
