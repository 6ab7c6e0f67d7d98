"""Runs one of two servers, which benchmarks compare: the service over a model that takes no time, or an echo server.

python -m bench.parts.null_service engine [--set engine.max_step_tokens=8192] [--vocab-size 151936] [--step-ms 20]
python -m bench.parts.null_service echo ANSWER_IN_HEX
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import torch

from radixkv.cache.policies import make_policy
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.compute.forward import Chunk
from radixkv.compute.runner import Runner, StepResult
from radixkv.config import Config
from radixkv.config.sequence_limit import NO_LIMIT
from radixkv.engine.engine import Engine
from radixkv.scheduling.rate_limiter import RateLimiter
from radixkv.service.server.server import run
from radixkv.startup.malloc import keep_freed_memory
from radixkv.v1 import prefill_pb2, prefill_pb2_grpc

VOCAB_SIZE = 256
NEXT_TOKEN_ID = 7


class NullRunner:
    """Replaces `Runner`, and returns constant logits.

    Args:
        vocab_size: vocabulary size of the model.
        step_s: duration of each step, during which it sleeps, as if another device computed.
    """

    def __init__(self, vocab_size: int = VOCAB_SIZE, step_s: float = 0.0) -> None:
        self._step_s = step_s
        self.model = SimpleNamespace(
            name="null",
            device=torch.device("cpu"),
            vocab_size=vocab_size,
            max_tokens=None,
            limit=NO_LIMIT,
            eos_token_ids=frozenset(),
        )
        self.fingerprint = "null"
        self.storage = SimpleNamespace(block_bytes=0, kv_dtype="fp32")
        self._row = torch.zeros(1, vocab_size)
        self._row[0, NEXT_TOKEN_ID] = 1.0

    is_asynchronous = False
    compression_refusal = "a model without attention"

    def start(self, chunks: Sequence[Chunk]) -> Callable[[], StepResult]:
        """Start a step that ends after `step_s`."""
        end_s = time.monotonic() + self._step_s
        num_rows = sum(chunk.wants_logits for chunk in chunks)
        result = StepResult(self._row.expand(num_rows, -1), [NEXT_TOKEN_ID] * num_rows, [True] * len(chunks))

        def wait() -> StepResult:
            if self._step_s:
                time.sleep(max(0.0, end_s - time.monotonic()))
            return result

        return wait

    def run(self, chunks: Sequence[Chunk]) -> StepResult:
        """Run a step."""
        return self.start(chunks)()


def build_null_engine(config: Config, vocab_size: int = VOCAB_SIZE, step_s: float = 0.0) -> Engine:
    """Build the real engine and cache over a `NullRunner`."""
    cache = PrefixCache(
        config.cache.num_blocks,
        config.cache.block_size,
        policy=make_policy(config.cache.policy, config.cache.num_blocks),
    )
    runner = cast("Runner", NullRunner(vocab_size, step_s))
    return Engine(runner, cache, config.engine, rates=RateLimiter(config.tenants, config.default_tenant))


class _EchoServicer(prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(self, answer: prefill_pb2.PrefillResponse) -> None:
        self._answer = answer

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> prefill_pb2.PrefillResponse:  # noqa: N802
        return self._answer


async def serve_echo(answer: prefill_pb2.PrefillResponse) -> None:
    """Parse each request and answer with this message, until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", 64 * 2**20),
            ("grpc.max_send_message_length", 64 * 2**20),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            # As in the service: above 1,000 calls that no handler has accepted, gRPC would cancel others at random.
            ("grpc.server.max_pending_requests", 8192),
            ("grpc.server.max_pending_requests_hard_limit", 16_384),
        ]
    )
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(_EchoServicer(answer), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"listening on 127.0.0.1:{port}", flush=True)
    await stop.wait()
    await server.stop(0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description="Run a server for bench.rpc.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    engine = kinds.add_parser("engine")
    engine.add_argument("--set", dest="settings", action="append", default=[], metavar="A.B=V")
    engine.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    engine.add_argument("--step-ms", type=float, default=0.0, help="time of each step; default 0")
    echo = kinds.add_parser("echo")
    echo.add_argument("answer", metavar="ANSWER_IN_HEX")
    options = parser.parse_args(arguments)
    if options.kind == "echo":
        asyncio.run(serve_echo(prefill_pb2.PrefillResponse.FromString(bytes.fromhex(options.answer))))
    else:
        keep_freed_memory()  # as `radixkv serve` does
        config = Config.load(None, ["server.port=0", *options.settings])
        tokenizer_path = None if config.server.http_port is None else "tiny"  # the HTTP port requires a tokenizer
        null_engine = build_null_engine(config, options.vocab_size, options.step_ms / 1000)
        run(null_engine, config.server, tokenizer_path, config)


if __name__ == "__main__":
    main()
