"""Measures what stores below the device cost a prompt that is nowhere.

    python -m bench.modes.misses [--json FILE]

Each prompt is new, and goes through engines in random order: two without a store, one with host memory, one with a
disk, one with both. Pools and stores are full before the first prompt counts, so that for each one blocks leave the
device, are copied and stored, and others are given up. The next engine is asked when the stores of the last one are at
rest; processor time counts until then.

Each time is divided by the geometric mean of the two without a store for the same prompt, and the middle half of these
ratios is averaged, with its standard error. Of the two without a store, the second is divided by the first: what that
differs from 1 is what this machine can not tell. Exit status: 1 if answers differ.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.parts.environment import describe_run
from bench.parts.result_file import write_json
from radixkv.api.params import PrefillParams
from radixkv.config import Config
from radixkv.engine.engine import Engine
from radixkv.startup.build_engine import build_engine

_WITHOUT, _AGAIN = "no store", "no store again"
_STORES = ("host", "disk", "host and disk")
_POOL_PROMPTS = 4
_STORED_PROMPTS = 8  # that a store has room for; what a block's head takes is more than is left of the last one
_ALIKE_TOKENS = 4  # by chance, at the start of two prompts
_TIMEOUT_S = 600.0
_MAX_RATIO = 1.02  # what a miss may cost
_TRIMMED = 0.25  # of the ratios, at each end: other programs make a few of them much larger
_HEADER = f"{'':16} {'TTFT p50':>11} {'of no store':>12} {'std. error':>11} {'processor time':>15} {'std. error':>11}"


class _Times(NamedTuple):
    """Seconds of one prompt: until its first token, and of processors, all threads, until stores are at rest."""

    wall_s: float
    processor_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all engines. Returns 1 if answers differ."""
    args = _parser().parse_args(arguments)
    draw = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory(dir=args.disk) as folder, contextlib.ExitStack() as stack:
        engines = _engines(stack, Path(folder), args.prompt_tokens, args.stores or _STORES)
        vocab_size = engines[_WITHOUT].limits.vocab_size
        times: dict[str, list[_Times]] = {name: [] for name in engines}
        num_different = 0
        for number in range(-_POOL_PROMPTS - _STORED_PROMPTS, args.requests):
            prompt = draw.integers(0, vocab_size, args.prompt_tokens).astype("<u4").tobytes()
            asked = {name: _ask(engines[name], prompt) for name in draw.permutation(list(engines)).tolist()}
            num_different += len({token_id for token_id, _ in asked.values()}) > 1
            if number >= 0:
                for name, (_, seconds) in asked.items():
                    times[name].append(seconds)
        stored = {name: _num_saved(engine) for name, engine in engines.items()}
    rows = [_row(name, times, stored[name]) for name in times]
    print("\n".join([_HEADER, *map(_shown, rows), f"{num_different} answers differ"]))
    if args.json is not None:
        command = shlex.join(["python", "-m", "bench.modes.misses", *(arguments or sys.argv[1:])])
        sizes = {name: getattr(args, name) for name in ("requests", "prompt_tokens", "seed")}
        result = {**describe_run(), "command": command, **sizes, "different_answers": num_different, "rows": rows}
        write_json(args.json, result)
    return int(num_different > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.modes.misses", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--stores", choices=_STORES, action="append", help="may be repeated; default: all")
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="prompts that count; default 200")
    parser.add_argument("--prompt-tokens", type=int, default=512, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--disk", type=Path, metavar="DIRECTORY", help="on the disk to measure; default the system's")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def _engines(stack: contextlib.ExitStack, folder: Path, prompt_tokens: int, stores: Sequence[str]) -> dict[str, Engine]:
    """Start two engines without a store, and one with each kind of them."""
    pool = ["model.device=cpu", f"cache.capacity_tokens={_POOL_PROMPTS * prompt_tokens}"]
    first = stack.enter_context(_started(pool))
    num_blocks = _STORED_PROMPTS * prompt_tokens // Config.load(None, pool).cache.block_size
    num_bytes = num_blocks * first.stats().result(_TIMEOUT_S).block_bytes
    settings: dict[str, list[str]] = {_AGAIN: pool}
    for name in stores:
        host = [f"tiers.host_bytes={num_bytes}"] if "host" in name else []
        disk = [f"tiers.disk_path={folder / name}", f"tiers.disk_bytes={num_bytes}"] if "disk" in name else []
        settings[name] = [*pool, *host, *disk]
    return {_WITHOUT: first} | {name: stack.enter_context(_started(each)) for name, each in settings.items()}


@contextlib.contextmanager
def _started(settings: Sequence[str]) -> Iterator[Engine]:
    engine = build_engine(Config.load(None, list(settings)))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def _ask(engine: Engine, prompt: bytes) -> tuple[int, _Times]:
    """Return the next token, and the times, when the stores are at rest."""
    start_s, processor_s = time.perf_counter(), time.process_time()
    answer = engine.prefill(PrefillParams(prompt)).result(_TIMEOUT_S)
    wall_s = time.perf_counter() - start_s
    engine.purge(tenant="nobody").result(_TIMEOUT_S)  # after all that was given to the stores before
    seconds = _Times(wall_s, time.process_time() - processor_s)
    if answer.usage.cached_tokens > _ALIKE_TOKENS:
        raise RuntimeError(f"engine: expected a prompt that is nowhere, got {answer.usage.cached_tokens} cached tokens")
    return answer.next_token_id, seconds


def _num_saved(engine: Engine) -> dict[str, int]:
    return {} if engine.offload is None else {each.tier: each.saved_blocks for each in engine.offload.stats()}


def _row(name: str, times: Mapping[str, Sequence[_Times]], saved_blocks: dict[str, int]) -> dict[str, Any]:
    first, again = np.array(times[_WITHOUT]), np.array(times[_AGAIN])  # [num_requests, 2]
    ours = np.array(times[name])
    without = first if name in (_WITHOUT, _AGAIN) else np.sqrt(first * again)
    wall, processor = (_ratio(each) for each in (ours / without).T)
    return {
        "stores": name,
        "saved_blocks": saved_blocks,
        "ttft_ms": 1e3 * float(np.median(ours[:, 0])),
        "ttft_ratio": wall,
        "processor_ratio": processor,
    }


def _ratio(ratios: npt.NDArray[np.float64]) -> dict[str, float | bool]:
    """Return the mean of the middle half, its standard error, and whether it is within the bound, surely or not.

    The standard error of a trimmed mean is that of the values with those beyond the cuts moved to them.
    Source: Tukey and McLaughlin 1963.
    """
    values = np.sort(ratios)
    num_cut = int(_TRIMMED * values.size)
    kept = values[num_cut : values.size - num_cut]
    moved = np.clip(values, kept[0], kept[-1])
    error = float(moved.std(ddof=1)) / ((1 - 2 * num_cut / values.size) * values.size**0.5) if values.size > 1 else 0.0
    mean = float(kept.mean())
    return {"mean": mean, "standard_error": error, "is_surely_within": mean + 2 * error <= _MAX_RATIO}


def _shown(row: dict[str, Any]) -> str:
    shown = f"{row['stores']:16} {row['ttft_ms']:8.1f} ms"
    for key, width in (("ttft_ratio", 12), ("processor_ratio", 15)):
        ratio = row[key]
        shown += f" {ratio['mean']:{width}.4f} {ratio['standard_error']:11.4f}"
    return shown


if __name__ == "__main__":
    sys.exit(main())
