"""Measures time to first token after a cached prefix, through the engine's core, with random weights.

    python -m bench.gpu_prefill --json bench/results/gpu_prefill.json        # on a GPU
    python -m bench.gpu_prefill --dry-run                                    # on any machine; its times say nothing

Each prompt is computed in several ways in turn: after the cached prefix; the same without recorded steps (CUDA graphs);
by the same engine without the cache; and by transformers with a cache that holds the prefix. Answers are compared
before anything is timed. The lower bound is reading the weights once, at the rate at which this device copies.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from bench.exactness import BLOCK_SIZE, MODES, SHAPES, build_runner
from bench.parts.device_time import Rates, measure_rates
from bench.parts.environment import describe_run
from bench.parts.kernel_row import Row, describe_error
from bench.parts.peers.transformers_prefix import Tokens, TransformersPrefix
from bench.parts.result_file import write_json
from radixkv.api.params import PrefillParams
from radixkv.api.result import PrefillResult
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.compute.runner import Runner
from radixkv.config import EngineConfig
from radixkv.engine.core import EngineCore
from radixkv.namespace import Namespace
from radixkv.scheduling.request import Request

# Largest error of logits, relative to their norm: rounding in bfloat16 over 32 layers. Other tokens give more than 1.
_TOLERANCE = 0.1

# Goals for few tokens after a long prefix: at most this multiple of reading the weights, and at least this speedup over
# no cache.
_GOAL_CASE = (64, 8192)
_GOAL_WEIGHTS, _GOAL_RECOMPUTE = 2, 10


class Bench:
    """An engine core with one long cached prompt. Each measured prefix is a part of its beginning.

    Args:
        runner: a runner with room for the longest prompt twice.
        longest_prefix: tokens of the cached prompt.
        step_tokens: the most tokens of one forward pass.
        rates: rates of this device.
    """

    def __init__(self, runner: Runner, longest_prefix: int, step_tokens: int, rates: Rates) -> None:
        self._model = runner.model
        self._step_tokens = step_tokens
        self._rates = rates
        cache, config = PrefixCache(runner.storage.num_blocks, BLOCK_SIZE), EngineConfig(max_step_tokens=step_tokens)
        self._core = EngineCore(runner, cache, config)
        self._core_without_graphs = EngineCore(runner.without_graphs(), cache, config) if runner.has_graphs else None
        self._random = np.random.default_rng(0)
        self._stem = self._draw(longest_prefix)
        self._numbers = itertools.count()
        if longest_prefix:
            self.ask(self._stem)

    @functools.cached_property
    def _rival(self) -> TransformersPrefix:
        return TransformersPrefix(self._model, self._stem, self._step_tokens)

    def _draw(self, num_tokens: int) -> Tokens:
        return self._random.integers(0, self._model.vocab_size, num_tokens).astype("<u4")

    def prompt(self, suffix_tokens: int, prefix_tokens: int) -> Tokens:
        """Make a prompt of which exactly the prefix is cached: no two suffixes begin with the same token."""
        suffix = self._draw(suffix_tokens)
        used = {int(token) for token in (*self._stem[:1], *self._stem[prefix_tokens : prefix_tokens + 1])}
        suffix[0] = next(number for number in self._numbers if number not in used)
        assert suffix[0] < self._model.vocab_size, "the vocabulary has no token left that no suffix began with"
        return np.concatenate((self._stem[:prefix_tokens], suffix))

    def ask(
        self, prompt: Tokens, *, reads: bool = True, wants_logits: bool = False, core: EngineCore | None = None
    ) -> PrefillResult:
        """Answer one prompt. Without reading from the cache, nothing is written to it either."""
        core = core or self._core
        future: Future[PrefillResult] = Future()
        params = PrefillParams(prompt.tobytes(), return_logits=wants_logits, read_cache=reads, write_cache=reads)
        core.submit(Request(params, Namespace("bench"), future, time.monotonic()))
        while core.has_work:
            core.step()
        return future.result(0)

    def measure(self, suffix_tokens: int, prefix_tokens: int, rounds: int) -> Row:
        """Measure one row. It has medians only if the answers agree."""
        row: Row = self._compare(suffix_tokens, prefix_tokens)
        if not row["is_right"]:
            return row
        ways: dict[str, Callable[[Tokens], object]] = {
            "ttft": self.ask,
            "recompute": lambda prompt: self.ask(prompt, reads=False),
        }
        if (core := self._core_without_graphs) is not None:
            ways["launched"] = lambda prompt: self.ask(prompt, core=core)
        if row["transformers_reason"] is None:
            ways["transformers"] = lambda prompt: self._rival.next_token(prompt[prefix_tokens:], prefix_tokens)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            prompt = self.prompt(suffix_tokens, prefix_tokens)
            for way, answer in ways.items():
                if way == "launched":  # the first way cached its prompt
                    prompt = self.prompt(suffix_tokens, prefix_tokens)
                if way == "transformers":
                    self._rival.restore(prefix_tokens)
                start_s = time.perf_counter()
                answer(prompt)
                seconds[way].append(time.perf_counter() - start_s)
        row |= {f"{way}_ms": statistics.median(each) * 1e3 for way, each in seconds.items()}
        row["weights_ratio"] = row["ttft_ms"] / self.weights_ms
        row |= {f"{way}_ratio": row[f"{way}_ms"] / row["ttft_ms"] for way in ways if way != "ttft"}
        return row

    def _compare(self, suffix_tokens: int, prefix_tokens: int) -> Row:
        """Compute the prompt in every way once, which also warms up, and compare the answers."""
        prompt = self.prompt(suffix_tokens, prefix_tokens)
        warm = self.ask(prompt, wants_logits=True)
        cold = self.ask(prompt, reads=False, wants_logits=True)
        if (cached_tokens := warm.usage.cached_tokens) != prefix_tokens:
            return {"is_right": False, "reason": f"expected {prefix_tokens} cached tokens, got {cached_tokens}"}
        assert warm.logits is not None
        assert cold.logits is not None
        error = _difference(warm.logits, cold.logits)
        row: Row = {"is_right": error <= (0 if self._model.is_exact else _TOLERANCE), "error": _number(error)}
        if not row["is_right"]:
            return {**row, "reason": f"the cache changes the answer: off by {error:.3g}"}
        return {**row, **self._compare_with_transformers(prompt, prefix_tokens, warm.logits)}

    def _compare_with_transformers(self, prompt: Tokens, prefix_tokens: int, logits: npt.NDArray[np.float32]) -> Row:
        try:
            self._rival.restore(prefix_tokens)
            error = _difference(self._rival.logits(prompt[prefix_tokens:], prefix_tokens), logits)
        except Exception as raised:  # noqa: BLE001 - whatever it is, our own times are taken
            return {"transformers_error": None, "transformers_reason": describe_error(raised)}
        reason = None if error <= _TOLERANCE else f"wrong: off by {error:.3g}, at most {_TOLERANCE}"
        return {"transformers_error": _number(error), "transformers_reason": reason}

    @property
    def weights_ms(self) -> float:
        """Return the milliseconds to read all weights once, except the embeddings, of which a token reads one row."""
        module = self._model.module
        embeddings = module.get_input_embeddings().weight
        num_bytes: int = sum(each.nbytes for each in module.parameters() if each is not embeddings)
        return num_bytes / self._rates.bytes_per_s * 1e3


def _difference(got: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    """Return the error of logits relative to their norm; infinite if one is not a number."""
    error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
    return error if np.isfinite(error) else float("inf")


def _number(error: float) -> float | None:
    return error if np.isfinite(error) else None


_HEADER = (
    f"{'mode':<6} {'suffix':>6} {'prefix':>6} {'TTFT ms':>9} {'no graphs':>10} {'recomputed':>11} {'transformers':>13} "
    f"{'of weights':>11} {'recomputed /':>13} {'transformers /':>15}"
)


def _line(row: Row) -> str:
    start = f"{row['mode']:<6} {row['suffix_tokens']:>6} {row['prefix_tokens']:>6} "
    if not row["is_right"]:
        return f"{start}FAILED  {row['reason']}"
    launched = f"{row['launched_ms']:>10.2f}" if "launched_ms" in row else f"{'-':>10}"
    line = f"{start}{row['ttft_ms']:>9.2f} {launched} {row['recompute_ms']:>11.2f} "
    end = f"{row['weights_ratio']:>11.2f} {row['recompute_ratio']:>13.2f} "
    if "transformers_ms" not in row:
        return f"{line}{'-':>13} {end}{'-':>15}  transformers: {row['transformers_reason']}"
    return f"{line}{row['transformers_ms']:>13.2f} {end}{row['transformers_ratio']:>15.2f}"


def _goal(row: Row) -> str:
    """Compare a row with the goals, as ratios."""
    return (
        f"goal, {row['mode']}: {row['suffix_tokens']} tokens after {row['prefix_tokens']} take "
        f"{row['weights_ratio']:.2f} times the reading of the weights (at most {_GOAL_WEIGHTS}) and "
        f"{row['recompute_ratio']:.1f} times less than without the cache (at least {_GOAL_RECOMPUTE})"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print row by row, and write the file after each. Returns 1 if an answer is wrong or a way failed."""
    options = _parse(arguments)
    rates = measure_rates(options.device)
    if options.dry_run:
        print("dry run: answers are compared, times mean nothing")
    rows: list[Row] = []
    result = {
        "is_dry_run": options.dry_run,
        "copy_gb_per_s": rates.bytes_per_s / 1e9,
        **{key: getattr(options, key) for key in ("shape", "layers", "dtype", "step_tokens", "rounds")},
        "command": shlex.join(
            ["python", "-m", "bench.gpu_prefill", *(sys.argv[1:] if arguments is None else arguments)]
        ),
        **describe_run(),
        "rows": rows,
    }
    print(_HEADER)
    for mode in options.modes:
        for row in _rows(mode, options, rates):
            rows.append(row)
            print(_line(row), flush=True)
            if options.json:
                write_json(options.json, {**result, "is_finished": False})
        gc.collect()  # the next model needs the memory of this one
    for row in rows:
        if (row["suffix_tokens"], row["prefix_tokens"]) == _GOAL_CASE and row["is_right"]:
            print(_goal(row))
    if options.json:
        write_json(options.json, {**result, "is_finished": True})
    return 0 if all(row["is_right"] for row in rows) else 1


