"""Attacks with connections that are left open, never read or slow, and with calls that are reset or cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator

from bench.hostile.attacks.attack import Figures, Target
from bench.hostile.attacks.flood import GENERATE, PREFILL, open_channel
from bench.hostile.attacks.frames import CONTINUATION, HEADERS, RawConnection, frame, header_block
from radixkv.v1 import prefill_pb2

IDLE_CONNECTIONS = 10_000

_AT_ONCE = 100  # connections that are opened together
_DEFAULT_WINDOW_BYTES = 65_535  # of HTTP/2

_NUM_RESETS = 15_000
_RESETS_AT_ONCE = 10
_CANCELS_AT_ONCE = 48
_MAX_CANCEL_DELAY_S = 0.01
_NUM_BROKEN_PATHS = 100
_BROKEN_PATH = b"/radixkv.v1.PrefillService/\xff"
_STATUS_TIMEOUT_S = 5.0


async def stalled(target: Target) -> Figures:
    """Open 200 calls on each of ten connections, and send a part of each message."""
    async with _connections(target.address, 10) as connections:
        for connection in connections:
            for _ in range(200):
                connection.call(PREFILL, bytes(1000), announced_bytes=500_000)
        await asyncio.sleep(target.seconds)
    return {"connections": 10, "calls": 2000}


async def unread(target: Target) -> Figures:
    """Request logits 300 times on each of ten connections, and read none."""
    message = prefill_pb2.PrefillRequest(token_ids=range(1, 100), tenant="unread", return_logits=True)
    num_calls = target.scaled(300)
    async with _connections(target.address, 10) as connections:
        for connection in connections:
            for _ in range(num_calls):
                connection.call(PREFILL, message.SerializeToString())
        await asyncio.sleep(target.seconds)
    return {"connections": 10, "calls": 10 * num_calls}


async def unread_streams(target: Target) -> Figures:
    """Request streams with log probabilities on 50 connections, and read nothing, as `http_unread` does over HTTP."""
    message = prefill_pb2.GenerateRequest(max_new_tokens=400, ignore_eos=True, logprobs=20)
    message.prefill.CopyFrom(prefill_pb2.PrefillRequest(token_ids=[65], tenant="hostile"))
    num_connections = target.scaled(50)
    async with _connections(target.address, num_connections, _DEFAULT_WINDOW_BYTES) as connections:
        for connection in connections:
            connection.call(GENERATE, message.SerializeToString())
        await asyncio.sleep(target.seconds)
    return {"connections": num_connections}


async def slow_headers(target: Target) -> Figures:
    """Send the headers of a call byte by byte, on 200 connections."""
    headers = header_block(PREFILL)
    clock = asyncio.get_running_loop().time
    end_s = clock() + target.seconds
    num_connections = target.scaled(200)
    async with _connections(target.address, num_connections) as connections:
        for connection in connections:
            connection.write(frame(HEADERS, 0, 1, headers[:1]))
        num_sent = 1
        while clock() < end_s and num_sent < len(headers):
            for connection in connections:
                connection.write(frame(CONTINUATION, 0, 1, headers[num_sent : num_sent + 1]))
            num_sent += 1
            await asyncio.sleep(0.1)
    return {"connections": num_connections, "frames": num_sent * num_connections}


async def idle(target: Target) -> Figures:
    """Open ten thousand connections, and do nothing."""
    num_connections = target.scaled(IDLE_CONNECTIONS)
    async with _connections(target.address, num_connections):
        await asyncio.sleep(target.seconds)
    return {"connections": num_connections}


async def rapid_reset(target: Target) -> Figures:
    """Begin 15,000 calls at a steady rate, one connection at a time, and cancel each immediately with RST_STREAM."""
    return await _reset_streams(target, target.seconds)


async def reset_burst(target: Target) -> Figures:
    """Begin 15,000 calls as fast as the server accepts them, and cancel each immediately with RST_STREAM."""
    return await _reset_streams(target, 0.0)


async def _reset_streams(target: Target, seconds: float) -> Figures:
    """Begin and reset streams, spread over `seconds` (0: as fast as possible). Reconnect if the server disconnects."""
    message = prefill_pb2.PrefillRequest(token_ids=range(1, 100), tenant="resets").SerializeToString()
    clock = asyncio.get_running_loop().time
    start_s, num_streams = clock(), target.scaled(_NUM_RESETS)
    num_sent = num_connections = 0
    while num_sent < num_streams and clock() < start_s + target.seconds:
        with contextlib.suppress(ConnectionError):
            connection = await RawConnection.open(target.address, _DEFAULT_WINDOW_BYTES)
            reader_task = asyncio.create_task(connection.discard())
            num_connections += 1
            while num_sent < num_streams:
                for _ in range(_RESETS_AT_ONCE):
                    connection.reset(connection.call(PREFILL, message))
                num_sent += _RESETS_AT_ONCE
                await connection.drain()
                await asyncio.sleep(start_s + seconds * num_sent / num_streams - clock())
            connection.close()
            await reader_task
    return {"streams": num_sent, "connections": num_connections}


async def cancels(target: Target) -> Figures:
    """Begin calls, and cancel each within 10 ms."""
    clock, rng = asyncio.get_running_loop().time, random.Random(3)
    end_s = clock() + target.seconds
    observed: Counter[str] = Counter()

    async def repeat() -> None:
        async with open_channel(target.address) as channel:
            call = channel.unary_unary(PREFILL, None, None)
            while clock() < end_s:
                tokens = [rng.randrange(1, 200) for _ in range(64)]
                running_call = call(prefill_pb2.PrefillRequest(token_ids=tokens, tenant="cancels").SerializeToString())
                await asyncio.sleep(rng.random() * _MAX_CANCEL_DELAY_S)
                running_call.cancel()
                observed[(await running_call.code()).name] += 1

    await asyncio.gather(*(repeat() for _ in range(_CANCELS_AT_ONCE)))
    return dict(observed)


async def broken_paths(target: Target) -> Figures:
    """Call a method whose path is not UTF-8, a hundred times, each on a new connection."""
    observed: Counter[str] = Counter()
    num_calls = target.scaled(_NUM_BROKEN_PATHS)
    for _ in range(num_calls):
        with contextlib.suppress(ConnectionError):
            connection = await RawConnection.open(target.address, _DEFAULT_WINDOW_BYTES)
            connection.call(_BROKEN_PATH, b"")
            observed[f"status {await connection.read_status(_STATUS_TIMEOUT_S)}"] += 1
            connection.close()
        await asyncio.sleep(target.seconds / num_calls)
    return dict(observed)


@contextlib.asynccontextmanager
async def _connections(address: str, num_connections: int, window_bytes: int = 0) -> AsyncIterator[list[RawConnection]]:
    connections: list[RawConnection] = []
    try:
        while len(connections) < num_connections:
            num_more = min(_AT_ONCE, num_connections - len(connections))
            connections += await asyncio.gather(*(RawConnection.open(address, window_bytes) for _ in range(num_more)))
        yield connections
    finally:
        for connection in connections:
            connection.close()
