"""Calls of functions on threads, which occupy their place among a bounded number of threads until they return."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def call_on_thread(function: Callable[[], Result], on_return: Callable[[], object]) -> Result:
    """Return what a function returns, called on a thread.

    A thread cannot be cancelled. If the awaiting task is cancelled, the function continues, and its result is dropped.

    Args:
        function: the function.
        on_return: called on the event loop when the function has returned or raised, such as the `release` of a
            semaphore that bounds the number of threads.
    """
    running = asyncio.ensure_future(asyncio.to_thread(function))

    def end(done: asyncio.Future[Result]) -> None:
        if not done.cancelled():
            done.exception()  # retrieved here, because no caller may be waiting any more
        on_return()

    running.add_done_callback(end)
    return await asyncio.shield(running)
