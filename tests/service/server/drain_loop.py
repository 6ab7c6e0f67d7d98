"""Drains a server under load many times and counts the statuses of all calls.

    python -m tests.service.server.drain_loop --drains 300

The server runs around a fake engine in this process; its callers run in another process. They make unary and streaming
calls over connections that are kept and over new ones, and call again as soon as they are answered. Exit status 1 if
any call ended otherwise than OK or UNAVAILABLE.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import random
import sys
from collections import Counter
from multiprocessing.connection import Connection

import grpc
import grpc.aio

from radixkv.config import ServerConfig
from radixkv.service.server.server import Server
from radixkv.v1 import cache_pb2, cache_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine

_OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
# How long a server is called before it drains: random between these.
_MIN_LOAD_S, _MAX_LOAD_S = 0.1, 0.4
_PAUSE_S = 0.001  # after a refusal, so that callers without a server do not use all processor time

# Numbers of calls by method, status and details.
Statuses = Counter[tuple[str, str, str]]


async def _prefill(channel: grpc.aio.Channel) -> None:
    await prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(
        prefill_pb2.PrefillRequest(token_ids=[7] * 100), timeout=PATIENCE_S
    )


async def _generate(channel: grpc.aio.Channel) -> None:
    request = prefill_pb2.GenerateRequest(prefill=prefill_pb2.PrefillRequest(token_ids=[7] * 100), max_new_tokens=20)
    async for _ in prefill_pb2_grpc.PrefillServiceStub(channel).Generate(request, timeout=PATIENCE_S):
        pass


async def _stats(channel: grpc.aio.Channel) -> None:
    await cache_pb2_grpc.CacheServiceStub(channel).Stats(cache_pb2.StatsRequest(), timeout=PATIENCE_S)


async def _list_segments(channel: grpc.aio.Channel) -> None:
    await cache_pb2_grpc.CacheServiceStub(channel).ListSegments(cache_pb2.ListSegmentsRequest(), timeout=PATIENCE_S)


_CALLS = {"Prefill": _prefill, "Generate": _generate, "Stats": _stats, "ListSegments": _list_segments}


async def call_until(is_over: asyncio.Event, address: str, num_connections: int) -> Statuses:
    """Call a server until `is_over` is set, and return the statuses of all calls."""
    statuses: Statuses = Counter()

    async def call(name: str, channel: grpc.aio.Channel) -> None:
        try:
            await _CALLS[name](channel)
            statuses[name, "OK", ""] += 1
        except grpc.aio.AioRpcError as error:
            statuses[name, error.code().name, (error.details() or "").replace(address, "ADDRESS")] += 1
            await asyncio.sleep(_PAUSE_S)

    async def call_over_one_connection(name: str, channel: grpc.aio.Channel) -> None:
        while not is_over.is_set():
            await call(name, channel)

    async def call_over_new_connections(name: str) -> None:
        while not is_over.is_set():
            async with grpc.aio.insecure_channel(address, options=_OWN_CONNECTION) as channel:
                await call(name, channel)

    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options=_OWN_CONNECTION))
            for _ in range(num_connections)
        ]
        callers = [call_over_one_connection(name, channel) for name, channel in itertools.product(_CALLS, channels)]
        await asyncio.gather(*callers, *(call_over_new_connections(name) for name in _CALLS))
    return statuses


def _call_servers(pipe: Connection, num_connections: int) -> None:
    """Receive the address of a server, call it until the next message arrives, and send the statuses; then repeat."""

    async def call_server(address: str) -> Statuses:
        is_over = asyncio.Event()
        calling = asyncio.create_task(call_until(is_over, address, num_connections))
        await asyncio.to_thread(pipe.recv)
        is_over.set()
        return await calling

    while True:
        pipe.send(asyncio.run(call_server(pipe.recv())))


async def _drain_once(pipe: Connection, load_s: float) -> Statuses:
    """Serve for some seconds, drain, and return the statuses of all calls. The pipe leads to the calling process."""
    server = Server(FakeEngine(), ServerConfig(port=0))
    pipe.send(await server.start())
    await asyncio.sleep(load_s)
    await server.drain()
    pipe.send("stop")
    statuses: Statuses = await asyncio.to_thread(pipe.recv)
    return statuses


def main(arguments: list[str] | None = None) -> int:
    """Drain servers, print what their callers got, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drains", type=int, default=20)
    parser.add_argument("--connections", type=int, default=8, help="connections that are kept, each with four callers")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rng = random.Random(options.seed)
    context = multiprocessing.get_context("spawn")
    pipe, far_pipe = context.Pipe()
    callers = context.Process(target=_call_servers, args=(far_pipe, options.connections))
    callers.start()
    statuses: Statuses = Counter()
    num_bad_drains = 0
    try:
        for _ in range(options.drains):
            drain_statuses = asyncio.run(_drain_once(pipe, rng.uniform(_MIN_LOAD_S, _MAX_LOAD_S)))
            num_bad_drains += any(code not in ("OK", "UNAVAILABLE") for _, code, _ in drain_statuses)
            statuses += drain_statuses
    finally:
        callers.terminate()
        callers.join()
    for (name, code, details), num_calls in sorted(statuses.items()):
        print(f"{num_calls:8} {name:14}{code:14}{details}")
    print(f"{num_bad_drains} of {options.drains} drains had other statuses than OK and UNAVAILABLE")
    return int(num_bad_drains > 0)


if __name__ == "__main__":
    sys.exit(main())
