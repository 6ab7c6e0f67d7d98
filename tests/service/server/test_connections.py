"""The end of a drain, for callers whose calls are in flight when the server stops."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import radixkv.service.server.connections as connections_module
import radixkv.service.server.server as server_module
from bench.hostile.attacks.frames import RawConnection
from radixkv.service.client import AsyncClient
from radixkv.service.server.connections import close_connections, end_connections
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import refusal_of, serving


@contextlib.asynccontextmanager
async def stalling_proxy(address: str) -> AsyncIterator[SimpleNamespace]:
    """Yield a proxy in front of `address`. From `is_stalled` until `is_resumed`, the caller receives nothing from it.

    Attributes of the proxy:
        address: where callers connect.
        has_response: set when the proxy holds back bytes of the server, or the end of its connection.
    """
    proxy = SimpleNamespace(is_stalled=asyncio.Event(), is_resumed=asyncio.Event(), has_response=asyncio.Event())
    connections = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_response: bool) -> None:
        with contextlib.suppress(OSError):
            has_ended = False
            while not has_ended:
                piece = await reader.read(65_536)
                if is_response and proxy.is_stalled.is_set():
                    proxy.has_response.set()
                    await proxy.is_resumed.wait()
                writer.write(piece)
                has_ended = not piece
            writer.write_eof()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.current_task())
        far_reader, far_writer = await asyncio.open_connection(*address.rsplit(":", 1))
        with contextlib.suppress(asyncio.CancelledError):  # the proxy is closed
            await asyncio.gather(
                copy(reader, far_writer, is_response=False), copy(far_reader, writer, is_response=True)
            )
        writer.transport.abort()
        far_writer.transport.abort()

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    proxy.address = "{}:{}".format(*server.sockets[0].getsockname())
    try:
        yield proxy
    finally:
        server.close()
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections)


async def generate(client: AsyncClient) -> None:
    async for _ in client.generate([1], max_new_tokens=2, timeout_s=PATIENCE_S):
        pass


@pytest.mark.parametrize("method", ["Prefill", "Generate", "Stats"])
def test_a_call_that_arrives_while_the_server_stops_is_unavailable(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call arrives after the server has begun to stop, before its caller can know that. gRPC would cancel it."""
    monkeypatch.setattr(server_module, "_FLUSH_S", PATIENCE_S)
    calls = {
        "Prefill": lambda client: client.prefill([1], timeout_s=PATIENCE_S),
        "Generate": generate,
        "Stats": lambda client: client.stats(),
    }

    async def run() -> grpc.StatusCode:
        async with (
            serving(FakeEngine()) as (server, address),
            stalling_proxy(address) as proxy,
            AsyncClient(proxy.address) as client,
        ):
            await client.prefill([1], timeout_s=PATIENCE_S)
            proxy.is_stalled.set()
            draining = asyncio.create_task(server.drain())
            await asyncio.wait_for(proxy.has_response.wait(), PATIENCE_S)
            calling = asyncio.create_task(refusal_of(calls[method](client)))
            await asyncio.sleep(0.1)  # the call passes the proxy
            proxy.is_resumed.set()
            await draining
            return (await calling).code()

    assert asyncio.run(run()) is grpc.StatusCode.UNAVAILABLE


def test_after_a_drain_streams_without_an_end_are_unavailable_and_so_are_new_connections() -> None:
    async def run() -> tuple[grpc.StatusCode, grpc.StatusCode]:
        async with serving(FakeEngine()) as (server, address), grpc.aio.insecure_channel(address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            await server.drain()
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await watch.read() is not grpc.aio.EOF:
                    pass
            async with AsyncClient(address) as late:
                return await watch.code(), (await refusal_of(late.prefill([1], timeout_s=PATIENCE_S))).code()

    assert asyncio.run(run()) == (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE)


def test_a_client_that_keeps_its_connection_open_does_not_delay_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_FLUSH_S", 0.05)

    async def run() -> str:
        async with serving(FakeEngine()) as (server, address):
            connection = await RawConnection.open(address)
            await asyncio.wait_for(server.drain(), PATIENCE_S)
            status = await connection.read_status(PATIENCE_S)
            connection.close()
            return status

    assert asyncio.run(run()) == "closed"


def test_other_connections_of_the_process_stay_open() -> None:
    async def run() -> bytes:
        async with serving(FakeEngine()) as (_, address):
            ours, theirs = socket.socketpair()
            with ours, theirs, socket.create_server(("127.0.0.1", 0)) as other:
                await end_connections({int(address.rpartition(":")[2])}, 0.05)
                with socket.create_connection(other.getsockname()):
                    theirs.sendall(b"still here")
                    return ours.recv(100)

    assert asyncio.run(run()) == b"still here"


def test_a_descriptor_that_is_reused_for_a_file_leaves_no_duplicate_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "file").open("w") as file:
        monkeypatch.setattr(connections_module, "_socket_fds", lambda: [(file.fileno(), 0)])
        asyncio.run(end_connections({1}, 0))  # the first event loop opens files that stay open
        before = os.listdir("/proc/self/fd")
        asyncio.run(end_connections({1}, 0))
        assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_the_connection_of_a_peer_is_closed_and_no_other(family):
    host = "127.0.0.1" if family == "ipv4" else "::1"
    try:
        listener = socket.create_server((host, 0), family=socket.AF_INET if family == "ipv4" else socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no such address")
    with listener:
        address = listener.getsockname()[:2]
        with socket.create_connection(address) as bad, socket.create_connection(address) as good:
            to_bad, to_good = listener.accept()[0], listener.accept()[0]
            host_in_peer = host if family == "ipv4" else "%5B::1%5D"
            num_closed = close_connections({f"{family}:{host_in_peer}:{bad.getsockname()[1]}"})
            to_good.sendall(b"still here")
            assert num_closed == 1
            assert bad.recv(10) == b""
            assert good.recv(10) == b"still here"
            to_bad.close()
            to_good.close()


def test_a_peer_that_has_gone_is_no_error():
    assert close_connections({"ipv4:127.0.0.1:1", "unix:"}) == 0


def test_a_peer_of_ipv4_is_found_on_a_socket_of_both_families():
    """gRPC listens on such sockets, and names the peer without the prefix that the socket gives it."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no such sockets")
    with (
        socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener,
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as caller,
        listener.accept()[0],
    ):
        assert close_connections({f"ipv4:127.0.0.1:{caller.getsockname()[1]}"}) == 1
        assert caller.recv(10) == b""
