"""Reads what a call carries beside its message, and awaits the engine's answer to it."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.unfinished_calls import Context

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine

Answer = TypeVar("Answer")


def traceparent_of(context: Context) -> str:
    """Return the caller's span, which tracing libraries put into the metadata of a call; empty without one."""
    for name, value in context.invocation_metadata() or ():
        if name == "traceparent":
            return str(value)
    return ""


def authorization_of(context: Context) -> str:
    """Return the credential that a call shows; empty without one."""
    for name, value in context.invocation_metadata() or ():
        if name == "authorization":
            return str(value)
    return ""


async def answer_of(engine: Engine, mailbox: Mailbox, future: Future[Answer]) -> Answer:
    """Await the engine's answer. If the awaiting task is cancelled, `future` is too."""
    known: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda _: mailbox.post(_tell, known))
    try:
        await known
    except asyncio.CancelledError:
        future.cancel()  # the caller went away
        raise
    if future.cancelled():
        raise engine.cancellation
    return future.result()


def _tell(known: asyncio.Future[None]) -> None:
    if not known.done():  # or else its task was cancelled
        known.set_result(None)