def _rows(mode: str, options: argparse.Namespace, rates: Rates) -> Iterator[Row]:
    """Measure all lengths on one model, the longest prefix first, so that shorter ones find it cached."""
    bench, reason = None, ""
    try:
        bench = _make_bench(mode, options, rates)
    except Exception as raised:  # noqa: BLE001 - exact mode may refuse the device; the other mode is measured
        reason = describe_error(raised)
    for prefix, suffix in itertools.product(sorted(options.prefixes, reverse=True), options.suffixes):
        row: Row = {"mode": mode, "suffix_tokens": suffix, "prefix_tokens": prefix}
        if bench is None:
            yield {**row, "is_right": False, "reason": reason}
            continue
        try:
            yield {**row, "weights_ms": bench.weights_ms, **bench.measure(suffix, prefix, options.rounds)}
        except Exception as raised:  # noqa: BLE001 - out of memory, say; the other lengths are measured
            yield {**row, "is_right": False, "reason": describe_error(raised)}


def _make_bench(mode: str, options: argparse.Namespace, rates: Rates) -> Bench:
    dtype, pool_tokens = getattr(torch, options.dtype), 2 * (max(options.prefixes) + max(options.suffixes) + BLOCK_SIZE)
    runner = build_runner(options.shape, options.layers, dtype, options.device, pool_tokens, is_exact=mode == "exact")
    return Bench(runner, max(options.prefixes), options.step_tokens, rates)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time to first token after a cached prefix.")
    parser.add_argument("--shape", choices=("tiny", *SHAPES), default="8b")
    parser.add_argument("--layers", type=int, default=32, help="layers of a random model; default 32")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--suffixes", type=int, nargs="+", default=[16, 64, 256, 2048], help="numbers of new tokens")
    parser.add_argument(
        "--prefixes", type=int, nargs="+", default=[0, 2048, 8192, 32_768], help="numbers of cached tokens"
    )
    parser.add_argument("--step-tokens", type=int, default=8192, help="engine.max_step_tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="embedded model on the CPU, short prompts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    options.device = torch.device("cpu" if options.dry_run else "cuda")
    if options.dry_run:
        options.shape, options.dtype, options.step_tokens, options.rounds = "tiny", "float32", 64, 2
        options.suffixes, options.prefixes = [5, 64], [0, 130]
    return options


if __name__ == "__main__":
    sys.exit(main())
