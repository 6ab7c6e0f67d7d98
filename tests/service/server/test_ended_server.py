"""A call whose path is not UTF-8 ends the server of grpcio 1.85. Another one takes over, with the same engine."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from bench.hostile.attacks.frames import END_HEADERS, END_STREAM, HEADERS, RawConnection, block, frame
from radixkv.config import KVSourceConfig, ServerConfig, TransferConfig
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
    async def run() -> list[int]:
        async with (
            lasting(FakeEngine(), ServerConfig(port=0), capfd) as (serving, address),
            AsyncClient(address) as client,
        ):
            answers = [await ask(client, serving)]
            for round_number in (1, 2):
                await send_broken_path(address)
                assert await becomes_true(lambda number=round_number: num_takeovers(caplog) == number)
                answers.append(await ask(client, serving))
            return answers

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(run()) == [3, 3, 3]


def test_files_that_can_not_be_used_when_another_server_takes_over_leave_what_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    tokens, of_source = tmp_path / "tokens.toml", tmp_path / "source.token"
    digest = hashlib.sha256(b"own").hexdigest()
    tokens.write_text(f'[[credentials]]\nname = "a"\nrole = "admin"\ntoken_sha256 = "{digest}"\n', "utf-8")
    of_source.write_text("theirs", "utf-8")
    sources = {"other": KVSourceConfig("127.0.0.1:1", token_file=str(of_source))}
    engine = FakeEngine()
    engine.transfer = SimpleNamespace(sources=sources, config=TransferConfig(), fleet=None)
    config = ServerConfig(port=0, tokens_file=str(tokens), insecure=True)

    async def run() -> list[int]:
        async with lasting(engine, config, capfd) as (serving, address), AsyncClient(address, token="own") as client:
            answers = [await ask(client, serving)]
            tokens.write_text("[[credent", "utf-8")
            of_source.unlink()
            await send_broken_path(address)
            assert await becomes_true(lambda: num_takeovers(caplog) == 1)
            return [*answers, await ask(client, serving)]

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(run()) == [3, 3]


@contextlib.asynccontextmanager
async def lasting(
    engine: FakeEngine, config: ServerConfig, capfd: pytest.CaptureFixture[str]
) -> AsyncIterator[tuple[asyncio.Task[None], str]]:
    """Yield a service whose servers may be ended, and its address; stop it in the end."""
    serving = asyncio.create_task(_serve_until_signal(engine, config, partial(Server, engine)))
    printed = ""
    while "\n" not in printed:
        await asyncio.sleep(0.01)
        printed += capfd.readouterr().out
    yield serving, printed.split()[-1]
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(serving, PATIENCE_S)


async def ask(client: AsyncClient, serving: asyncio.Task[None]) -> int:
    """Ask until some server of a service answers."""
    end = asyncio.get_running_loop().time() + PATIENCE_S
    while True:
        try:
            return (await client.prefill([1, 2])).next_token_id
        except grpc.aio.AioRpcError:
            if asyncio.get_running_loop().time() > end:
                raise
        assert not serving.done(), serving.exception()
        await asyncio.sleep(0.05)


def num_takeovers(caplog: pytest.LogCaptureFixture) -> int:
    return caplog.text.count("another one takes over")
