"""Measures how much a shared store that is slow or never responds adds to the time to first token.

    python -m bench.modes.slow_store [--json FILE]

Each group of new prompts is computed by three engines in turn: without a store, with a Redis server that responds after
`--delay-s`, by default 2 s, and with one that never responds. The exit status is 0 if all answers are equal and each
99th percentile is within its bound: 1.1 times the 99th percentile without a store, plus the store's time limit.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.modes.slow_redis import SlowRedis
from bench.parts.result_file import write_result
from bench.parts.running_engine import running_engine
from radixkv.api.params import PrefillParams
from radixkv.api.result import PrefillResult
from radixkv.engine.engine import Engine

_WITHOUT = "no store"
_MAX_RATIO, _STORE_TIMEOUT_S = 1.1, 0.5  # the timeout is that of `GuardedStore`
_POOL_PROMPTS = 16
_TIMEOUT_S = 600.0
_HEADER = f"{'':24} {'p50':>10} {'p99':>10} {'max':>10} {'p99, of no store':>17} {'bound of p99':>13}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure three engines. Returns 1 if answers differ or a percentile is beyond its bound."""
    args = _parser().parse_args(arguments)
    rng = np.random.default_rng(args.seed)
    with contextlib.ExitStack() as stack:
        engines = _start_engines(stack, args.delay_s, args.prompt_tokens)
        vocab_size = engines[_WITHOUT].limits.vocab_size
        prompts = [
            rng.integers(0, vocab_size, args.prompt_tokens).astype("<u4").tobytes() for _ in range(args.requests)
        ]
        times_s, num_different = _measure_times(engines, prompts, args.at_once)
        tiers = {name: engine.offload.stats()[0] for name, engine in engines.items() if engine.offload is not None}
    rows = [_row(name, each, times_s[_WITHOUT]) for name, each in times_s.items()]
    for row in rows:
        if row["store"] in tiers:
            row["is_left_alone"] = not tiers[row["store"]].is_working
    print("\n".join([_HEADER, *map(_format_row, rows), f"{num_different} answers differ"]))
    sizes = {name: getattr(args, name) for name in ("requests", "prompt_tokens", "at_once", "delay_s", "seed")}
    result = {**sizes, "different_answers": num_different, "rows": rows}
    write_result(args.json, "bench.modes.slow_store", arguments, result)
    return int(num_different > 0 or not all(row["is_within_bound"] for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.modes.slow_store", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--requests", type=int, default=400, metavar="N")
    parser.add_argument("--prompt-tokens", type=int, default=512, metavar="N")
    parser.add_argument("--at-once", type=int, default=4, metavar="N", help="requests in a group; default 4")
    parser.add_argument(
        "--delay-s", type=float, default=2.0, metavar="S", help="delay of each response of the slow store"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def _start_engines(stack: contextlib.ExitStack, delay_s: float, prompt_tokens: int) -> dict[str, Engine]:
    """Start the engines and their stores, and warm each up with a prompt that its store does not see."""
    stores: dict[str, float | None] = {f"responds after {delay_s:g} s": delay_s, "never responds": None}
    urls = {name: stack.enter_context(SlowRedis(each)).url for name, each in stores.items()}
    pool = ["model.device=cpu", f"cache.capacity_tokens={_POOL_PROMPTS * prompt_tokens}", "tiers.trusted=true"]
    settings = {_WITHOUT: pool, **{name: [*pool, f"tiers.redis_url={url}"] for name, url in urls.items()}}
    engines = {}
    for name, each in settings.items():
        engine = engines[name] = stack.enter_context(running_engine(each))
        prompt = np.arange(prompt_tokens, dtype="<u4") % engine.limits.vocab_size
        params = PrefillParams(prompt.tobytes(), read_cache=False, write_cache=False)
        engine.prefill(params).result(_TIMEOUT_S)
    return engines


def _measure_times(
    engines: dict[str, Engine], prompts: Sequence[bytes], at_once: int
) -> tuple[dict[str, npt.NDArray[np.float64]], int]:
    """Return seconds to the first token of each engine and prompt, and the number of prompts with differing answers."""
    times_s: dict[str, list[float]] = {name: [] for name in engines}
    num_different = 0
    for number, group in enumerate(_groups(prompts, at_once)):
        token_ids = []
        first = number % len(engines)
        names = [*list(engines)[first:], *list(engines)[:first]]
        for name in names:
            answers, seconds = _ask(engines[name], group)
            times_s[name] += seconds
            token_ids.append(answers)
        num_different += sum(len(set(each)) > 1 for each in zip(*token_ids, strict=True))
    return {name: np.array(each) for name, each in times_s.items()}, num_different


def _groups(prompts: Sequence[bytes], size: int) -> Iterator[Sequence[bytes]]:
    return (prompts[start : start + size] for start in range(0, len(prompts), size))


def _ask(engine: Engine, prompts: Sequence[bytes]) -> tuple[list[int], list[float]]:
    """Send prompts at the same time. Returns the next token and the seconds of each."""
    ended_s = [0.0] * len(prompts)

    def record_end(number: int, _: Future[PrefillResult]) -> None:
        ended_s[number] = time.perf_counter()

    start_s = time.perf_counter()
    futures = [engine.prefill(PrefillParams(prompt)) for prompt in prompts]
    for number, future in enumerate(futures):
        future.add_done_callback(partial(record_end, number))
    token_ids = [future.result(_TIMEOUT_S).next_token_id for future in futures]
    return token_ids, [each - start_s for each in ended_s]


def _row(name: str, times_s: npt.NDArray[np.float64], baseline_s: npt.NDArray[np.float64]) -> dict[str, Any]:
    ours, baseline = _summary(times_s), _summary(baseline_s)
    bound_ms = _MAX_RATIO * baseline["p99"] + 1e3 * _STORE_TIMEOUT_S
    return {
        "store": name,
        "ttft_ms": ours,
        "ratio_to_without": {key: ours[key] / baseline[key] for key in ours},
        "p99_bound_ms": bound_ms,
        "is_within_bound": ours["p99"] <= bound_ms,
    }


def _summary(times_s: npt.NDArray[np.float64]) -> dict[str, float]:
    return {
        "p50": 1e3 * float(np.percentile(times_s, 50)),
        "p99": 1e3 * float(np.percentile(times_s, 99)),
        "max": 1e3 * float(times_s.max()),
    }


def _format_row(row: dict[str, Any]) -> str:
    mine = "".join(f"{row['ttft_ms'][key]:8.1f} ms" for key in ("p50", "p99", "max"))
    beyond = "" if row["is_within_bound"] else "   beyond its bound"
    return f"{row['store']:24}{mine} {row['ratio_to_without']['p99']:17.2f} {row['p99_bound_ms']:10.1f} ms{beyond}"


if __name__ == "__main__":
    sys.exit(main())
