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
import gc
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from bench.exactness import BLOCK_SIZE, MODES, SHAPES, build_runner
from bench.gpu.prefill_bench import PrefillBench
from bench.parts.device_time import DeviceRates, measure_rates
from bench.parts.environment import describe_run
from bench.parts.kernel_row import Row, describe_error
from bench.parts.result_file import write_json

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
