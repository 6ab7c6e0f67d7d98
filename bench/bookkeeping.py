"""Measures the share of a step that the engine and the radix tree take, compared with the model, without any reuse.

python -m bench.bookkeeping --json bench/results/bookkeeping.json

A real `EngineCore` runs a model of a real shape with random weights. All prompts differ, so each is matched, leased,
computed, published and answered completely, and soon evicts others. Bookkeeping is everything in a step except the
forward pass and the copy of its logits. It includes the measurement itself, about one microsecond per call.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.exactness import BLOCK_SIZE, SHAPES, build_runner
from bench.parts.environment import describe_run
from bench.parts.result_file import write_json
from radixkv.api.params import PrefillParams
from radixkv.api.sampling import Sampling
from radixkv.cache.lease import Lease
from radixkv.cache.policies import make_policy
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.compute.forward import Chunk
from radixkv.compute.runner import Runner
from radixkv.config import EngineConfig
from radixkv.engine.core import EngineCore
from radixkv.engine.step import Step
from radixkv.namespace import Namespace
from radixkv.scheduling.request import Generation, Request

# Labels of the forward pass, and of what no other label covers in a step.
MODEL = "model"
REST = "rest"

_GENERATION_PROMPT_TOKENS = 64

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BookkeepingCase:
    """A group of requests that are submitted together.

    Attributes:
        num_new_tokens: 0 for prefills. Generations are measured as soon as all of them decode.
    """

    num_requests: int
    prompt_tokens: int
    num_new_tokens: int = 0


class PhaseStopwatch:
    """Measures the time of labeled calls, without the time of labeled calls inside them.

    Attributes:
        seconds: total time by label.
        num_calls: number of calls by label.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.num_calls: Counter[str] = Counter()
        self._nested_s: list[float] = []  # for each call in progress: time of the labeled calls inside it

    def reset(self) -> None:
        """Reset all times and counts."""
        self.seconds.clear()
        self.num_calls.clear()

    @contextlib.contextmanager
    def watch(self, owner: object, name: str, label: str) -> Iterator[None]:
        """Measure every call of `owner.name` inside a `with` statement."""
        original = getattr(owner, name)
        setattr(owner, name, self._timed(original, label))
        try:
            yield
        finally:
            setattr(owner, name, original)

    def _timed(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            self._nested_s.append(0.0)
            start_s = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                took_s = time.perf_counter() - start_s
                self.seconds[label] += took_s - self._nested_s.pop()
                self.num_calls[label] += 1
                if self._nested_s:
                    self._nested_s[-1] += took_s

        return timed


class BookkeepingBench:
    """An engine core whose calls are timed, and requests for it."""

    def __init__(self, runner: Runner, step_tokens: int, seed: int) -> None:
        num_blocks = runner.storage.num_blocks
        self.cache = PrefixCache(num_blocks, BLOCK_SIZE, policy=make_policy("adaptive", num_blocks))
        self.core = EngineCore.build(runner, self.cache, EngineConfig(max_step_tokens=step_tokens))
        self.stopwatch = PhaseStopwatch()
        self._runner = runner
        self._random = np.random.default_rng(seed)
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def measure_phases(self) -> Iterator[None]:
        """Measure the phases of all steps inside a `with` statement."""
        with contextlib.ExitStack() as watches:
            for owner, name, label in (
                (self._runner, "start", MODEL),
                (Step, "wait", MODEL),
                (self.cache, "match", "match"),
                (self.cache, "lease", "lease"),
                (Lease, "extend", "lease"),
                (Lease, "close", "close"),
                (Lease, "commit", "commit"),
                (self.core._scheduler, "next_step", "schedule"),
                (self.core._completer, "_complete", "answer"),
                (self.core._completer, "_publish_token", "answer"),
                (self.core, "step", REST),
            ):
                watches.enter_context(self.stopwatch.watch(owner, name, label))
            yield

    def submit(self, case: BookkeepingCase, **params: Any) -> list[Future[Any]]:
        """Submit a case's requests. First tokens count up, so they repeat only after `vocab_size` prompts."""
        futures: list[Future[Any]] = []
        vocab_size = self._runner.model.vocab_size
        for _ in range(case.num_requests):
            ids = self._random.integers(0, vocab_size, case.prompt_tokens).astype("<u4")
            ids[0] = next(self._numbers) % vocab_size
            generation = None
            if case.num_new_tokens:
                sampling = Sampling(case.num_new_tokens, seed=0, ignore_eos=True)
                generation = Generation(sampling, frozenset(), lambda _: None)
            futures.append(Future())
            prefill_params = PrefillParams(ids.tobytes(), **params)
            self.core.submit(Request(prefill_params, Namespace("bench"), futures[-1], time.monotonic(), generation))
        return futures

    def check(self, prompt_tokens: int) -> None:
        """Check that a prompt has the same logits in chunks, computed by the core, and at once, computed by the runner.

        Raises:
            AssertionError: a bit differs.
        """
        [future] = self.submit(BookkeepingCase(1, prompt_tokens), return_logits=True)
        request = self.core._scheduler.requests()[0]
        self.finish([future])
        with self.cache.lease(Namespace(""), request.tokens, read=False) as lease:
            chunk = Chunk(request.tokens, 0, prompt_tokens, lease.block_ids, None, wants_logits=True)
            expected = self._runner.run([chunk]).logits[0]
        assert torch.equal(torch.from_numpy(future.result().logits), expected.cpu()), (
            "the core returns other logits than the model"
        )

    def finish(self, futures: Sequence[Future[Any]]) -> None:
        """Step until all requests are answered, and check that none reused anything."""
        while self.core.has_work:
            self.core.step()
        for future in futures:
            cached_tokens = future.result().usage.cached_tokens
            assert cached_tokens == 0, f"a new prompt reuses {cached_tokens} tokens"

    def measure(self, case: BookkeepingCase) -> Row:
        """Measure one round. Returns milliseconds per step: in total, and for bookkeeping."""
        futures = self.submit(case)
        while case.num_new_tokens and not all(each.is_decoding for each in self.core._scheduler.requests()):
            self.core.step()
        self.stopwatch.reset()
        with self.measure_phases():
            self.finish(futures)
        num_steps = self.stopwatch.num_calls[REST]
        ms_per_step = {label: seconds * 1e3 / num_steps for label, seconds in self.stopwatch.seconds.items()}
        step_ms = sum(ms_per_step.values())
        return {
            "steps": num_steps,
            "step_ms": step_ms,
            "bookkeeping_ms": step_ms - ms_per_step[MODEL],
            "share": 1 - ms_per_step[MODEL] / step_ms,
            "parts_ms": {label: part_ms for label, part_ms in ms_per_step.items() if label != MODEL},
        }


def measure(bench: BookkeepingBench, cases: Sequence[BookkeepingCase], rounds: int) -> Iterator[list[Row]]:
    """Measure rounds, each with all cases in turn; the first one warms up.

    Yields:
        After each measurement that counts, a row for each case measured so far, with the medians of its rounds.
    """
    measured: dict[BookkeepingCase, list[Row]] = {}
    for number in range(-1, rounds):
        for case in cases:
            row = bench.measure(case)
            if number >= 0:
                measured.setdefault(case, []).append(row)
                yield [_summary(each_case, case_rounds) for each_case, case_rounds in measured.items()]


def _summary(case: BookkeepingCase, rounds: list[Row]) -> Row:
    labels = sorted({label for row in rounds for label in row["parts_ms"]})
    parts_ms = {label: statistics.median(row["parts_ms"].get(label, 0.0) for row in rounds) for label in labels}
    return {
        "kind": "decode" if case.num_new_tokens else "prefill",
        "requests": case.num_requests,
        "prompt_tokens": case.prompt_tokens,
        "steps": rounds[0]["steps"],
        "rounds": len(rounds),
        **{key: statistics.median(row[key] for row in rounds) for key in ("step_ms", "bookkeeping_ms", "share")},
        "largest_share": max(row["share"] for row in rounds),
        "parts_ms": parts_ms,
    }


def _line(row: Row) -> str:
    largest_first = sorted(row["parts_ms"].items(), key=lambda part: -part[1])
    return (
        f"{row['kind']:>7} {row['requests']:>3} x {row['prompt_tokens']:>5} {row['steps']:>5} {row['step_ms']:9.2f} "
        f"{row['bookkeeping_ms']:11.3f} {row['share']:8.3%}  "
        + ", ".join(f"{label} {ms * 1e3:.0f}" for label, ms in largest_first)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write the file again after each measurement that counts."""
    parser = argparse.ArgumentParser(
        description="Measure the share of a step that the engine and the tree take, compared with the model."
    )
    parser.add_argument("--shape", choices=("tiny", *SHAPES), default="0.5b")
    parser.add_argument("--layers", type=int, default=24, help="layers of a random model; default 24")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument(
        "--prompts", type=int, nargs="*", default=[512, 2048, 8192], help="prompt lengths, one request each"
    )
    parser.add_argument("--batches", type=int, nargs="*", default=[4, 16], help="requests that share a step's tokens")
    parser.add_argument("--generations", type=int, nargs="*", default=[1, 16], help="requests that decode together")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens of each generation; default 32")
    parser.add_argument("--step-tokens", type=int, default=512, help="engine.max_step_tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    cases = [BookkeepingCase(1, num_tokens) for num_tokens in options.prompts]
    cases += [BookkeepingCase(batch, options.step_tokens // batch) for batch in options.batches]
    cases += [BookkeepingCase(batch, _GENERATION_PROMPT_TOKENS, options.new_tokens) for batch in options.generations]
    # The pool holds at most two rounds, so that earlier prompts are evicted.
    pool_tokens = 2 * sum(case.num_requests * (case.prompt_tokens + case.num_new_tokens + BLOCK_SIZE) for case in cases)
    runner = build_runner(
        options.shape, options.layers, getattr(torch, options.dtype), options.device, pool_tokens, is_exact=True
    )
    bench = BookkeepingBench(runner, options.step_tokens, options.seed)
    bench.check(options.step_tokens + options.step_tokens // 2)
    parameters = {key: getattr(options, key) for key in ("shape", "layers", "dtype", "step_tokens", "rounds", "seed")}
    result = {**parameters, "device": str(options.device), **describe_run("bench.bookkeeping", arguments)}
    rows: list[Row] = []
    for rows in measure(bench, cases, options.rounds):
        if options.json:
            progress = {"evicted_blocks": bench.cache.num_evicted_blocks, "is_finished": False}
            write_json(options.json, {"rows": rows, **result, **progress})
    print("   kind  requests   steps  step, ms bookkeeping    share  us/step")
    for row in rows:
        print(_line(row))
    if options.json:
        progress = {"evicted_blocks": bench.cache.num_evicted_blocks, "is_finished": True}
        write_json(options.json, {"rows": rows, **result, **progress})


if __name__ == "__main__":
    main()
