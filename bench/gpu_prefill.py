"""Measures time to first token after a cached prefix, through the engine core, with random weights.

    python -m bench.gpu_prefill --json bench/results/gpu_prefill.json        # on a GPU
    python -m bench.gpu_prefill --dry-run                                    # on any machine; its times are meaningless

Each prompt is computed in variants: after the cached prefix; the same without CUDA graphs; a long suffix in steps
of 512 tokens; by the same engine without the cache; and by transformers with a cache that holds the prefix, whose
attention repeats K and V for each query head and uses no CUDA graph. Answers with and without the cache are compared
before anything is timed, and the answer of transformers before transformers is timed. A row is printed and written as
soon as our own time with the cache is known, and again after each of the other variants. The lower bound is the time to
read all weights once, at the rate at which this device copies memory.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
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
from bench.parts.device_time import DeviceRates, measure_rates, time_host_s
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

# Goals for a short suffix after a long prefix, in tokens: at most this multiple of the time to read the weights, and at
# least this speedup compared with no cache.
_GOAL_CASE = (64, 8192)
_MAX_WEIGHTS_RATIO, _MIN_RECOMPUTE_RATIO = 2, 10

# In the order of measurement: the rows that matter most come first.
_SUFFIXES, _PREFIXES = [64, 16, 256, 2048], [8192, 32_768, 2048, 0]
_DRY_SUFFIXES, _DRY_PREFIXES = [5, 64], [130, 0]

_HEADER = f"{'mode':<6} {'suffix':>6} {'prefix':>6} {'TTFT ms':>9} {'of weights':>11}"
# In the order of measurement. `launched` is without CUDA graphs, `recompute` is without the cache.
_VARIANTS = ("launched", "short_steps", "recompute", "transformers")

# Maximum error of logits, relative to their norm: rounding in bfloat16 over 32 layers. With wrong tokens it exceeds 1.
_TOLERANCE = 0.1

# A long suffix is also computed in steps of this size, in which the device may wait for launches.
_SHORT_STEP_TOKENS = 512

# Without the cache, a prompt with a prefix of at least this length takes seconds, so it is recomputed only once.
_LONG_PREFIX_TOKENS = 32_768


class PrefillBench:
    """An engine core and one long prompt. Each measured prefix is a prefix of this prompt.

    Args:
        runner: a runner whose pool can hold the longest prompt twice.
        longest_prefix: number of tokens of the long prompt.
        step_tokens: maximum number of tokens per forward pass.
        rates: memory and matmul rates of this device.
    """

    def __init__(self, runner: Runner, longest_prefix: int, step_tokens: int, rates: DeviceRates) -> None:
        self._model = runner.model
        self._step_tokens = step_tokens
        self._rates = rates
        cache, config = PrefixCache(runner.storage.num_blocks, BLOCK_SIZE), EngineConfig(max_step_tokens=step_tokens)
        self._core = EngineCore.build(runner, cache, config)
        self._core_without_graphs = (
            EngineCore.build(runner.without_graphs(), cache, config) if runner.has_graphs else None
        )
        self._core_of_short_steps = EngineCore.build(runner, cache, EngineConfig(max_step_tokens=_SHORT_STEP_TOKENS))
        self._random = np.random.default_rng(0)
        self._long_prompt = self._draw_tokens(longest_prefix)
        self._first_suffix_tokens = itertools.count()

    @functools.cached_property
    def _transformers(self) -> TransformersPrefix:
        return TransformersPrefix(self._model, self._long_prompt, self._step_tokens)

    def _draw_tokens(self, num_tokens: int) -> Tokens:
        return self._random.integers(0, self._model.vocab_size, num_tokens).astype("<u4")

    def cache_prefix(self, prefix_tokens: int) -> None:
        """Compute this prefix of the long prompt, so that it is cached."""
        if prefix_tokens:
            self.ask(self._long_prompt[:prefix_tokens])

    def prompt(self, suffix_tokens: int, prefix_tokens: int) -> Tokens:
        """Build a prompt of which exactly the prefix is cached: no two suffixes begin with the same token."""
        suffix = self._draw_tokens(suffix_tokens)
        # More of the long prompt than the prefix may be cached, so the suffix must not begin like its continuation.
        next_token = self._long_prompt[prefix_tokens : prefix_tokens + 1]
        excluded = {int(token) for token in (*self._long_prompt[:1], *next_token)}
        suffix[0] = next(token for token in self._first_suffix_tokens if token not in excluded)
        assert suffix[0] < self._model.vocab_size, (
            "every token of the vocabulary is already the first token of a suffix"
        )
        return np.concatenate((self._long_prompt[:prefix_tokens], suffix))

    def ask(
        self, prompt: Tokens, *, reads: bool = True, wants_logits: bool = False, core: EngineCore | None = None
    ) -> PrefillResult:
        """Compute one prompt. If the cache is not read, it is not written either."""
        core = core or self._core
        future: Future[PrefillResult] = Future()
        params = PrefillParams(prompt.tobytes(), return_logits=wants_logits, read_cache=reads, write_cache=reads)
        core.submit(Request(params, Namespace("bench"), future, time.monotonic()))
        while core.has_work:
            core.step()
        return future.result(0)

    def measure(self, suffix_tokens: int, prefix_tokens: int, rounds: int) -> Iterator[Row]:
        """Measure one row, if the answers agree.

        Yields:
            The same row several times: first with the time to first token, then with one more variant each time. Each
            other variant of radixkv is timed alternately with the cached prompt. The ratio of a variant is its time
            divided by the time to first token.
        """
        self.cache_prefix(prefix_tokens)
        row, prompt, logits = self._compare(suffix_tokens, prefix_tokens)
        if logits is None:
            yield row
            return

        seconds: dict[str, list[float]] = {"ttft": []}  # by variant
        make_prompt = functools.partial(self.prompt, suffix_tokens, prefix_tokens)
        for _ in range(rounds):
            seconds["ttft"].append(time_host_s(functools.partial(self.ask, make_prompt())))
        yield self._add_medians(row, seconds)

        variants: dict[str, Callable[[Tokens], float]] = {}
        if (core := self._core_without_graphs) is not None:
            variants["launched"] = lambda prompt: time_host_s(lambda: self.ask(prompt, core=core))
        if suffix_tokens > _SHORT_STEP_TOKENS:
            variants["short_steps"] = lambda prompt: time_host_s(
                lambda: self.ask(prompt, core=self._core_of_short_steps)
            )
        variants["recompute"] = lambda prompt: time_host_s(lambda: self.ask(prompt, reads=False))
        for variant, time_variant in variants.items():
            is_slow = variant == "recompute" and prefix_tokens >= _LONG_PREFIX_TOKENS
            try:
                self._time_in_turn(variant, time_variant, make_prompt, seconds, 1 if is_slow else rounds)
            except Exception as raised:  # noqa: BLE001 - out of memory, say; the other variants are timed
                row[f"{variant}_reason"] = describe_error(raised)
            yield self._add_medians(row, seconds)

        row |= self._compare_with_transformers(prompt, prefix_tokens, logits)
        if row["transformers_reason"] is None:
            with self._transformers.running():  # the attention is switched outside of the timed calls
                for _ in range(rounds):
                    self._transformers.restore(prefix_tokens)
                    answer_prompt = functools.partial(
                        self._transformers.next_token, make_prompt()[prefix_tokens:], prefix_tokens
                    )
                    elapsed_s = time_host_s(answer_prompt)
                    seconds.setdefault("transformers", []).append(elapsed_s)
        yield self._add_medians(row, seconds)

    def _time_in_turn(
        self,
        variant: str,
        time_variant: Callable[[Tokens], float],
        make_prompt: Callable[[], Tokens],
        seconds: dict[str, list[float]],
        rounds: int,
    ) -> None:
        """Time a variant alternately with the cached prompt. Each time has a new prompt, since prompts are cached."""
        for _ in range(rounds):
            seconds["ttft"].append(time_host_s(functools.partial(self.ask, make_prompt())))
            elapsed_s = time_variant(make_prompt())
            seconds.setdefault(variant, []).append(elapsed_s)

    def _add_medians(self, row: Row, seconds: dict[str, list[float]]) -> Row:
        """Set the median times and the ratios of the variants that have been timed. Returns the same row."""
        row |= {f"{variant}_ms": statistics.median(times_s) * 1e3 for variant, times_s in seconds.items()}
        row["weights_ratio"] = row["ttft_ms"] / self.weights_ms
        row |= {f"{variant}_ratio": row[f"{variant}_ms"] / row["ttft_ms"] for variant in seconds if variant != "ttft"}
        return row

    def _compare(self, suffix_tokens: int, prefix_tokens: int) -> tuple[Row, Tokens, npt.NDArray[np.float32] | None]:
        """Compute a prompt with the cache and without, and compare the answers. This also warms up.

        Returns:
            The row so far, the prompt, and its logits; None for the logits if the answers differ, or if the number of
            cached tokens is not that of the prefix.
        """
        prompt = self.prompt(suffix_tokens, prefix_tokens)
        warm = self.ask(prompt, wants_logits=True)
        cold = self.ask(prompt, reads=False, wants_logits=True)
        if (cached_tokens := warm.usage.cached_tokens) != prefix_tokens:
            reason = f"expected {prefix_tokens} cached tokens, got {cached_tokens}"
            return {"is_right": False, "reason": reason}, prompt, None
        assert warm.logits is not None
        assert cold.logits is not None
        error = _difference(warm.logits, cold.logits)
        row: Row = {"is_right": error <= (0 if self._model.is_exact else _TOLERANCE), "error": _finite_or_none(error)}
        if not row["is_right"]:
            return {**row, "reason": f"the cache changes the answer: off by {error:.3g}"}, prompt, None
        return row, prompt, warm.logits

    def _compare_with_transformers(self, prompt: Tokens, prefix_tokens: int, logits: npt.NDArray[np.float32]) -> Row:
        try:
            with self._transformers.running():
                self._transformers.restore(prefix_tokens)
                error = _difference(self._transformers.logits(prompt[prefix_tokens:], prefix_tokens), logits)
        except Exception as raised:  # noqa: BLE001 - whatever transformers raises, radixkv's times are valid
            return {"transformers_error": None, "transformers_reason": describe_error(raised)}
        reason = None if error <= _TOLERANCE else f"wrong: off by {error:.3g}, at most {_TOLERANCE}"
        return {"transformers_error": _finite_or_none(error), "transformers_reason": reason}

    @property
    def weights_ms(self) -> float:
        """Milliseconds to read all weights once, without the embeddings, of which only one row per token is read."""
        module = self._model.module
        embeddings = module.get_input_embeddings().weight
        num_bytes: int = sum(each.nbytes for each in module.parameters() if each is not embeddings)
        return num_bytes / self._rates.bytes_per_s * 1e3


def _difference(got: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    """Return the error of logits relative to their norm; infinite if a logit is not finite."""
    error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
    return error if np.isfinite(error) else float("inf")


def _finite_or_none(error: float) -> float | None:
    return error if np.isfinite(error) else None


def _line(row: Row) -> str:
    start = f"{row['mode']:<6} {row['suffix_tokens']:>6} {row['prefix_tokens']:>6} "
    if not row["is_right"]:
        return f"{start}FAILED  {row['reason']}"
    return f"{start}{row['ttft_ms']:>9.2f} {row['weights_ratio']:>11.2f}"


def _variant_line(row: Row, variant: str) -> str:
    if f"{variant}_ms" not in row:
        return f"{variant:>21}: {row[f'{variant}_reason']}"
    return f"{variant:>21} {row[f'{variant}_ms']:>9.2f}  {row[f'{variant}_ratio']:.2f} times as long"


def _goal_line(row: Row) -> str:
    """Return a line that compares the ratios of a row with the goals."""
    # Without the cache, the prompt may not fit into memory.
    recompute = f"{row['recompute_ratio']:.1f}" if "recompute_ratio" in row else "an unknown number of"
    return (
        f"goal, {row['mode']}: {row['suffix_tokens']} tokens after {row['prefix_tokens']} take "
        f"{row['weights_ratio']:.2f} times the time to read the weights (at most {_MAX_WEIGHTS_RATIO}), and "
        f"{recompute} times less than without the cache (at least {_MIN_RECOMPUTE_RATIO})"
    )


def _summary(rows: Sequence[Row]) -> str:
    """Return the ratios of all correct rows in one line, for the table of `bench.gpu`."""
    ratios = [f"{row['mode']} {row['suffix_tokens']}: {row['weights_ratio']:.2f}" for row in rows if row["is_right"]]
    return f"TTFT divided by the time to read the weights: {', '.join(ratios)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print and write each result at once. Returns 1 if an answer is wrong or could not be computed."""
    options = _parse(arguments)
    rates = measure_rates(options.device)
    if options.dry_run:
        print("dry run: answers are compared, times are meaningless")
    rows: list[Row] = []
    result = {
        "is_dry_run": options.dry_run,
        "copy_gb_per_s": rates.bytes_per_s / 1e9,
        **{key: getattr(options, key) for key in ("shape", "layers", "dtype", "step_tokens", "rounds")},
        **describe_run("bench.gpu_prefill", arguments),
        "rows": rows,
    }
    print(_HEADER)
    for mode in options.modes:
        for row in _measure_rows(mode, options, rates):
            _add_and_print(row, rows)
            if options.json:
                write_json(options.json, {**result, "is_finished": False})
        gc.collect()  # the next model needs the memory of this one
    for row in rows:
        if (row["suffix_tokens"], row["prefix_tokens"]) == _GOAL_CASE and row["is_right"]:
            print(_goal_line(row))
    if options.json:
        write_json(options.json, {**result, "is_finished": True, "summary": _summary(rows)})
    return 0 if all(row["is_right"] for row in rows) else 1


