"""A client that writes HTTP/2 frames itself, and can therefore violate the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, CONTINUATION = 0, 1, 3, 4, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1

_INITIAL_WINDOW_SIZE = 4
_CANCEL = (8).to_bytes(4, "big")
_FRAME_HEADER_BYTES = 9
_STATUS = re.compile(rb"grpc-status[\x01\x02](\d+)")
# The message with which gRPC ends the calls of a connection, often as UNAVAILABLE, if it cannot parse a frame.
_UNREADABLE = b"Failed parsing HTTP/2"
_READ_BYTES = 65_536
_MAX_PAYLOAD_BYTES = 16_384  # of a frame, by default
_OVERLAP_BYTES = 64  # searched again after each read, because a read may end within a status


class RawConnection:
    """One connection to a server. After `open`, it reads nothing unless `read_status` or `discard` is called.

    Args:
        reader, writer: the two directions.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._next_stream = 1

    @classmethod
    async def open_socket(cls, address: str) -> RawConnection:
        """Connect and send nothing."""
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port), limit=1))

    @classmethod
    async def open(cls, address: str, window_bytes: int = 0) -> RawConnection:
        """Connect, announce the flow-control window of each stream, and acknowledge the server's settings.

        gRPC ends connections that acknowledge nothing for 10 s.
        """
        connection = await cls.open_socket(address)
        settings = _INITIAL_WINDOW_SIZE.to_bytes(2, "big") + window_bytes.to_bytes(4, "big")
        connection.write(PREFACE + frame(SETTINGS, 0, 0, settings))
        await connection._acknowledge()
        return connection

    async def _acknowledge(self) -> None:
        """Read the server's settings, which come first, and acknowledge them, unless the server ends the connection."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            frame_header = await self._reader.readexactly(_FRAME_HEADER_BYTES)
            payload_bytes = int.from_bytes(frame_header[:3], "big")
            await self._reader.readexactly(payload_bytes)
            self.write(frame(SETTINGS, ACK, 0, b""))

    def write(self, data: bytes) -> None:
        """Send bytes unchanged. Does nothing after the server has closed the connection."""
        if not self._writer.transport.is_closing():
            self._writer.write(data)

    async def drain(self) -> None:
        """Wait until most of what was written has been sent. Raises ConnectionError if the server has disconnected."""
        if self._writer.transport.is_closing():
            raise ConnectionResetError
        await self._writer.drain()

    async def discard(self) -> None:
        """Read what the server sends until it ends the connection."""
        with contextlib.suppress(ConnectionError):
            while await self._reader.read(_READ_BYTES):
                pass

    def reset(self, stream: int) -> None:
        """Reset a stream."""
        self.write(frame(RST_STREAM, 0, stream, _CANCEL))

    def call(
        self,
        path: str | bytes,
        message: bytes | None,
        announced_bytes: int | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        *,
        is_compressed: bool = False,
    ) -> int:
        """Begin a call. Returns the number of its stream.

        Args:
            path: `/SERVICE/METHOD`.
            message: sent immediately; None to send none.
            announced_bytes: length in the message's prefix; the true one by default. With a larger one, the call stays
                open.
            headers: header fields that are added or that replace usual ones; see `header_block`.
            is_compressed: the value of the message's compressed flag.
        """
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self.write(frame(HEADERS, END_HEADERS, stream, header_block(path, headers)))
        if message is not None:
            size = len(message) if announced_bytes is None else announced_bytes
            body = bytes([is_compressed]) + size.to_bytes(4, "big") + message
            for start in range(0, len(body), _MAX_PAYLOAD_BYTES):
                end = min(start + _MAX_PAYLOAD_BYTES, len(body))
                flags = END_STREAM if end == len(body) and size == len(message) else 0
                self.write(frame(DATA, flags, stream, body[start:end]))
        return stream

    async def read_status(self, timeout_s: float) -> str:
        """Read what the server sends until it names a status, ends the connection, or is silent.

        Returns:
            The number of the status, `unreadable` if gRPC could not read the frames, `closed` or `silent`.
        """
        data = b""
        try:
            async with asyncio.timeout(timeout_s):
                while received := await self._reader.read(_READ_BYTES):
                    data = data[-_OVERLAP_BYTES:] + received
                    if status_match := _STATUS.search(data):
                        return "unreadable" if _UNREADABLE in data else status_match[1].decode()
        except TimeoutError:
            return "silent"
        except ConnectionError:
            pass
        return "closed"

    def close(self) -> None:
        """End the connection immediately."""
        with contextlib.suppress(RuntimeError):
            self._writer.transport.abort()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def header_block(path: str | bytes, headers: Mapping[str, str | bytes] | None = None) -> bytes:
    """Return the header block that begins a gRPC call. `headers` add fields, or replace usual ones of the same name."""
    fields: dict[str, str | bytes] = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
        **(headers or {}),
    }
    return b"".join(b"\0" + _encode_string(name) + _encode_string(value) for name, value in fields.items())


def _encode_string(text: str | bytes) -> bytes:
    """Encode a string as HPACK does: its length, with 7 bits in the first byte, then its bytes."""
    data = text.encode() if isinstance(text, str) else text
    if len(data) < 127:
        return bytes([len(data)]) + data
    remaining_length, encoded_length = len(data) - 127, bytearray([127])
    while remaining_length >= 128:
        encoded_length.append(remaining_length & 127 | 128)
        remaining_length >>= 7
    return bytes([*encoded_length, remaining_length]) + data
