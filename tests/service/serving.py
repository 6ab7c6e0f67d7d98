"""A real server on loopback, around a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from radixkv.config import Config, ServerConfig
from radixkv.errors import RadixKVError
from radixkv.service.server.server import Server
from tests.patience import PATIENCE_S

# The first lines of a program. Modules that only the extra `engine` installs can then not be imported, as on the base
# installation.
WITHOUT_ENGINE = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "triton", "transformers", "peft", "safetensors", "grpc_health",
                                      "grpc_reflection", "prometheus_client"} or name == "radixkv.startup.build_engine":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
"""


GATEWAY = Config.load(None, ["gateway.enabled=true"])


@contextlib.asynccontextmanager
async def serving(
    engine,
    *,
    model_path: str | None = None,
    gateway: Config | None = None,
    count_refusal: Callable[[RadixKVError], None] | None = None,
    **config: Any,
) -> AsyncIterator[tuple[Server, str]]:
    """Yield a started server and its address; drain it at the end."""
    server = Server(engine, ServerConfig(port=0, **config), model_path, gateway, count_refusal)
    address = await server.start()
    try:
        yield server, address
    finally:
        engine.open_gate()
        await server.drain()


def serve_and_call(engine, function: Callable[[str], Any], model_path: str | None = None, **config: Any) -> Any:
    """Return `function(address)`, called on a separate thread while a server runs."""

    async def run() -> Any:
        async with serving(engine, model_path=model_path, **config) as (_, address):
            return await asyncio.to_thread(function, address)

    return asyncio.run(run())


async def refusal_of(call) -> grpc.aio.AioRpcError:
    """Await a call that must be refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def deadline_refusal(engine, call: Callable[[float], Awaitable[Any]]) -> grpc.aio.AioRpcError:
    """Return the refusal of a call whose deadline passes after the engine has received it.

    On a busy machine, the deadline may pass earlier. The call is then repeated with a longer one.

    Args:
        engine: a gated engine that has received no call.
        call: makes the call, with the given timeout in seconds.
    """
    timeout_s = 0.1
    while True:
        refusal = await refusal_of(call(timeout_s))
        if engine.futures:
            return refusal
        timeout_s *= 3


async def becomes_true(condition: Callable[[], bool]) -> bool:
    """Return whether `condition()` becomes true within `PATIENCE_S` seconds."""
    end_s = asyncio.get_running_loop().time() + PATIENCE_S
    while not condition():
        if asyncio.get_running_loop().time() > end_s:
            return False
        await asyncio.sleep(0.005)
    return True


@contextlib.asynccontextmanager
async def slow_line(address: str) -> AsyncIterator[str]:
    """Yield the address of a TCP proxy in front of `address` that pauses after each piece of an answer.

    The proxy passes on 6 MB/s, less than a server on a busy machine sends.
    """
    connections = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pause_s: float) -> None:
        with contextlib.suppress(OSError):  # one side has closed its connection; `connect` then aborts both
            while piece := await reader.read(65_536):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause_s)
            writer.write_eof()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.current_task())
        server_reader, server_writer = await asyncio.open_connection(*address.rsplit(":", 1))
        with contextlib.suppress(asyncio.CancelledError):  # the test is over
            await asyncio.gather(copy(reader, server_writer, 0), copy(server_reader, writer, 0.01))
        writer.transport.abort()
        server_writer.transport.abort()

    proxy = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield "{}:{}".format(*proxy.sockets[0].getsockname())
    finally:
        proxy.close()
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections)
