"""Attacks on the HTTP port."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from bench.hostile.attacks.attack import Figures, Target

_AT_ONCE = 100  # connections that are opened together
_RESPONSE_TIMEOUT_S = 5.0
_LONG_STREAM = {"max_tokens": 400, "stream": True, "ignore_eos": True, "logprobs": 20}
_MALFORMED = (
    b"\x00\xff" * 50 + b"\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
)
_NUM_LARGE_TOKENS = 290_000  # more than the default pool of 131,072 tokens holds


async def idle(target: Target) -> Figures:
    """Open ten thousand connections, and do nothing."""
    async with _connections(target, target.scaled(10_000)) as writers:
        await asyncio.sleep(target.seconds)
    return {"connections": len(writers)}


async def slow_headers(target: Target) -> Figures:
    """Send the headers of a request byte by byte, on 300 connections."""
    return await _drip(target, target.scaled(300), b"", _completion_request({"prompt": [65]}))


async def slow_bodies(target: Target) -> Figures:
    """Send the body of a request byte by byte, on 200 connections."""
    head, _, body = _completion_request({"prompt": [65, 66, 67], "user": "u" * 1000}).partition(b"\r\n\r\n")
    return await _drip(target, target.scaled(200), head + b"\r\n\r\n", body)


async def unread(target: Target) -> Figures:
    """Request streams with log probabilities on 50 connections, and read nothing."""
    async with _connections(target, target.scaled(50)) as writers:
        for writer in writers:
            writer.write(_completion_request({"prompt": [65], **_LONG_STREAM}))
        await asyncio.sleep(target.seconds)
    return {"connections": len(writers)}


async def malformed(target: Target) -> Figures:
    """Send data that is not valid HTTP, bodies that are not JSON, and JSON nested 20,000 levels deep."""
    return await _repeat(target, 8, (*_MALFORMED, _post_completion(b"{"), _post_completion(b"[" * 20_000)))


async def huge_headers(target: Target) -> Figures:
    """Send 40 headers of 15 kB each, and one of 1 MB."""
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
    many_headers = head + b"".join(b"x%d: %s\r\n" % (number, b"a" * 15_000) for number in range(40)) + b"\r\n"
    return await _repeat(target, 8, (many_headers, head + b"x: " + b"a" * 10**6 + b"\r\n\r\n"))


async def large_bodies(target: Target) -> Figures:
    """Send prompts that are longer than the server's pool."""
    return await _repeat(target, 8, (_completion_request({"prompt": [65] * _NUM_LARGE_TOKENS}),))


async def refused(target: Target) -> Figures:
    """Send requests that are refused, 20 at a time, each on a new connection."""
    return await _repeat(target, 20, (_completion_request({"prompt": 1}),))


async def _drip(target: Target, num_connections: int, beginning: bytes, slow_part: bytes) -> Figures:
    """Send the beginning of a request immediately, and the slow part byte by byte, without its end, on connections."""
    clock = asyncio.get_running_loop().time
    end_s, num_sent = clock() + target.seconds, 0
    async with _connections(target, num_connections) as writers:
        for writer in writers:
            writer.write(beginning)
        while clock() < end_s and num_sent < len(slow_part) - 1:
            for writer in writers:
                if not writer.is_closing():
                    writer.write(slow_part[num_sent : num_sent + 1])
            num_sent += 1
            await asyncio.sleep(0.1)
    return {"connections": num_connections, "frames": num_sent * num_connections}


async def _repeat(target: Target, num_at_once: int, requests: Sequence[bytes]) -> Figures:
    """Send requests, each on a new connection, until the time is over. Returns the number of responses by status."""
    clock = asyncio.get_running_loop().time
    end_s = clock() + target.seconds
    observed: Counter[str] = Counter()

    async def repeat(number: int) -> None:
        while clock() < end_s:
            observed[await _status_of(target.http_address, requests[number % len(requests)])] += 1
            number += 1

    await asyncio.gather(*(repeat(number) for number in range(num_at_once)))
    return dict(observed)


async def _status_of(address: str, request: bytes) -> str:
    """Send a request on a new connection. Returns the status of the response, `closed` or `silent`."""
    try:
        reader, writer = await _open(address)
    except OSError:
        return "closed"
    try:
        writer.write(request)
        async with asyncio.timeout(_RESPONSE_TIMEOUT_S):
            line = await reader.readline()
        return f"status {line.split()[1].decode()}" if line.startswith(b"HTTP/") else "closed"
    except ConnectionError:
        return "closed"
    except TimeoutError:
        return "silent"
    finally:
        _abort(writer)


@contextlib.asynccontextmanager
async def _connections(target: Target, num_connections: int) -> AsyncIterator[list[asyncio.StreamWriter]]:
    """Open connections that read nothing."""
    writers: list[asyncio.StreamWriter] = []
    try:
        while len(writers) < num_connections:
            num_more = min(_AT_ONCE, num_connections - len(writers))
            opened = await asyncio.gather(*(_open(target.http_address) for _ in range(num_more)))
            for _, writer in opened:
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                writers.append(writer)
        yield writers
    finally:
        for writer in writers:
            _abort(writer)


async def _open(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


def _abort(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(RuntimeError):
        writer.transport.abort()


def _completion_request(fields: dict[str, Any]) -> bytes:
    """Return a request for a completion with these fields."""
    return _post_completion(json.dumps({"max_tokens": 1, **fields}).encode())


def _post_completion(body: bytes) -> bytes:
    """Return a request for a completion with this body, which need not be valid."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nradixkv-tenant: hostile\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body
