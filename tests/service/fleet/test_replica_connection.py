"""Connections to servers of fake engines on loopback."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import grpc.aio
import pytest

from bench.hostile.attacks.frames import SETTINGS, frame
from radixkv.config import Config, ServerConfig
from radixkv.service.fleet import replica_connection
from radixkv.service.fleet.replica import replica_server
from radixkv.service.fleet.replica_connection import HealthCheckTimes, ReplicaConnection, ReplicaLost
from radixkv.v1 import prefill_pb2
from tests.events.fake_source import FakeSource
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.fleet.fake_connection import facts
from tests.service.server.auth.certificates import CredentialFiles
from tests.service.serving import becomes_true, serving

SETTINGS_FRAME = frame(SETTINGS, 0, 0, b"")


@contextlib.asynccontextmanager
async def connection_to(address: str):
    connection = ReplicaConnection(facts(address), HealthCheckTimes(0.01, 5.0))
    try:
        yield connection
    finally:
        await connection.close()


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_a_connection_is_up_while_the_server_is_serving() -> None:
    async def test() -> None:
        async with serving(FakeEngine()) as (server, address), connection_to(address) as connection:
            await connection.check()
            assert connection.is_up
            server._health.enter_graceful_shutdown()
            await connection.check()
            assert not connection.is_up
            assert await connection.wait_for(asyncio.sleep(0, "an unfinished answer")) == "an unfinished answer"

    run(test)


def test_a_connection_has_tls_and_knows_the_name_in_a_certificate(tmp_path) -> None:
    credential_files = CredentialFiles(tmp_path)

    async def test() -> None:
        async with serving(FakeEngine(), **credential_files.tls) as (_, address):
            for options, is_up in (
                ({"tls_ca": str(credential_files.ca_file)}, True),
                ({"tls_ca": str(credential_files.ca_file), "tls_name": "localhost"}, True),
                ({"tls_ca": str(credential_files.ca_file), "tls_name": "another"}, False),
                ({"tls_ca": str(tmp_path / "client_ca.pem")}, False),
                ({}, False),
            ):
                connection = ReplicaConnection(facts(address), HealthCheckTimes(0.01, 5.0), **options)
                await connection.check()
                assert connection.is_up == is_up, options
                await connection.close()

    run(test)


def test_calls_to_a_lost_server_are_abandoned() -> None:
    async def test() -> None:
        async with connection_to("127.0.0.1:1") as connection:
            waiting = asyncio.ensure_future(connection.wait_for(asyncio.Event().wait()))
            await asyncio.sleep(0)
            await connection.check()
            assert not connection.is_up
            with pytest.raises(ReplicaLost, match="it answers neither the call nor health checks"):
                await waiting

    run(test)


@pytest.mark.parametrize("greeting", [b"", SETTINGS_FRAME], ids=["silent", "connected"])
@pytest.mark.parametrize("is_dripping", [False, True])
def test_a_call_to_a_replica_that_accepts_but_does_not_answer_is_abandoned(
    greeting: bytes, *, is_dripping: bool
) -> None:
    connections = set()

    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.current_task())
        try:
            writer.write(greeting)
            for byte in SETTINGS_FRAME * 1000 if is_dripping else b"":
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)
            while await reader.read(65_536):
                pass
        finally:
            writer.transport.abort()

    async def test() -> None:
        server = await asyncio.start_server(stall, "127.0.0.1", 0)
        address = "{}:{}".format(*server.sockets[0].getsockname())
        connection = ReplicaConnection(facts(address), HealthCheckTimes(0.01, 0.2))
        prefill = connection.prefill.Prefill(prefill_pb2.PrefillRequest(token_ids=[1]), timeout=PATIENCE_S)
        waiting = asyncio.ensure_future(connection.wait_for(prefill))
        await connection.check()
        assert not connection.is_up
        with pytest.raises(ReplicaLost, match="answers neither the call nor health checks"):
            await waiting
        assert prefill.cancelled()
        await connection.close()
        server.close()
        for each in connections:
            each.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    run(test)


def test_a_connection_recovers() -> None:
    async def test() -> None:
        async with serving(FakeEngine()) as (_, address), connection_to(address) as connection:
            check, connection._check_health = connection._check_health, Refusing(grpc.StatusCode.DEADLINE_EXCEEDED)
            await connection.check()
            assert not connection.is_up
            connection._check_health = check
            await connection.check()
            assert connection.is_up
            assert await connection.wait_for(asyncio.sleep(0, "an answer")) == "an answer"

    run(test)


class Refusing:
    """Stands in for the health check of a connection; ends with a status."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    async def __call__(self, request, timeout):
        raise grpc.aio.AioRpcError(self._code, grpc.aio.Metadata(), grpc.aio.Metadata())


