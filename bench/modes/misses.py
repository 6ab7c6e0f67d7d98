"""Measures how much slower tiers make prompts that no tier has.

    python -m bench.modes.misses [--json FILE]

Each prompt is new, and is computed by several engines in random order: two without a store, one with host memory, one
with a disk, and one with both. Pools and stores are filled before the measurement, so that for each prompt blocks are
evicted from the device, copied and stored, and others are dropped. The next engine gets the prompt when the stores of
the previous one are idle; CPU time is counted until then.

Each time is divided by the geometric mean of the two engines without a store for the same prompt, and the middle half
of these ratios is averaged. The placement of an engine's memory makes it a few percent faster or slower until it is
stopped, so engines are started several times, in random order; the standard error is that of the mean over these sets.
For the second engine without a store, the ratio to the first is shown: its distance from 1 is the measurement error.
The exit status is 1 if answers differ.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.parts.paired_times import PromptTimes, middle_ratios
from bench.parts.result_file import write_result
from bench.parts.running_engine import running_engine
from radixkv.api.params import PrefillParams
from radixkv.config import Config
from radixkv.engine.engine import Engine

_WITHOUT, _AGAIN = "no store", "no store again"
_STORES = ("host", "disk", "host and disk")
_POOL_PROMPTS = 4
_STORED_PROMPTS = 8  # a store has the size of the K/V of this many prompts; blocks have headers, so fewer prompts fit
_MAX_CACHED_TOKENS = 4  # a few, since two prompts may begin with the same tokens by chance
_TIMEOUT_S = 600.0
_MAX_RATIO = 1.02  # the bound of the time of a miss, relative to engines without a store
_HEADER = f"{'':16} {'TTFT p50':>11} {'of no store':>12} {'std. error':>11} {'processor time':>15} {'std. error':>11}"


class _SetResult(NamedTuple):
    """Results of engines that were started once: times of each prompt, saved blocks by tier, and differing answers."""

    times: Mapping[str, Sequence[PromptTimes]]
    saved_blocks: Mapping[str, dict[str, int]]
    num_different: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all engines. Returns 1 if answers differ."""
    args = _parser().parse_args(arguments)
    rng = np.random.default_rng(args.seed)
    names = [_WITHOUT, _AGAIN, *(args.stores or _STORES)]
    sets = [_measure_set(names, args.prompt_tokens, args.requests, args.disk, rng) for _ in range(args.sets)]
    num_different = sum(each.num_different for each in sets)
    rows = [_row(name, sets) for name in names]
    print("\n".join([_HEADER, *map(_format_row, rows), f"{num_different} answers differ"]))
    sizes = {name: getattr(args, name) for name in ("sets", "requests", "prompt_tokens", "seed")}
    result = {**sizes, "different_answers": num_different, "rows": rows}
    write_result(args.json, "bench.modes.misses", arguments, result)
    return int(num_different > 0)


