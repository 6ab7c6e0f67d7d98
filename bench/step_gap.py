"""Measures the host's work between two steps while all running requests decode.

python -m bench.step_gap --json bench/results/step_gap.json

The real engine core runs with a device that takes no time. The batch of each step is laid out and its attention is
planned, as for a CUDA graph in exact mode with 32 query heads and 8 KV heads. Upload and launch are not included.
Rounds alternate between overlap scheduling, in which a step starts before the remaining work of the previous one, as on
a GPU, and steps that start after that work.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from bench.parts.result_file import write_result
from radixkv.api.params import PrefillParams
from radixkv.api.result import GenerateResult
from radixkv.api.sampling import Sampling
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.compute.forward import Chunk, lay_out, pack_tokens
from radixkv.compute.runner import Launch, Runner, StepResult, Wait
from radixkv.config import EngineConfig
from radixkv.engine.core import EngineCore
from radixkv.model.attention.triton_kernels import TritonKernels
from radixkv.namespace import Namespace
from radixkv.scheduling.request import Generation, Request

BLOCK_SIZE = 64
VOCAB_SIZE = 256
_NUM_QUERY_HEADS, _NUM_KV_HEADS = 32, 8
_STEP_TOKENS = 8192
_TOKEN_ID = 7  # the token that every step returns

Row = dict[str, Any]


class IdleRunner:
    """Replaces `Runner`: runs no model, and records the time from the end of a step to the start of the next one.

    Args:
        is_asynchronous: whether the engine core starts a step before the remaining work of the previous one.
    """

    def __init__(self, *, is_asynchronous: bool) -> None:
        self.is_asynchronous = is_asynchronous
        self.gaps_s: list[float] = []
        self.storage = SimpleNamespace(block_bytes=0, kv_dtype="bf16")
        self._kernels = TritonKernels(is_exact=True)
        self._tile_rows = self._kernels.tile_rows(_NUM_QUERY_HEADS // _NUM_KV_HEADS, torch.bfloat16)
        self._ended_s: float | None = None

    def prepare(self, chunks: Sequence[Chunk]) -> Launch:
        """Lay the step out and plan its attention."""
        batch = lay_out(chunks, BLOCK_SIZE).batch
        heads = (_NUM_QUERY_HEADS, _NUM_KV_HEADS, torch.bfloat16)
        self._kernels.plan(batch, *heads, window=None, tile_rows=self._tile_rows)
        return lambda _: self._start(chunks)

    def start(self, chunks: Sequence[Chunk]) -> Wait:
        """Lay the step out, plan its attention, and start it."""
        return self.prepare(chunks)(pack_tokens(chunks))

    def _start(self, chunks: Sequence[Chunk]) -> Wait:
        if self._ended_s is not None:
            self.gaps_s.append(time.perf_counter() - self._ended_s)
        return lambda: self._end(chunks)

    def _end(self, chunks: Sequence[Chunk]) -> StepResult:
        num_rows = sum(chunk.wants_logits for chunk in chunks)
        result = StepResult(torch.empty(num_rows, VOCAB_SIZE), [_TOKEN_ID] * num_rows, [True] * len(chunks))
        self._ended_s = time.perf_counter()
        return result


def decoding_core(
    runner: IdleRunner, num_requests: int, prompt_tokens: int, num_steps: int, num_waiting: int = 0
) -> EngineCore:
    """Build an engine core whose running generations decode during all measured steps, while other requests wait."""
    # The maximum number of steps with prompts, in which the first requests already decode.
    max_prompt_steps = 2 * num_requests * -(-prompt_tokens // _STEP_TOKENS)
    new_tokens = num_steps + max_prompt_steps + 8  # with a few to spare, so that no generation ends
    num_blocks = num_requests * (-(-(prompt_tokens + new_tokens) // BLOCK_SIZE) + 1)
    config = EngineConfig(max_step_tokens=_STEP_TOKENS, max_running_requests=num_requests)
    core = EngineCore.build(cast("Runner", runner), PrefixCache(num_blocks, BLOCK_SIZE), config)
    rng = np.random.default_rng(0)
    requests = []
    for _ in range(num_requests + num_waiting):
        prompt = rng.integers(0, VOCAB_SIZE, prompt_tokens).astype("<u4").tobytes()
        generation = Generation(Sampling(new_tokens, ignore_eos=True), frozenset(), lambda _: None)
        future: Future[GenerateResult] = Future()
        requests.append(Request(PrefillParams(prompt), Namespace("bench"), future, time.monotonic(), generation))
    for request in requests:
        core.submit(request)
    while not all(request.is_decoding for request in requests[:num_requests]):
        core.step()
    core.step()  # delivers the first tokens
    return core


def measure(num_requests: int, prompt_tokens: int, num_waiting: int, num_steps: int, rounds: int) -> Row:
    """Return medians over all steps, in rounds that alternate between overlap scheduling and none."""
    gaps_s: dict[bool, list[float]] = {True: [], False: []}
    for is_overlapped in (True, False) * rounds:
        runner = IdleRunner(is_asynchronous=is_overlapped)
        core = decoding_core(runner, num_requests, prompt_tokens, num_steps, num_waiting)
        runner.gaps_s.clear()
        for _ in range(num_steps):
            core.step()
        assert core.stats.load().requests.running == num_requests, "a generation ended while it was measured"
        gaps_s[is_overlapped] += runner.gaps_s
    ahead_ms, after_ms = (statistics.median(gaps_s[is_overlapped]) * 1e3 for is_overlapped in (True, False))
    return {
        "requests": num_requests,
        "prompt_tokens": prompt_tokens,
        "waiting": num_waiting,
        "ahead_ms": ahead_ms,
        "after_ms": after_ms,
        "ratio": ahead_ms / after_ms,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description="Measure the host's work between two decode steps.")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64], help="requests that decode together")
    parser.add_argument("--prompts", type=int, nargs="+", default=[2048, 8192], help="prompt lengths")
    parser.add_argument(
        "--waiting",
        type=int,
        nargs="+",
        default=[0, 256],
        help="requests that wait because the maximum number is running",
    )
    parser.add_argument("--steps", type=int, default=200, help="steps of each round; default 200")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    print("requests  prompt  waiting  ahead, ms  after, ms  ratio")
    for case in itertools.product(options.requests, options.prompts, options.waiting):
        row = measure(*case, options.steps, options.rounds)
        rows.append(row)
        print(
            f"{row['requests']:8} {row['prompt_tokens']:7} {row['waiting']:8} "
            f"{row['ahead_ms']:10.3f} {row['after_ms']:10.3f} {row['ratio']:6.2f}",
            flush=True,
        )
    result = {"rows": rows, "steps": options.steps, "rounds": options.rounds}
    write_result(options.json, "bench.step_gap", arguments, result)


if __name__ == "__main__":
    main()
