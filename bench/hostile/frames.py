"""A caller that speaks HTTP/2 by hand, and so can do what no client does: it never widens a window."""

from __future__ import annotations

import asyncio

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4
_INITIAL_WINDOW_SIZE = 4


class RawConnection:
    """One connection to a server on loopback. Nothing that the server sends is read."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._next_stream = 1

    @classmethod
    async def open(cls, address: str, window_bytes: int = 0) -> RawConnection:
        """Connect and say how much of each answer the server may send."""
        host, _, port = address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1)
        settings = _INITIAL_WINDOW_SIZE.to_bytes(2, "big") + window_bytes.to_bytes(4, "big")
        writer.write(_PREFACE + _frame(_SETTINGS, 0, 0, settings))
        return cls(writer)

    def call(self, path: str, message: bytes | None, announced_bytes: int | None = None) -> None:
        """Begin a call.

        Args:
            path: `/SERVICE/METHOD`.
            message: sent at once; None to send none.
            announced_bytes: length that is announced; that of the message by default. With more, the call stays open.
        """
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self._writer.write(_frame(_HEADERS, _END_HEADERS, stream, _block(path)))
        if message is not None:
            size = len(message) if announced_bytes is None else announced_bytes
            flags = _END_STREAM if size == len(message) else 0
            self._writer.write(_frame(_DATA, flags, stream, b"\0" + size.to_bytes(4, "big") + message))

    def close(self) -> None:
        """End the connection at once."""
        self._writer.transport.abort()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _block(path: str) -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    pairs = ((name.encode(), value.encode()) for name, value in fields.items())
    return b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in pairs)
