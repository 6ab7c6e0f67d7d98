"""Sends many concurrent calls, over one or several connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import grpc
import grpc.aio

from bench.hostile.attacks.attack import Figures, Target

PREFILL = "/radixkv.v1.PrefillService/Prefill"
GENERATE = "/radixkv.v1.PrefillService/Generate"
PROBE = "/radixkv.v1.PrefillService/Probe"
RETAIN = "/radixkv.v1.CacheService/Retain"
PURGE = "/radixkv.v1.CacheService/Purge"
STATS = "/radixkv.v1.CacheService/Stats"

TIMEOUT_S = 60.0
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
]


@contextlib.asynccontextmanager
async def open_channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """Open a connection that no other channel of this process shares."""
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        yield channel


async def flood(target: Target, path: str, make_message: Callable[[], bytes], num_at_once: int) -> Figures:
    """Repeat a call until the time is over, with one connection for each call in flight.

    Returns:
        The number of calls by status.
    """
    clock = asyncio.get_running_loop().time
    end_s = clock() + target.seconds
    observed: Counter[str] = Counter()

    async def repeat() -> None:
        async with open_channel(target.address) as channel:
            call = channel.unary_unary(path, None, None)
            while clock() < end_s:
                observed[await status_of(call, make_message())] += 1

    await asyncio.gather(*(repeat() for _ in range(num_at_once)))
    return dict(observed)


async def send_all(address: str, path: str, messages: Iterator[bytes], num_at_once: int = 16) -> Figures:
    """Send each message once, on one connection.

    Returns:
        The number of calls by status.
    """
    observed: Counter[str] = Counter()
    async with open_channel(address) as channel:
        call = channel.unary_unary(path, None, None)

        async def send() -> None:
            for message in messages:
                observed[await status_of(call, message)] += 1

        await asyncio.gather(*(send() for _ in range(num_at_once)))
    return dict(observed)


async def status_of(call: Callable[..., Awaitable[bytes]], message: bytes) -> str:
    """Make a call, and return the name of its status."""
    try:
        await call(message, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"
