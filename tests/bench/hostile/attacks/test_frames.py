"""The HTTP/2 client that writes its own frames, against a server that responds with given bytes."""

from __future__ import annotations

import asyncio

from bench.hostile.attacks.frames import ACK, HEADERS, SETTINGS, RawConnection, frame

SERVER_SETTINGS = frame(SETTINGS, 0, 0, bytes(6))


def exchange(answer, talk):
    """Return the result of `talk(address)`, and what a server received that sends `answer` and reads to the end."""

    async def run():
        received = asyncio.get_running_loop().create_future()

        async def serve(reader, writer):
            writer.write(answer)
            received.set_result(await reader.read())
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            result = await talk("{}:{}".format(*server.sockets[0].getsockname()))
            return result, await received

    return asyncio.run(run())


async def status(address):
    connection = await RawConnection.open(address)
    try:
        return await connection.read_status(60)
    finally:
        connection._writer.close()


def answer(number, message):
    return SERVER_SETTINGS + frame(HEADERS, 5, 1, b"\0\x0bgrpc-status\2" + number + b"\0\x0cgrpc-message" + message)


def test_the_settings_of_the_server_are_acknowledged():
    _, received = exchange(answer(b"12", b"\1x"), status)
    assert received.endswith(frame(SETTINGS, ACK, 0, b""))


def test_the_status_is_returned():
    assert exchange(answer(b"12", b"\1x"), status)[0] == "12"


def test_frames_that_the_server_cannot_read_differ_from_a_server_that_is_unavailable():
    assert exchange(answer(b"14", b"\x1aFailed parsing HTTP/2 (x)"), status)[0] == "unreadable"
    assert exchange(answer(b"14", b"\x08draining"), status)[0] == "14"