def test_a_replica_that_refuses_health_checks_counts_as_up() -> None:
    async def test() -> None:
        async with connection_to("127.0.0.1:1") as connection:
            connection._check_health = Refusing(grpc.StatusCode.RESOURCE_EXHAUSTED)
            await connection.check()
            assert connection.is_up
            assert await connection.wait_for(asyncio.sleep(0, "an answer")) == "an answer"
            connection._check_health = Refusing(grpc.StatusCode.UNAVAILABLE)
            await connection.check()
            assert not connection.is_up

    run(test)


def test_calls_delay_neither_health_checks_nor_events() -> None:
    async def test() -> None:
        engine = FakeEngine(is_gated=True)
        engine.events = FakeSource()
        async with serving(engine, max_connection_calls=2) as (_, address), connection_to(address) as connection:
            request = prefill_pb2.PrefillRequest(token_ids=[1, 2, 3])
            calls = [asyncio.ensure_future(connection.prefill.Prefill(request)) for _ in range(3)]
            assert await becomes_true(lambda: len(engine.futures) == 2)
            await connection.check()
            assert connection.is_up
            engine.events.store(1, 2, 3, 4)
            assert (await anext(connection.subscribe())).events
            engine.open_gate()
            assert len(await asyncio.gather(*calls)) == 3

    run(test)


def test_an_unread_response_does_not_end_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    # The flow-control window of a call stays at 64 KiB, so the response is sent only as the client reads it. Otherwise,
    # gRPC enlarges the window under load.
    channel_options = replica_connection.channel_options
    monkeypatch.setattr(
        replica_connection, "channel_options", lambda *args: (*channel_options(*args), ("grpc.http2.bdp_probe", 0))
    )

    async def test() -> None:
        engine = FakeEngine(is_gated=True)
        bounds = replica_server(Config(server=ServerConfig(send_timeout_s=0.2)), "127.0.0.1")
        async with (
            serving(engine, send_timeout_s=bounds.send_timeout_s) as (server, address),
            connection_to(address) as connection,
        ):
            prompt = prefill_pb2.PrefillRequest(token_ids=[1, 2, 3])
            large = prefill_pb2.PrefillRequest(token_ids=[1] * 8000)
            unread = connection.prefill.Generate(
                prefill_pb2.GenerateRequest(prefill=large, max_new_tokens=2, prompt_logprobs=100)
            )
            assert await becomes_true(lambda: server.receiver._unsent._passed_at_s)
            call = asyncio.ensure_future(connection.prefill.Prefill(prompt))
            await asyncio.sleep(1.0)  # five times the `send_timeout_s` of the ingress
            assert not call.done(), call.exception()
            engine.open_gate()
            assert (await call).next_token_id == 6
            unread.cancel()

    run(test)


def test_a_call_ends_with_the_task_that_awaits_it() -> None:
    async def test() -> None:
        async with connection_to("127.0.0.1:1") as connection:
            unfinished = asyncio.get_running_loop().create_future()
            waiting = asyncio.ensure_future(connection.wait_for(unfinished))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert unfinished.cancelled()

    run(test)