def _add_and_print(row: Row, rows: list[Row]) -> None:
    """Add a new row to `rows` and print it; of a row that was added before, print the variant measured last.

    If a row fails after it was printed, the reason is printed below it.
    """
    is_new = not rows or rows[-1] is not row
    if is_new:
        rows.append(row)
    if is_new or not row["is_right"]:
        print(_line(row), flush=True)
        return
    measured = [variant for variant in _VARIANTS if f"{variant}_ms" in row or f"{variant}_reason" in row]
    if measured:
        print(_variant_line(row, measured[-1]), flush=True)


def _measure_rows(mode: str, options: argparse.Namespace, rates: DeviceRates) -> Iterator[Row]:
    """Measure all lengths on one model, in the given order. Yields a row again after each further measurement."""
    bench, build_failure = None, ""
    try:
        bench = _make_bench(mode, options, rates)
    except Exception as raised:  # noqa: BLE001 - exact mode may refuse the device; the other mode is measured
        build_failure = describe_error(raised)
    for prefix, suffix in itertools.product(options.prefixes, options.suffixes):
        row: Row = {"mode": mode, "suffix_tokens": suffix, "prefix_tokens": prefix}
        if bench is None:
            yield {**row, "is_right": False, "reason": build_failure}
            continue
        try:
            row["weights_ms"] = bench.weights_ms
            for measured in bench.measure(suffix, prefix, options.rounds):
                row.update(measured)
                yield row
        except Exception as raised:  # noqa: BLE001 - out of memory, say; the other lengths are measured
            row |= {"is_right": False, "reason": describe_error(raised)}
            yield row


