"""No bytes from a client shut the server down, or fill the log through gRPC's own records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2

from bench.hostile.attacks.frames import END_HEADERS, END_STREAM, HEADERS, RawConnection, frame, header_block
from radixkv.service.client import AsyncClient
from radixkv.service.server import accept_loop
from radixkv.service.server.accept_loop import is_kept, make_server
from radixkv.service.server.reset_floods import MAX_RESETS
from radixkv.service.server.server import Server
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serving

PROBE = "/radixkv.v1.PrefillService/Probe"
METADATA_KEYS = ("authorization", "user-agent", "traceparent", "x-anything", "grpc-accept-encoding")
NOT_UTF8 = ["/radixkv.v1.PrefillService/Prefill\xe3", "\xff", "/\x80/\x80", "/a/\xed\xa0\x80"]

Handler = Callable[[bytes, Any], Awaitable[bytes]]


async def echo(request: bytes, _: object) -> bytes:
    return request


async def call_broken_path(address: str, path: str) -> None:
    """Call a method whose path has these bytes, one per character, and disconnect after a moment."""
    connection = await RawConnection.open(address)
    placeholder = "~" * len(path)  # of the same length, because the length is a part of the header block
    header = header_block(placeholder).replace(placeholder.encode(), path.encode("latin-1"))
    connection.write(frame(HEADERS, END_STREAM | END_HEADERS, 1, header))
    await asyncio.sleep(0.1)  # the bytes arrive before the connection ends
    connection.close()


@pytest.mark.parametrize("path", NOT_UTF8)
def test_a_path_that_is_not_utf8_fails_alone(path: str) -> None:
    async def run() -> tuple[list[int], bool]:
        async with serving(FakeEngine()) as (server, address), AsyncClient(address) as client:
            assert isinstance(server, Server)
            tokens = []
            for _ in range(3):
                await call_broken_path(address, path)
                tokens.append((await client.prefill([1, 2])).next_token_id)
            return tokens, server.has_ended

    assert asyncio.run(run()) == ([3, 3, 3], False)


def test_a_running_call_survives_broken_paths() -> None:
    async def run() -> bytes:
        entered, release = asyncio.Event(), asyncio.Event()

        async def wait(request: bytes, _: object) -> bytes:
            entered.set()
            await release.wait()
            return request

        server, address = await start_server({"Wait": wait})
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary("/test.Echo/Wait")(b"kept")
            await asyncio.wait_for(entered.wait(), PATIENCE_S)
            for path in NOT_UTF8:
                await call_broken_path(address, path)
            release.set()
            answer: bytes = await asyncio.wait_for(call, PATIENCE_S)
        await server.stop(None)
        return answer

    assert asyncio.run(run()) == b"kept"


@pytest.mark.parametrize("path", ["/test.Echo/Other", "/other.Service/Echo", "/", "/test.Echo/\u00e9"])
def test_a_method_that_does_not_exist_is_unimplemented(path: str) -> None:
    async def run() -> grpc.StatusCode:
        server, address = await start_server({"Echo": echo})
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(path)(b"", timeout=PATIENCE_S)
        await server.stop(None)
        return refused.value.code()

    assert asyncio.run(run()) is grpc.StatusCode.UNIMPLEMENTED


def test_calls_beyond_the_limit_are_refused_until_others_end() -> None:
    async def run() -> list[grpc.StatusCode]:
        release = asyncio.Event()

        async def wait(request: bytes, _: object) -> bytes:
            await release.wait()
            return request

        server, address = await start_server({"Wait": wait, "Echo": echo}, max_concurrent_calls=2)
        async with grpc.aio.insecure_channel(address) as channel:
            calls = [channel.unary_unary("/test.Echo/Wait")(b"") for _ in range(5)]
            refused = await asyncio.wait_for(first_codes(calls, 3), PATIENCE_S)
            release.set()
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), PATIENCE_S)
            assert await channel.unary_unary("/test.Echo/Echo")(b"later", timeout=PATIENCE_S) == b"later"
        await server.stop(None)
        return refused

    assert asyncio.run(run()) == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 3


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/radixkv.v1.CacheService/Stats", b""),
        ("/radixkv.v1.PrefillService/Probe", b"\x0a\x04\x01\x00\x00\x00"),
        ("/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest().SerializeToString()),
    ],
)
def test_methods_of_all_services_are_served(path: str, message: bytes) -> None:
    async def run() -> bytes:
        async with serving(FakeEngine()) as (_, address), grpc.aio.insecure_channel(address) as channel:
            answer: bytes = await asyncio.wait_for(channel.unary_unary(path)(message), PATIENCE_S)
            return answer

    assert asyncio.run(run())


def test_a_connection_that_begins_calls_only_to_reset_them_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> tuple[str, bytes]:
        server, address = await start_server({"Echo": echo})
        async with grpc.aio.insecure_channel(address) as channel:
            honest = channel.unary_unary("/test.Echo/Echo")
            assert await honest(b"before", timeout=PATIENCE_S) == b"before"
            connection = await RawConnection.open(address, 65_535)
            for _ in range(2 * MAX_RESETS):
                connection.reset(connection.call("/test.Echo/Echo", None))
            status = await connection.read_status(PATIENCE_S)
            connection.close()
            answer: bytes = await honest(b"after", timeout=PATIENCE_S)
        await server.stop(None)
        return status, answer

    assert asyncio.run(run()) == ("closed", b"after")
    assert caplog.text.count("which begins calls only to reset them") == 1


def test_floods_on_many_connections_are_logged_once_per_second(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_floods = 3
    monkeypatch.setattr(accept_loop, "_LOG_PERIOD_S", PATIENCE_S)

    async def run() -> None:
        server, address = await start_server({"Echo": echo})
        for _ in range(num_floods):
            connection = await RawConnection.open(address, 65_535)
            for _ in range(2 * MAX_RESETS):
                connection.reset(connection.call("/test.Echo/Echo", None))
            assert await connection.read_status(PATIENCE_S) == "closed"
            connection.close()
        await server.stop(None)

    asyncio.run(run())
    assert caplog.text.count("which begins calls only to reset them") == 1


def test_a_connection_that_cancels_half_of_its_calls_stays_open(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        entered = asyncio.Event()

        async def wait(request: bytes, _: object) -> bytes:
            entered.set()
            await asyncio.Future()
            return request

        server, address = await start_server({"Echo": echo, "Wait": wait})
        async with grpc.aio.insecure_channel(address) as channel:
            for _ in range(MAX_RESETS + 10):
                assert await channel.unary_unary("/test.Echo/Echo")(b"x", timeout=PATIENCE_S) == b"x"
                entered.clear()
                call = channel.unary_unary("/test.Echo/Wait")(b"x")
                await asyncio.wait_for(entered.wait(), PATIENCE_S)
                call.cancel()
        await server.stop(None)

    asyncio.run(run())
    assert "only to reset them" not in caplog.text


@pytest.mark.skipif(not hasattr(cygrpc.AioServer, "_make_request_call_future"), reason="grpcio is older than 1.84")
def test_an_unknown_version_of_grpcio_serves_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accept_loop, "_CYGRPC_NAMES", ("_not_in_grpcio",))

    async def run() -> bytes:
        server, address = await start_server({"Echo": echo})
        async with grpc.aio.insecure_channel(address) as channel:
            answer: bytes = await channel.unary_unary("/test.Echo/Echo")(b"x", timeout=PATIENCE_S)
        await server.stop(None)
        return answer

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(run()) == b"x"
    assert "a call whose path is not UTF-8 may shut the server down" in caplog.text


async def start_server(methods: dict[str, Handler], max_concurrent_calls: int = 100) -> tuple[grpc.aio.Server, str]:
    """Start a server with these methods of the service `test.Echo`; return it with its address."""
    server = make_server([], max_concurrent_calls)
    handlers = {name: grpc.unary_unary_rpc_method_handler(each) for name, each in methods.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
    server.add_registered_method_handlers("test.Echo", handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


async def first_codes(calls: list[Any], num_calls: int) -> list[grpc.StatusCode]:
    """Return the statuses of the first calls that end."""
    codes = [asyncio.ensure_future(call.code()) for call in calls]
    ended = [await each for _, each in zip(range(num_calls), asyncio.as_completed(codes), strict=False)]
    for code in codes:
        code.cancel()
    return ended


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("grpc._cython.cygrpc", logging.ERROR, "", 0, text, ("/a/b",), None)


def test_only_the_records_that_clients_cause_are_dropped() -> None:
    assert not is_kept(record("ExecuteBatchError raised in core by servicer method [%s]"))
    assert not is_kept(record("Invalid encoding on %s"))
    assert is_kept(record("Unexpected [ValueError] raised by servicer method [%s]"))


@pytest.mark.parametrize("name", METADATA_KEYS)
def test_metadata_that_is_not_utf8_is_not_logged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> str:
        async with serving(FakeEngine()) as (_, address), AsyncClient(address) as client:
            connection = await RawConnection.open(address, 65_535)
            connection.call(PROBE, b"\x0a\x04\x01\x00\x00\x00", headers={name: b"secret \xff\xfe"})
            status = await connection.read_status(PATIENCE_S)
            connection.close()
            await client.prefill([1, 2])
            return status

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(run()) in ("0", "16")  # OK; or UNAUTHENTICATED, for the header `authorization`
    assert caplog.text == ""
