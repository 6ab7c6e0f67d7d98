"""Helpers for calling the engine: the deadline and the metadata of a call, and awaiting the engine's result."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from radixkv.config import ServerConfig
from radixkv.service.server.calls import Context
from radixkv.service.server.mailbox import Mailbox

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine

Result = TypeVar("Result")


def seconds_left(context: Context, config: ServerConfig) -> float:
    """Return the seconds that a prompt has: until the caller's deadline, or the default, and at most the maximum."""
    remaining_s = context.time_remaining()
    return min(config.default_deadline_s if remaining_s is None else remaining_s, config.max_deadline_s)


def traceparent_of(context: Context) -> str:
    """Return the caller's span, which tracing libraries put into the metadata of a call; empty without one."""
    return _metadata_value(context, "traceparent")


def authorization_of(context: Context) -> str:
    """Return the header `authorization` of a call; empty without one."""
    return _metadata_value(context, "authorization")


def _metadata_value(context: Context, key: str) -> str:
    for name, value in context.invocation_metadata() or ():
        if name == key:
            return str(value)
    return ""


async def result_of(engine: Engine, mailbox: Mailbox, future: Future[Result]) -> Result:
    """Await a future of the engine. If the awaiting task is cancelled, the future is cancelled as well.

    Raises:
        Draining, StepHangs: the engine has cancelled the future. Other errors are those of the future.
    """
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda _: mailbox.post(_set_done, done))
    try:
        await done
    except asyncio.CancelledError:
        future.cancel()  # the call was cancelled
        raise
    if future.cancelled():
        raise engine.cancellation
    return future.result()


def _set_done(done: asyncio.Future[None]) -> None:
    if not done.done():  # otherwise its task was cancelled
        done.set_result(None)
