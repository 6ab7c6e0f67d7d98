"""A call whose path is not UTF-8 ends the server of grpcio 1.85. Another one takes over, with the same engine."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import grpc
import pytest

from bench.hostile.attacks.frames import END_HEADERS, END_STREAM, HEADERS, RawConnection, block, frame
from radixkv.config import ServerConfig
from radixkv.service.client import AsyncClient
from radixkv.service.server.server import Server, _serve_until_signal
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import becomes_true, serving

PATH = "/radixkv.v1.PrefillService/Prefill~"


async def send_broken_path(address: str) -> None:
    connection = await RawConnection.open(address)
    path = block(PATH).replace(b"~", b"\xe3")
    connection.write(frame(HEADERS, END_STREAM | END_HEADERS, 1, path))
    await asyncio.sleep(0.1)  # it leaves before the connection does
    connection.close()


def test_a_server_that_grpc_has_ended_says_so():
    async def run():
        async with serving(FakeEngine()) as (server, address):
            assert isinstance(server, Server)
            before = server.has_ended
            await send_broken_path(address)
            return before, await becomes_true(lambda: server.has_ended)

    assert asyncio.run(run()) == (False, True)


def test_another_server_takes_over_on_the_same_port(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()

    async def ask(client: AsyncClient) -> int:
        end = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            try:
                return (await client.prefill([1, 2])).next_token_id
            except grpc.aio.AioRpcError:
                if asyncio.get_running_loop().time() > end:
                    raise
            await asyncio.sleep(0.05)

    async def run() -> list[int]:
        config = ServerConfig(port=0)
        serving = asyncio.create_task(_serve_until_signal(engine, config, lambda config, _: Server(engine, config)))
        printed = ""
        while "\n" not in printed:
            await asyncio.sleep(0.01)
            printed += capfd.readouterr().out
        address = printed.split()[-1]
        async with AsyncClient(address) as client:
            answers = [await ask(client)]
            for round_number in (1, 2):
                await send_broken_path(address)
                assert await becomes_true(
                    lambda number=round_number: caplog.text.count("another one takes over") == number
                )
                answers.append(await ask(client))
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(serving, PATIENCE_S)
        return answers

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(run()) == [3, 3, 3]
