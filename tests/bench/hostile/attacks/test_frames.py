"""The HTTP/2 client that writes its own frames, against a server that responds with given bytes."""

from __future__ import annotations

import asyncio

from bench.hostile.attacks.frames import ACK, HEADERS, SETTINGS, RawConnection, frame

SERVER_SETTINGS = frame(SETTINGS, 0, 0, bytes(6))


def exchange(response, call):
    """Return the result of `call(address)`, and the bytes that the server received, which sends `response` first."""

    async def run():
        received = asyncio.get_running_loop().create_future()

        async def serve(reader, writer):
            writer.write(response)
            received.set_result(await reader.read())
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            result = await call("{}:{}".format(*server.sockets[0].getsockname()))
            return result, await received

    return asyncio.run(run())


async def read_status(address):
    connection = await RawConnection.open(address)
    try:
        return await connection.read_status(60)
    finally:
        connection._writer.close()


def response(number, message):
    """Return the frames of a server that ends a call with a gRPC status and a message after its length."""
    return SERVER_SETTINGS + frame(HEADERS, 5, 1, b"\0\x0bgrpc-status\2" + number + b"\0\x0cgrpc-message" + message)


def test_the_settings_of_the_server_are_acknowledged():
    _, received = exchange(response(b"12", b"\1x"), read_status)
    assert received.endswith(frame(SETTINGS, ACK, 0, b""))


def test_the_status_is_returned():
    assert exchange(response(b"12", b"\1x"), read_status)[0] == "12"


def test_frames_that_the_server_cannot_read_differ_from_a_server_that_is_unavailable():
    assert exchange(response(b"14", b"\x1aFailed parsing HTTP/2 (x)"), read_status)[0] == "unreadable"
    assert exchange(response(b"14", b"\x08draining"), read_status)[0] == "14"
