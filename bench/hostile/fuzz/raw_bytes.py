"""Byte sequences that violate HTTP/2 or gRPC."""

from __future__ import annotations

import random
from collections.abc import Callable

from bench.hostile.attacks.flood import PREFILL
from bench.hostile.attacks.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    frame,
    header_block,
)

_CONNECTION_START = PREFACE + frame(SETTINGS, 0, 0, b"")
_MESSAGE = b"\0\0\0\0\6\x0a\4\1\0\0\0"  # of a Prefill with the token 1, not compressed, 6 bytes


def _call(body: bytes = _MESSAGE, **headers: str) -> bytes:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    path = fields.pop("path", PREFILL)
    if "method" in fields:
        fields[":method"] = fields.pop("method")
    headers_frame = frame(HEADERS, END_HEADERS, 1, header_block(path, fields))
    return _CONNECTION_START + headers_frame + frame(DATA, END_STREAM, 1, body)


def _random_frames(rng: random.Random) -> bytes:
    frames = [
        frame(rng.randrange(12), rng.randrange(256), rng.randrange(8), rng.randbytes(rng.randrange(64)))
        for _ in range(rng.randint(1, 10))
    ]
    return _CONNECTION_START + b"".join(frames)


def _cut_call(rng: random.Random) -> bytes:
    whole = _call()
    return whole[: rng.randrange(len(whole))]


def _flip_bits(rng: random.Random) -> bytes:
    whole = bytearray(_call())
    for _ in range(rng.randint(1, 5)):
        whole[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
    return bytes(whole)


KINDS: dict[str, Callable[[random.Random], bytes]] = {
    "noise": lambda rng: rng.randbytes(rng.randint(1, 2000)),
    "noise after the preface": lambda rng: _CONNECTION_START + rng.randbytes(rng.randint(1, 500)),
    "random frames": _random_frames,
    "cut call": _cut_call,
    "call with flipped bits": _flip_bits,
    "HTTP/1.1": lambda _: b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
    "TLS": lambda rng: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500),
    "unknown method": lambda rng: _call(path="/no.Service/Method"),
    "other HTTP method": lambda rng: _call(method=rng.choice(["GET", "PUT", "DELETE", "X"])),
    "large headers": lambda rng: _call(x="y" * rng.choice([100, 9000, 16_000])),
    "bad gzip": lambda rng: _call(b"\1\0\0\0\4" + rng.randbytes(4), grpc_encoding="gzip"),
    "bad timeout": lambda rng: _call(grpc_timeout=rng.choice(["x", "-1S", "99999999999H", "0n"])),
    "other content type": lambda rng: _call(content_type="text/html"),
    "announced length beyond the message": lambda rng: _call(b"\0\xff\xff\xff\xff" + bytes(10)),
    "headers without an end": lambda _: (
        _CONNECTION_START
        + frame(HEADERS, 0, 1, b"")
        + b"".join(frame(CONTINUATION, 0, 1, b"\0\1x\1y") for _ in range(200))
    ),
}
"""Functions that return the bytes to send on a connection, by name."""
