"""Server-sent events to a client that does not read."""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

from radixkv.errors import DeadlinePassed
from radixkv.service.http.event_stream import EventStream
from tests.patience import PATIENCE_S


def test_an_event_counts_as_sent_when_the_system_has_buffered_it() -> None:
    unsent_bytes: list[int] = []

    async def send(request: web.BaseRequest) -> web.StreamResponse:
        events = EventStream(request, {}, timeout_s=0.2)
        assert request.transport is not None
        request.transport.set_write_buffer_limits(0)  # as the HTTP port does
        with contextlib.suppress(DeadlinePassed):
            while True:
                await events.send("x" * 1000)
                unsent_bytes.append(request.transport.get_write_buffer_size())
        sending_ended.set()
        return events.response

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(web.Server(send), "127.0.0.1", 0)
        async with server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=1)
            writer.transport.pause_reading()
            writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await asyncio.wait_for(sending_ended.wait(), PATIENCE_S)
            writer.close()

    sending_ended = asyncio.Event()
    asyncio.run(main())
    assert set(unsent_bytes) == {0}
