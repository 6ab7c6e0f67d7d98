"""Calls a function on a thread, and reports when it has returned, so that callers can bound the number of threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def call_on_thread(function: Callable[[], Result], on_return: Callable[[], object]) -> Result:
    """Call a function on a thread and return its result.

    If the awaiting task is cancelled, the function continues on its thread, and the result is dropped.

    Args:
        function: the function.
        on_return: called on the event loop when the function has returned or raised, such as the `release` of a
            semaphore that bounds the number of threads.
    """
    running = asyncio.ensure_future(asyncio.to_thread(function))

    def note_return(done: asyncio.Future[Result]) -> None:
        if not done.cancelled():
            done.exception()  # retrieved here, because no caller may be waiting any more
        on_return()

    running.add_done_callback(note_return)
    return await asyncio.shield(running)
