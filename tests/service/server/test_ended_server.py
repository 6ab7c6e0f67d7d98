"""A call whose path is not UTF-8 ends the server of grpcio 1.85. The process may not go on without one."""

from __future__ import annotations

import asyncio

from bench.hostile.attacks.frames import END_HEADERS, END_STREAM, HEADERS, RawConnection, block, frame
from radixkv.service.server.server import Server
from tests.service.fake_engine import FakeEngine
from tests.service.serving import becomes_true, serving

PATH = "/radixkv.v1.PrefillService/Prefill~"


def test_a_server_that_grpc_has_ended_says_so():
    async def run():
        async with serving(FakeEngine()) as (server, address):
            assert isinstance(server, Server)
            before = server.has_ended
            connection = await RawConnection.open(address)
            path = block(PATH).replace(b"~", b"\xe3")
            connection.write(frame(HEADERS, END_STREAM | END_HEADERS, 1, path))
            ended = await becomes_true(lambda: server.has_ended)
            connection.close()
            return before, ended

    assert asyncio.run(run()) == (False, True)
