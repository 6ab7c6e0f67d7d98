"""Fuzzes a server that it starts on loopback: sends mutated messages, then raw bytes, with valid calls in between.

python -m bench.hostile.fuzz [--calls 100000] [--connections 10000] [--seed 1] [--json FILE]

The exit status is 1 if a call or a raw connection ended with an undocumented status, or if the server's memory grew by
more than 64 MB after the warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from bench.hostile.attacks.flood import open_channel
from bench.hostile.attacks.frames import RawConnection
from bench.hostile.fuzz.mutations import METHODS, Mutations
from bench.hostile.fuzz.raw_bytes import KINDS
from bench.hostile.trial import resident_mb
from bench.parts.result_file import write_result
from bench.parts.server_process import ServerProcess, null_service_command
from radixkv.service.client import AsyncClient

MAX_GROWTH_MB = 64
DOCUMENTED_STATUSES = frozenset(
    {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION"}
    | {"OUT_OF_RANGE", "PERMISSION_DENIED"}
)
# 13 (INTERNAL) is what gRPC itself returns for a message that gzip cannot decompress.
DOCUMENTED_RAW = frozenset({"0", "3", "4", "5", "8", "12", "13", "unreadable", "closed", "silent"})
_STREAM_OPEN_S = 0.05
_NUM_AT_ONCE = 32
_READ_TIMEOUT_S = 0.03
_TIMEOUT_S = 30.0
_VALID_CALL_PERIOD = 500


@dataclass(frozen=True, slots=True)
class FuzzResult:
    """The outcome of a run.

    Attributes:
        statuses: number of mutated messages by status.
        raw: number of raw connections by what the server did: a status code, or `closed`, `silent` or `unreadable`.
        served: number of valid calls in between, all of which were answered.
        warm_mb, end_mb: resident memory of the server after a fifth of the calls, and at the end.
    """

    statuses: dict[str, int]
    raw: dict[str, int]
    served: int
    warm_mb: float
    end_mb: float

    @property
    def undocumented(self) -> list[str]:
        """Statuses that the service does not document for invalid calls."""
        return sorted(self.statuses.keys() - DOCUMENTED_STATUSES | self.raw.keys() - DOCUMENTED_RAW)


def make_server() -> ServerProcess:
    """Return the server to fuzz, which has the services of one server and of the gateway."""
    return ServerProcess(null_service_command(["gateway.enabled=true"]))


async def fuzz(address: str, pid: int, num_calls: int, num_connections: int, seed: int) -> FuzzResult:
    """Send mutated messages, then raw bytes.

    Raises:
        AioRpcError: a valid call was not answered.
    """
    mutations, rng = Mutations(seed), random.Random(seed)
    statuses: Counter[str] = Counter()
    raw: Counter[str] = Counter()
    async with open_channel(address) as channel, AsyncClient(address, timeout_s=_TIMEOUT_S) as client:
        num_warm_up_calls = num_calls // 5
        served = await _send_mutations(channel, client, mutations, num_warm_up_calls, statuses)
        warm_mb = resident_mb(pid)
        served += await _send_mutations(channel, client, mutations, num_calls - num_warm_up_calls, statuses)
        for start in range(0, num_connections, _VALID_CALL_PERIOD):
            number = min(_VALID_CALL_PERIOD, num_connections - start)
            await _send_raw_bytes(address, rng, number, raw)
            await client.prefill([1, 2, 3], tenant="valid")
            served += 1
    return FuzzResult(dict(statuses), dict(raw), served, warm_mb, resident_mb(pid))


async def _send_mutations(
    channel: grpc.aio.Channel, client: AsyncClient, mutations: Mutations, num_calls: int, statuses: Counter[str]
) -> int:
    served = 0
    remaining = iter(range(num_calls))  # shared by the concurrent loops

    async def repeat() -> None:
        nonlocal served
        for index in remaining:
            method, message = mutations.next_message()
            statuses[await _status_of(channel, method, message)] += 1
            if index % _VALID_CALL_PERIOD == 0:
                await client.prefill([1, 2, 3], tenant="valid")
                served += 1

    await asyncio.gather(*(repeat() for _ in range(_NUM_AT_ONCE)))
    return served


async def _status_of(channel: grpc.aio.Channel, method: str, message: bytes) -> str:
    try:
        if not METHODS[method].server_streaming:
            await channel.unary_unary(method, None, None)(message, timeout=_TIMEOUT_S)
            return "OK"
        call = channel.unary_stream(method, None, None)(message, timeout=_TIMEOUT_S)
        try:
            await asyncio.wait_for(call.read(), _STREAM_OPEN_S)
        except TimeoutError:  # the stream is open, so the message was accepted
            pass
        finally:
            call.cancel()
    except asyncio.CancelledError:
        pass
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def _send_raw_bytes(address: str, rng: random.Random, num_connections: int, raw: Counter[str]) -> None:
    kinds = list(KINDS.values())
    remaining = iter(range(num_connections))  # shared by the concurrent loops

    async def repeat() -> None:
        for _ in remaining:
            connection = await RawConnection.open_socket(address)
            connection.write(rng.choice(kinds)(rng))
            raw[await connection.read_status(_READ_TIMEOUT_S)] += 1
            connection.close()

    await asyncio.gather(*(repeat() for _ in range(_NUM_AT_ONCE)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a server, fuzz it, print the statuses that it returned, and write JSON."""
    parser = argparse.ArgumentParser(description="Start a server, and fuzz it.")
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    process = make_server()
    with process as address:
        result = asyncio.run(fuzz(address, process.pid, options.calls, options.connections, options.seed))
    print(f"mutated messages: {result.statuses}\nraw connections: {result.raw}")
    print(f"valid calls in between, all answered: {result.served}")
    print(f"undocumented statuses: {result.undocumented or 'none'}")
    print(f"memory: {result.warm_mb:.0f} MB after the warm-up, {result.end_mb:.0f} MB at the end")
    write_result(options.json, "bench.hostile.fuzz", arguments, dataclasses.asdict(result))
    return int(bool(result.undocumented) or result.end_mb > result.warm_mb + MAX_GROWTH_MB)


if __name__ == "__main__":
    sys.exit(main())
