"""Measures the overhead of the service per call: with a model that takes no time, compared with a bare echo server.

python -m bench.rpc --json bench/results/rpc.json

Each server is a process with the same Python and generated code. Both parse the same requests; the echo server responds
with a response of the service. The echo server uses gRPC's own flow-control windows, and limits only the size of
messages and the number of waiting calls. The service uses the settings of `radixkv serve`: fixed windows, limits on
connections and their calls, freed memory that is kept by malloc, objects that are exempt from garbage collection, and a
GIL switch interval of 1 ms.

One client sends requests that were serialized beforehand, in short rounds to both servers in turn. A hit is a prompt
that is cached except for its last token. Misses all differ, are published, and evict each other.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from bench.parts.null_service import NEXT_TOKEN_ID, VOCAB_SIZE
from bench.parts.report import distribution
from bench.parts.result_file import write_result
from bench.parts.server_process import ServerProcess, echo_command, null_service_command
from radixkv.service.cli.argument_types import positive
from radixkv.service.token_ids import write_token_ids
from radixkv.v1 import prefill_pb2

SERVERS = ("service", "echo")
_METHOD = "/radixkv.v1.PrefillService/Prefill"
_TIMEOUT_S = 60.0
_COUNTER_TOKENS = 32  # tokens that encode the number of a miss in binary, so that no two misses share a block
_VARINT_BYTES = 16  # lengths of responses may differ by so much, because varints have a variable length

Row = dict[str, Any]


SendCall = Callable[..., Awaitable[bytes]]
"""Sends a serialized request: `call(request, timeout=seconds)`. Returns the serialized response."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that is measured.

    Attributes:
        call: sends a request to it.
        process: the server's process.
    """

    call: SendCall
    process: ServerProcess


@dataclass(frozen=True, slots=True)
class Round:
    """The calls of one round.

    Attributes:
        latencies_s: latency of each call.
        wall_s: duration of the round.
        server_cpu_s, client_cpu_s: CPU time of both sides; the server's is None if the system does not report it.
    """

    latencies_s: list[float]
    wall_s: float
    server_cpu_s: float | None
    client_cpu_s: float


class Requests:
    """Serializes requests with `num_tokens` random tokens, which depend on `seed`."""

    def __init__(self, num_tokens: int, seed: int) -> None:
        ids = np.random.default_rng(seed).integers(0, VOCAB_SIZE, num_tokens).astype("<u4")
        message = prefill_pb2.PrefillRequest()
        write_token_ids(message, ids.tobytes())
        self._bytes = message.SerializeToString()
        self._num_head_bytes = len(self._bytes) - ids.nbytes
        self._numbers = itertools.count()

    def hit(self) -> bytes:
        """Return the same prompt each time."""
        return self._bytes

    def miss(self) -> bytes:
        """Return a prompt that differs from all earlier ones."""
        number, start = next(self._numbers), self._num_head_bytes
        counter = np.asarray([number >> bit & 1 for bit in range(_COUNTER_TOKENS)], "<u4").tobytes()
        return self._bytes[:start] + counter + self._bytes[start + len(counter) :]


async def send_for(seconds: float, endpoint: Endpoint, make_request: Callable[[], bytes], concurrency: int) -> Round:
    """Keep `concurrency` calls in flight for this many seconds."""
    latencies_s: list[float] = []
    server_start_cpu_s, client_start_cpu_s = endpoint.process.cpu_s, time.process_time()
    start_s = time.perf_counter()
    end_s = start_s + seconds

    async def send_in_turn() -> None:
        sent_s = time.perf_counter()
        while sent_s < end_s:
            await endpoint.call(make_request(), timeout=_TIMEOUT_S)
            answered_s = time.perf_counter()
            latencies_s.append(answered_s - sent_s)
            sent_s = answered_s

    await asyncio.gather(*(send_in_turn() for _ in range(concurrency)))
    wall_s = time.perf_counter() - start_s
    server_end_cpu_s = endpoint.process.cpu_s
    server_cpu_s = None
    if server_start_cpu_s is not None and server_end_cpu_s is not None:
        server_cpu_s = server_end_cpu_s - server_start_cpu_s
    return Round(latencies_s, wall_s, server_cpu_s, time.process_time() - client_start_cpu_s)


async def check(service: Endpoint, echo: Endpoint, requests: Requests, num_tokens: int) -> None:
    """Check that hits hit, misses miss, and both servers send responses of equal size.

    Raises:
        AssertionError: one of these does not hold.
    """
    await service.call(requests.hit(), timeout=_TIMEOUT_S)
    for make_request, max_cached_tokens in ((requests.hit, num_tokens - 1), (requests.miss, _COUNTER_TOKENS)):
        response_bytes, echoed_bytes = [await each.call(make_request(), timeout=_TIMEOUT_S) for each in (service, echo)]
        answer = prefill_pb2.PrefillResponse.FromString(response_bytes)
        cached_tokens = answer.usage.cached_tokens
        assert answer.next_token_id == NEXT_TOKEN_ID, (
            f"next token: expected {NEXT_TOKEN_ID}, got {answer.next_token_id}"
        )
        assert cached_tokens + answer.usage.computed_tokens == num_tokens, "usage: the tokens do not add up"
        assert cached_tokens <= max_cached_tokens, f"a miss reuses {cached_tokens} tokens"
        assert make_request == requests.miss or cached_tokens == max_cached_tokens, (
            f"a hit reuses {cached_tokens} tokens"
        )
        assert abs(len(response_bytes) - len(echoed_bytes)) <= _VARINT_BYTES, (
            f"answers of {len(response_bytes)} and {len(echoed_bytes)} bytes"
        )


async def measure(
    endpoints: dict[str, Endpoint], make_request: Callable[[], bytes], concurrency: int, rounds: int, seconds: float
) -> Row:
    """Measure rounds in turn. Calls per second are medians over rounds, latencies are percentiles over all calls."""
    measured: dict[str, list[Round]] = {name: [] for name in SERVERS}
    for number in range(-1, rounds):  # the first one warms up
        for name in SERVERS if number % 2 else SERVERS[::-1]:
            sent_round = await send_for(seconds, endpoints[name], make_request, concurrency)
            if number >= 0:
                measured[name].append(sent_round)
    row: Row = {name: _summary(each) for name, each in measured.items()}
    row["ratio"] = row["service"]["calls_per_s"] / row["echo"]["calls_per_s"]
    return row


def _summary(rounds: Sequence[Round]) -> Row:
    num_calls = sum(len(each.latencies_s) for each in rounds)
    server_cpu_s = [each.server_cpu_s for each in rounds if each.server_cpu_s is not None]
    latency_ms = distribution([latency_s * 1e3 for each in rounds for latency_s in each.latencies_s])
    return {
        "calls_per_s": statistics.median(len(each.latencies_s) / each.wall_s for each in rounds),
        "p50_ms": latency_ms["p50"],
        "p99_ms": latency_ms["p99"],
        "server_cpu_us": sum(server_cpu_s) / num_calls * 1e6 if server_cpu_s else None,
        "client_cpu_us": sum(each.client_cpu_s for each in rounds) / num_calls * 1e6,
    }


async def run(options: argparse.Namespace) -> list[Row]:
    """Start both servers, check and measure every case."""
    rows: list[Row] = []
    async with AsyncExitStack() as channels:
        with ExitStack() as processes:
            service = await _start(processes, channels, null_service_command(options.settings))
            answer = await service.call(Requests(options.tokens[0], options.seed).hit(), timeout=_TIMEOUT_S)
            endpoints = {"service": service, "echo": await _start(processes, channels, echo_command(answer))}
            for num_tokens, kind, concurrency in _cases(options):
                requests = Requests(num_tokens, options.seed + len(rows))
                await check(service, endpoints["echo"], requests, num_tokens)
                make_request = getattr(requests, kind)
                row = await measure(endpoints, make_request, concurrency, options.rounds, options.seconds)
                rows.append({"prompt_tokens": num_tokens, "kind": kind, "concurrency": concurrency, **row})
                print(_line(rows[-1]), flush=True)
            await channels.aclose()  # while the servers still run
    return rows


def _cases(options: argparse.Namespace) -> Iterator[tuple[int, str, int]]:
    return itertools.product(options.tokens, options.kinds, options.concurrency)


async def _start(processes: ExitStack, channels: AsyncExitStack, command: list[str]) -> Endpoint:
    process = ServerProcess(command)
    address = processes.enter_context(process)
    options = [("grpc.enable_http_proxy", 0)]  # a proxy would add its own latency
    channel = await channels.enter_async_context(grpc.aio.insecure_channel(address, options=options))
    return Endpoint(channel.unary_unary(_METHOD, None, None), process)  # without serializers: bytes in, bytes out


# Where a column has two numbers, the first one is of the service, the second one of the echo server.
_HEADING = (
    f"{'tokens':>6} {'kind':>4} {'at once':>7} {'service/s':>9} {'echo/s':>8} {'ratio':>6} "
    f"{'p50 ms':>15} {'p99 ms':>15} {'server us':>11} {'client us':>11}"
)


def _line(row: Row) -> str:
    service, echo = row["service"], row["echo"]
    return (
        f"{row['prompt_tokens']:>6} {row['kind']:>4} {row['concurrency']:>7} {service['calls_per_s']:9.0f} "
        f"{echo['calls_per_s']:8.0f} {row['ratio']:6.3f} {service['p50_ms']:7.2f} {echo['p50_ms']:7.2f} "
        f"{service['p99_ms']:7.2f} {echo['p99_ms']:7.2f} {service['server_cpu_us'] or 0:5.0f} "
        f"{echo['server_cpu_us'] or 0:5.0f} {service['client_cpu_us']:5.0f} {echo['client_cpu_us']:5.0f}"
    )


def _prompt_tokens(text: str) -> int:
    num_tokens = positive(text)
    if num_tokens < _COUNTER_TOKENS:
        raise argparse.ArgumentTypeError(
            f"expected at least {_COUNTER_TOKENS} tokens, which encode the number of a miss, got {text}"
        )
    return num_tokens


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(
        description="Measure the service over a model that takes no time, compared with an echo server."
    )
    parser.add_argument("--tokens", type=_prompt_tokens, nargs="+", default=[128, 2048], help="prompt lengths")
    parser.add_argument("--kinds", nargs="+", choices=("hit", "miss"), default=["hit", "miss"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64], help="numbers of concurrent calls")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds of each round; default 0.5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--set", dest="settings", action="append", default=["engine.max_step_tokens=8192"], metavar="A.B=V"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    print(_HEADING)
    rows = asyncio.run(run(options))
    parameters = {key: getattr(options, key) for key in ("rounds", "seconds", "seed", "settings")}
    write_result(options.json, "bench.rpc", arguments, {"rows": rows, **parameters})


if __name__ == "__main__":
    main()
