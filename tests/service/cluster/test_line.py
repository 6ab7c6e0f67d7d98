"""Lines to servers of fake engines on loopback."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from radixkv.service.cluster.line import Line, Patience, ReplicaLost
from tests.patience import PATIENCE_S
from tests.service.cluster.fake_line import facts
from tests.service.fake_engine import FakeEngine
from tests.service.server.identity.certificates import Papers
from tests.service.serving import serving


@contextlib.asynccontextmanager
async def line_to(address: str):
    line = Line(replace(facts(address)), Patience(0.01, 5.0))
    try:
        yield line
    finally:
        await line.close()


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_a_line_is_up_while_the_server_says_so() -> None:
    async def test() -> None:
        async with serving(FakeEngine()) as (server, address), line_to(address) as line:
            await line.look()
            assert line.is_up
            server._health.leave()
            await line.look()
            assert not line.is_up
            assert await line.wait_for(asyncio.sleep(0, "an answer under way")) == "an answer under way"

    run(test)


def test_a_line_has_tls_and_knows_the_name_in_a_certificate(tmp_path) -> None:
    papers = Papers(tmp_path)

    async def test() -> None:
        async with serving(FakeEngine(), **papers.tls) as (_, address):
            for options, is_up in (
                ({"tls_ca": str(papers.ca_file)}, True),
                ({"tls_ca": str(papers.ca_file), "tls_name": "localhost"}, True),
                ({"tls_ca": str(papers.ca_file), "tls_name": "another"}, False),
                ({"tls_ca": str(tmp_path / "client_ca.pem")}, False),
                ({}, False),
            ):
                line = Line(facts(address), Patience(0.01, 5.0), **options)
                await line.look()
                assert line.is_up == is_up, options
                await line.close()

    run(test)


def test_calls_to_a_server_that_is_gone_are_given_up() -> None:
    async def test() -> None:
        async with line_to("127.0.0.1:1") as line:
            waiting = asyncio.ensure_future(line.wait_for(asyncio.Event().wait()))
            await asyncio.sleep(0)
            await line.look()
            assert not line.is_up
            with pytest.raises(ReplicaLost, match="expected an answer, got none"):
                await waiting

    run(test)


def test_a_line_recovers() -> None:
    async def test() -> None:
        async with serving(FakeEngine()) as (_, address), line_to(address) as line:
            health, line._health = line._health, Refusing()
            await line.look()
            assert not line.is_up
            line._health = health
            await line.look()
            assert line.is_up
            assert await line.wait_for(asyncio.sleep(0, "an answer")) == "an answer"

    run(test)


class Refusing:
    """Health checks that nobody answers."""

    async def Check(self, request, timeout):  # noqa: N802
        raise grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, grpc.aio.Metadata(), grpc.aio.Metadata())


def test_what_is_awaited_ends_with_its_caller() -> None:
    async def test() -> None:
        async with line_to("127.0.0.1:1") as line:
            inner = asyncio.get_running_loop().create_future()
            waiting = asyncio.ensure_future(line.wait_for(inner))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert inner.cancelled()

    run(test)
