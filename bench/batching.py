"""Measures continuous batching: generated tokens per second, one request at a time and several together.

python -m bench.batching --json bench/results/batching.json

Requests go over gRPC to a server that this benchmark starts. Each concurrency level sends the same requests, in rounds
that alternate between levels. A request must generate the same tokens whatever other requests are in its batch. No
request finds anything in the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from bench.parts.report import distribution
from bench.parts.result_file import write_result
from bench.parts.server_process import ServerProcess, serve_command
from radixkv.v1 import prefill_pb2

_TIMEOUT_S = 600.0

Row = dict[str, Any]
GenerateCall = Callable[..., AsyncIterable[prefill_pb2.GenerateResponse]]


@dataclass(frozen=True, slots=True)
class Generated:
    """Result of one request.

    Attributes:
        ttft_s: time from the call to the first token.
        token_s: mean time per token after the first one.
    """

    token_ids: tuple[int, ...]
    ttft_s: float
    token_s: float


def build_messages(
    num_requests: int, prompt_tokens: int, new_tokens: int, vocab_size: int, seed: int
) -> list[prefill_pb2.GenerateRequest]:
    """Build requests with random prompts that neither read nor write the cache."""
    prompts = np.random.default_rng(seed).integers(0, vocab_size, (num_requests, prompt_tokens))
    return [
        prefill_pb2.GenerateRequest(
            prefill=prefill_pb2.PrefillRequest(token_ids=prompt.tolist(), read_cache=False, write_cache=False),
            max_new_tokens=new_tokens,
            ignore_eos=True,
        )
        for prompt in prompts
    ]


async def generate(call: GenerateCall, message: prefill_pb2.GenerateRequest) -> Generated:
    """Send one request and read its tokens."""
    token_ids: list[int] = []
    start_s = first_token_s = time.perf_counter()
    async for chunk in call(message, timeout=_TIMEOUT_S):
        if not token_ids and chunk.token_ids:
            first_token_s = time.perf_counter()
        token_ids += chunk.token_ids
    num_later_tokens = max(1, len(token_ids) - 1)
    return Generated(
        tuple(token_ids), first_token_s - start_s, (time.perf_counter() - first_token_s) / num_later_tokens
    )


async def generate_all(
    call: GenerateCall, messages: Sequence[prefill_pb2.GenerateRequest], concurrency: int
) -> tuple[list[Generated], float]:
    """Send all requests, `concurrency` at a time. Returns the result of each, and the seconds until all had ended."""
    results: dict[int, Generated] = {}
    indices = iter(range(len(messages)))

    async def send_next() -> None:
        for index in indices:
            results[index] = await generate(call, messages[index])

    start_s = time.perf_counter()
    await asyncio.gather(*(send_next() for _ in range(concurrency)))
    wall_s = time.perf_counter() - start_s
    return [results[index] for index in range(len(messages))], wall_s


async def measure(
    address: str, messages: Sequence[prefill_pb2.GenerateRequest], levels: Sequence[int], rounds: int
) -> list[Row]:
    """Measure all concurrency levels in each round.

    Tokens per second are the median over the rounds. Times are p50 and p99 over the requests of all rounds. `ratio` is
    relative to the first level.

    Raises:
        AssertionError: a request has too few tokens, or its tokens depend on the other requests of its batch.
    """
    options = [("grpc.enable_http_proxy", 0)]  # the latency of a proxy must not be measured
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        call: GenerateCall = channel.unary_stream(
            "/radixkv.v1.PrefillService/Generate",
            request_serializer=prefill_pb2.GenerateRequest.SerializeToString,
            response_deserializer=prefill_pb2.GenerateResponse.FromString,
        )
        # The tokens that each request must generate at every level.
        one_at_a_time, _ = await generate_all(call, messages, 1)
        expected = [each.token_ids for each in one_at_a_time]
        assert all(len(ids) == message.max_new_tokens for ids, message in zip(expected, messages, strict=True))
        measured: dict[int, list[tuple[list[Generated], float]]] = {level: [] for level in levels}
        # Round -1 only checks answers and warms up.
        for round_number, level in itertools.product(range(-1, rounds), levels):
            results, wall_s = await generate_all(call, messages, level)
            assert [each.token_ids for each in results] == expected, (
                f"{level} at a time: expected the same tokens as one at a time"
            )
            if round_number >= 0:
                measured[level].append((results, wall_s))
    rows = [_summary(level, measured_rounds) for level, measured_rounds in measured.items()]
    for row in rows:
        row["ratio"] = row["tokens_per_s"] / rows[0]["tokens_per_s"]
    return rows


def _summary(level: int, rounds: list[tuple[list[Generated], float]]) -> Row:
    results = [each for generated, _ in rounds for each in generated]
    ttft_ms = distribution([each.ttft_s * 1e3 for each in results])
    token_ms = distribution([each.token_s * 1e3 for each in results])
    return {
        "concurrency": level,
        "tokens_per_s": statistics.median(
            sum(len(each.token_ids) for each in generated) / wall_s for generated, wall_s in rounds
        ),
        "ttft_p50_ms": ttft_ms["p50"],
        "ttft_p99_ms": ttft_ms["p99"],
        "token_p50_ms": token_ms["p50"],
        "token_p99_ms": token_ms["p99"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(
        description="Measure generated tokens per second with one and with several requests at a time."
    )
    parser.add_argument("--model", default="tiny", metavar="M", help="tiny, or a directory")
    parser.add_argument("--device", default="cpu", choices=("auto", "cpu", "cuda"))
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="A.B=V",
        help="a setting of the server; may be repeated",
    )
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 4, 16], help="requests at a time; the first is the baseline"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--vocab-size", type=int, default=256, help="token ids are below this; default 256 fits any model"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    messages = build_messages(
        options.requests, options.prompt_tokens, options.new_tokens, options.vocab_size, options.seed
    )
    with ServerProcess(serve_command(options.model, options.device, options.settings)) as address:
        rows = asyncio.run(measure(address, messages, options.concurrency, options.rounds))
    print(f"{'at once':>7} {'tokens/s':>9} {'ratio':>6} {'TTFT p50, p99 ms':>19} {'per token p50, p99 ms':>21}")
    for row in rows:
        print(
            f"{row['concurrency']:>7} {row['tokens_per_s']:9.1f} {row['ratio']:6.2f} {row['ttft_p50_ms']:9.1f} "
            f"{row['ttft_p99_ms']:9.1f} {row['token_p50_ms']:10.2f} {row['token_p99_ms']:9.2f}"
        )
    keys = ("model", "device", "settings", "requests", "prompt_tokens", "new_tokens", "rounds", "seed")
    parameters = {key: getattr(options, key) for key in keys}
    write_result(options.json, "bench.batching", arguments, {"rows": rows, **parameters})


if __name__ == "__main__":
    main()
