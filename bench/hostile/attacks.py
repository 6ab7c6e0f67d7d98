"""Attacks by name. Each is bounded in calls and connections, and ends what it began."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio

from bench.hostile.frames import RawConnection
from radixkv.v1 import prefill_pb2

Attack = Callable[[str, float], Awaitable[dict[str, int]]]
"""Attacks a server at an address for some seconds; returns how often each status came."""

PREFILL = "/radixkv.v1.PrefillService/Prefill"

_TIMEOUT_S = 60.0
_NUM_AT_ONCE = 16


async def large_packed(address: str, seconds: float) -> dict[str, int]:
    """Send prompts of 16 million tokens, which no pool here can hold."""
    return await _flood(address, seconds, b"\x0a\x80\x80\x80\x20" + bytes(64 * 2**20))


async def large_unpacked(address: str, seconds: float) -> dict[str, int]:
    """Send the longest prompts that are accepted, with a tag for each token."""
    return await _flood(address, seconds, b"\x0d\1\0\0\0" * 131_072)


async def stalled(address: str, seconds: float) -> dict[str, int]:
    """Open calls on ten connections, and send a part of each message."""
    return await _hold(address, seconds, 10, 200, bytes(1000), announced_bytes=500_000)


async def unread(address: str, seconds: float) -> dict[str, int]:
    """Ask for logits on ten connections, and read none."""
    message = prefill_pb2.PrefillRequest(token_ids=range(1, 100), tenant="unread", return_logits=True)
    return await _hold(address, seconds, 10, 100, message.SerializeToString())


async def idle(address: str, seconds: float) -> dict[str, int]:
    """Open a thousand connections, and do nothing."""
    return await _hold(address, seconds, 1000, 0, b"")


async def _flood(address: str, seconds: float, message: bytes) -> dict[str, int]:
    seen: dict[str, int] = {}
    end_s = asyncio.get_running_loop().time() + seconds

    async def repeat() -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            call = channel.unary_unary(PREFILL, None, None)
            while asyncio.get_running_loop().time() < end_s:
                status = "OK"
                try:
                    await call(message, timeout=_TIMEOUT_S)
                except grpc.aio.AioRpcError as error:
                    status = error.code().name
                seen[status] = seen.get(status, 0) + 1

    await asyncio.gather(*(repeat() for _ in range(_NUM_AT_ONCE)))
    return seen


async def _hold(
    address: str,
    seconds: float,
    num_connections: int,
    num_calls: int,
    message: bytes,
    announced_bytes: int | None = None,
) -> dict[str, int]:
    connections = []
    with contextlib.ExitStack() as open_ones:
        for _ in range(num_connections):
            connection = await RawConnection.open(address)
            open_ones.callback(connection.close)
            connections.append(connection)
            for _ in range(num_calls):
                connection.call(PREFILL, message, announced_bytes)
        await asyncio.sleep(seconds)
    return {"connections": num_connections, "calls": num_connections * num_calls}


ATTACKS: dict[str, Attack] = {
    "large_packed": large_packed,
    "large_unpacked": large_unpacked,
    "stalled": stalled,
    "unread": unread,
    "idle": idle,
}
