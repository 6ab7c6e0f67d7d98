"""A streamed HTTP response: server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import orjson
from aiohttp import web

from radixkv.errors import DeadlinePassed


class EventStream:
    """Sends server-sent events, each of which the client must read within a timeout.

    `send` returns when the operating system has buffered the event. If the client does not read, the stream pauses, and
    the tokens that are generated meanwhile are sent as one event.

    The headers are sent with the first event, so that a request that fails earlier gets an HTTP status of its own.

    Args:
        request: the HTTP request.
        headers: further headers of the response.
        timeout_s: seconds that the client may leave an event unread; then its connection is closed.
    """

    def __init__(self, request: web.BaseRequest, headers: Mapping[str, str], timeout_s: float) -> None:
        self.response = web.StreamResponse(
            headers={"content-type": "text/event-stream", "cache-control": "no-cache", **headers}
        )
        self._request = request
        self._timeout_s = timeout_s

    @property
    def has_begun(self) -> bool:
        """Whether the headers were sent."""
        return self.response.prepared

    async def send(self, data: Mapping[str, Any] | str, name: str | None = None) -> None:
        """Send an event: a JSON object or text, optionally with a name.

        Raises:
            DeadlinePassed: the client did not read in time; its connection is closed.
        """
        payload = data.encode() if isinstance(data, str) else orjson.dumps(data)
        event = b"data: %b\n\n" % payload if name is None else b"event: %b\ndata: %b\n\n" % (name.encode(), payload)
        async with self._client_timeout():
            writer = await self.response.prepare(self._request)  # sends the headers the first time
            await self.response.write(event)
            if writer is not None:
                await writer.drain()  # `write` itself waits only after every 64 KiB

    async def end(self) -> web.StreamResponse:
        """End the response after the last event, and return it. Raises as `send`."""
        async with self._client_timeout():
            await self.response.write_eof()
        return self.response

    @contextlib.asynccontextmanager
    async def _client_timeout(self) -> AsyncGenerator[None, None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise DeadlinePassed(
                f"response: the client read nothing within {self._timeout_s:g} s (`server.send_timeout_s`)"
            ) from error