def _make_bench(mode: str, options: argparse.Namespace, rates: DeviceRates) -> PrefillBench:
    dtype, pool_tokens = getattr(torch, options.dtype), 2 * (max(options.prefixes) + max(options.suffixes) + BLOCK_SIZE)
    runner = build_runner(options.shape, options.layers, dtype, options.device, pool_tokens, is_exact=mode == "exact")
    return PrefillBench(runner, max(options.prefixes), options.step_tokens, rates)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time to first token after a cached prefix.")
    parser.add_argument("--shape", choices=("tiny", *SHAPES), default="8b")
    parser.add_argument("--layers", type=int, default=32, help="layers of a random model; default 32")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["fast", "exact"])
    parser.add_argument("--suffixes", type=int, nargs="+", help=f"numbers of new tokens; default {_SUFFIXES}")
    parser.add_argument("--prefixes", type=int, nargs="+", help=f"numbers of cached tokens; default {_PREFIXES}")
    parser.add_argument("--step-tokens", type=int, default=8192, help="engine.max_step_tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="embedded model on the CPU, short prompts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    options.device = torch.device("cpu" if options.dry_run else "cuda")
    if options.dry_run:
        options.shape, options.dtype, options.step_tokens, options.rounds = "tiny", "float32", 64, 2
    options.suffixes = options.suffixes or (_DRY_SUFFIXES if options.dry_run else _SUFFIXES)
    options.prefixes = options.prefixes or (_DRY_PREFIXES if options.dry_run else _PREFIXES)
    return options


if __name__ == "__main__":
    sys.exit(main())