def _measure_set(
    names: Sequence[str], prompt_tokens: int, num_requests: int, disk: Path | None, rng: np.random.Generator
) -> _SetResult:
    """Start engines in random order, fill their pools and stores, and send them prompts."""
    with tempfile.TemporaryDirectory(dir=disk) as folder, contextlib.ExitStack() as stack:
        engines = _start_engines(stack, Path(folder), prompt_tokens, rng.permutation(names).tolist())
        vocab_size = engines[_WITHOUT].limits.vocab_size
        times: dict[str, list[PromptTimes]] = {name: [] for name in names}
        num_different = 0
        for number in range(-_POOL_PROMPTS - _STORED_PROMPTS, num_requests):
            prompt = rng.integers(0, vocab_size, prompt_tokens).astype("<u4").tobytes()
            answers = {name: _ask(engines[name], prompt) for name in rng.permutation(names).tolist()}
            num_different += len({token_id for token_id, _ in answers.values()}) > 1
            if number >= 0:
                for name, (_, prompt_times) in answers.items():
                    times[name].append(prompt_times)
        return _SetResult(times, {name: _saved_blocks(engine) for name, engine in engines.items()}, num_different)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.modes.misses", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--stores", choices=_STORES, action="append", help="may be repeated; default: all")
    parser.add_argument(
        "--sets", type=int, default=8, metavar="N", help="number of times that the engines are started; default 8"
    )
    parser.add_argument("--requests", type=int, default=40, metavar="N", help="measured prompts per set; default 40")
    parser.add_argument("--prompt-tokens", type=int, default=512, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--disk", type=Path, metavar="DIRECTORY", help="on the disk to measure; default the system's")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def _start_engines(
    stack: contextlib.ExitStack, folder: Path, prompt_tokens: int, names: Sequence[str]
) -> dict[str, Engine]:
    """Start engines, in this order."""
    pool = ["model.device=cpu", f"cache.capacity_tokens={_POOL_PROMPTS * prompt_tokens}"]
    num_blocks = _STORED_PROMPTS * prompt_tokens // Config.load(None, pool).cache.block_size
    num_bytes = num_blocks * _block_bytes(*pool)
    engines = {}
    for name in names:
        host = [f"tiers.host_bytes={num_bytes}"] if "host" in name else []
        disk = [f"tiers.disk_path={folder / name}", f"tiers.disk_bytes={num_bytes}"] if "disk" in name else []
        engines[name] = stack.enter_context(running_engine([*pool, *host, *disk]))
    return engines


@functools.cache
def _block_bytes(*settings: str) -> int:
    with running_engine(settings) as engine:
        return engine.stats().result(_TIMEOUT_S).block_bytes


def _ask(engine: Engine, prompt: bytes) -> tuple[int, PromptTimes]:
    """Return the next token and the times, after the stores have become idle."""
    start_s, processor_s = time.perf_counter(), time.process_time()
    answer = engine.prefill(PrefillParams(prompt)).result(_TIMEOUT_S)
    wall_s = time.perf_counter() - start_s
    engine.purge(tenant="unknown").result(_TIMEOUT_S)  # completes after all earlier operations of the stores
    times = PromptTimes(wall_s, time.process_time() - processor_s)
    if answer.usage.cached_tokens > _MAX_CACHED_TOKENS:
        raise RuntimeError(
            f"engine: expected a prompt that is not cached, got {answer.usage.cached_tokens} cached tokens"
        )
    return answer.next_token_id, times


def _saved_blocks(engine: Engine) -> dict[str, int]:
    return {} if engine.offload is None else {each.tier: each.saved_blocks for each in engine.offload.stats()}


def _row(name: str, sets: Sequence[_SetResult]) -> dict[str, Any]:
    ratios = np.array([middle_ratios(name, each.times, (_WITHOUT, _AGAIN)) for each in sets])  # [num_sets, 2]
    saved = Counter[str]()
    for each in sets:
        saved.update(each.saved_blocks[name])
    return {
        "stores": name,
        "saved_blocks": dict(saved),
        "ttft_ms": 1e3 * float(np.median([times.wall_s for each in sets for times in each.times[name]])),
        "ttft_ratio": _summary(ratios[:, 0]),
        "processor_ratio": _summary(ratios[:, 1]),
    }


def _summary(set_ratios: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Return the mean of the sets, its standard error if there are several, and whether it is surely within the bound.

    The mean is surely within the bound if the mean plus two standard errors is. With a single set, it is never sure.
    """
    mean = float(set_ratios.mean())
    error = float(set_ratios.std(ddof=1)) / set_ratios.size**0.5 if set_ratios.size > 1 else None
    is_surely_within = error is not None and mean + 2 * error <= _MAX_RATIO
    return {"mean": mean, "standard_error": error, "is_surely_within": is_surely_within, "sets": set_ratios.tolist()}


def _format_row(row: dict[str, Any]) -> str:
    shown = f"{row['stores']:16} {row['ttft_ms']:8.1f} ms"
    for key, width in (("ttft_ratio", 12), ("processor_ratio", 15)):
        ratio = row[key]
        shown += f" {ratio['mean']:{width}.4f} {ratio['standard_error'] or float('nan'):11.4f}"
    return shown


if __name__ == "__main__":
    sys.exit(main())
