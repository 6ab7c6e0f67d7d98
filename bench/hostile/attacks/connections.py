"""Attacks by connections that are left open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from bench.hostile.attacks.attack import Figures, Target
from bench.hostile.attacks.flood import PREFILL
from bench.hostile.attacks.frames import CONTINUATION, HEADERS, RawConnection, block, frame
from radixkv.v1 import prefill_pb2

IDLE_CONNECTIONS = 10_000

_AT_ONCE = 100  # connections that are opened together


async def stalled(target: Target) -> Figures:
    """Open 200 calls on each of ten connections, and send a part of each message."""
    async with _connections(target.address, 10) as connections:
        for connection in connections:
            for _ in range(200):
                connection.call(PREFILL, bytes(1000), announced_bytes=500_000)
        await asyncio.sleep(target.seconds)
    return {"connections": 10, "calls": 2000}


async def unread(target: Target) -> Figures:
    """Ask for logits 300 times on each of ten connections, and read none."""
    message = prefill_pb2.PrefillRequest(token_ids=range(1, 100), tenant="unread", return_logits=True)
    num_calls = target.part_of(300)
    async with _connections(target.address, 10) as connections:
        for connection in connections:
            for _ in range(num_calls):
                connection.call(PREFILL, message.SerializeToString())
        await asyncio.sleep(target.seconds)
    return {"connections": 10, "calls": 10 * num_calls}


async def slow_headers(target: Target) -> Figures:
    """Send the headers of a call byte by byte, on 200 connections."""
    headers = block(PREFILL)
    clock = asyncio.get_running_loop().time
    end_s = clock() + target.seconds
    num_connections = target.part_of(200)
    async with _connections(target.address, num_connections) as connections:
        for connection in connections:
            connection.write(frame(HEADERS, 0, 1, headers[:1]))
        at = 1
        while clock() < end_s and at < len(headers):
            for connection in connections:
                connection.write(frame(CONTINUATION, 0, 1, headers[at : at + 1]))
            at += 1
            await asyncio.sleep(0.1)
    return {"connections": num_connections, "frames": at * num_connections}


async def idle(target: Target) -> Figures:
    """Open ten thousand connections, and do nothing."""
    num_connections = target.part_of(IDLE_CONNECTIONS)
    async with _connections(target.address, num_connections):
        await asyncio.sleep(target.seconds)
    return {"connections": num_connections}


@contextlib.asynccontextmanager
async def _connections(address: str, number: int) -> AsyncIterator[list[RawConnection]]:
    connections: list[RawConnection] = []
    try:
        while len(connections) < number:
            num_more = min(_AT_ONCE, number - len(connections))
            connections += await asyncio.gather(*(RawConnection.open(address) for _ in range(num_more)))
        yield connections
    finally:
        for connection in connections:
            connection.close()
