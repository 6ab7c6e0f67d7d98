"""Compares radixkv and llama.cpp on the same GGUF files: time per decoded token and per prefill token, and memory.

python -m bench.gguf --json bench/results/gguf.json

By default, the files are SmolLM2 135M Instruct in Q4_1, and a copy of it that is requantized to Q8_0. Both engines run
as servers with a K/V cache of `--context-tokens` tokens, are loaded at the same time, and answer the same prompts in
turn, in an order that alternates. Times are medians that a client measures, and `cpu_ms` is the CPU time of all
processes of an engine and its client. Memory is the resident memory of the server after the prompts, with the mapped
pages of the file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.parts.peers.environments import RECIPES, Environments, NotInstalled
from bench.parts.peers.rows import PeerRow, PeerSample
from bench.parts.peers.worker_process import WorkerProcess
from bench.parts.result_file import write_result
from bench.parts.small_model import NotFetched, small_model_file

_OURS, _PEER = "radixkv", "llama.cpp"
_WORKERS = {_OURS: ("radixkv_worker", "exact", None), _PEER: ("llamacpp_worker", "", "llama.cpp")}

Result = dict[str, Any]


def build_rows(prompt_tokens: int, new_tokens: int) -> dict[str, PeerRow]:
    """Return the rows to measure: the prefill of a prompt that is not cached, and decoding after a short prompt."""
    one_prompt = partial(PeerRow, model="llama", shared_tokens=0, num_prompts=1, at_once=1)
    short_prompt_tokens = min(prompt_tokens, 128)
    return {
        "prefill": one_prompt(title="prefill", unit="request", own_tokens=prompt_tokens, new_tokens=1),
        "decode": one_prompt(title="decode", unit="token", own_tokens=short_prompt_tokens, new_tokens=new_tokens + 1),
    }


def measure(workers: dict[str, WorkerProcess], rows: dict[str, PeerRow], repetitions: int) -> list[Result]:
    """Measure all rows, and then the memory.

    Returns:
        For each row, milliseconds per token by engine and the ratio of radixkv to llama.cpp; then the memory in MB.
    """
    results: list[Result] = []
    for row_name, row in rows.items():
        samples: dict[str, list[PeerSample]] = {engine: [] for engine in workers}
        for number in range(-1, repetitions):  # the first one warms up
            for engine in list(workers) if number % 2 else list(workers)[::-1]:
                sample = row.measure(workers[engine].run, f"{row_name} {number}")
                if number >= 0:
                    samples[engine].append(sample)
        tokens_per_sample = row.own_tokens if row.unit == "request" else 1
        ms_factor = 1e3 / tokens_per_sample  # from seconds per sample to milliseconds per token
        wall_ms = {
            engine: ms_factor * statistics.median(sample.wall_s for sample in of_engine)
            for engine, of_engine in samples.items()
        }
        cpu_ms = {
            engine: ms_factor * statistics.median(sample.cpu_s for sample in of_engine)
            for engine, of_engine in samples.items()
        }
        num_same = 0
        if _PEER in samples:
            for ours, theirs in zip(samples[_OURS], samples[_PEER], strict=True):
                num_same += ours.first_tokens == theirs.first_tokens
        times = {"ms": wall_ms, "cpu_ms": cpu_ms, "ratio": _ratio(wall_ms)}
        results.append({"row": row_name, **times, "same_first_tokens": num_same})
    memory_mb = {engine: worker.resident_bytes / 1e6 for engine, worker in workers.items()}
    results.append({"row": "memory", "mb": memory_mb, "ratio": _ratio(memory_mb)})
    return results


def _ratio(by_engine: dict[str, float]) -> float | None:
    """Return the ratio of radixkv to llama.cpp; None if llama.cpp was not measured."""
    return by_engine[_OURS] / by_engine[_PEER] if _PEER in by_engine else None


def _build_worker(
    engine: str, file: Path, threads: int, context_tokens: int, environments: Environments, cache: Path
) -> WorkerProcess:
    module, mode, environment = _WORKERS[engine]
    command = [str(environments.python(environment)), "-m", f"bench.parts.peers.workers.{module}"]
    command += ["--model", str(file), "--dtype", "auto", "--threads", str(threads), "--mode", mode]
    command += ["--cache", str(cache.absolute()), "--context-tokens", str(context_tokens)]
    return WorkerProcess(engine, command, environments.variables())


def _prepare_files(options: argparse.Namespace, environments: Environments) -> list[Path]:
    """Return the files to measure. Downloads and requantizes SmolLM2 if no models are given and it is not cached."""
    if options.models:
        return [file.absolute() for file in options.models]
    small_file = small_model_file()
    folder = options.cache.absolute() / "models"
    folder.mkdir(parents=True, exist_ok=True)
    requantized_file = folder / small_file.name.replace("Q4_1", "Q8_0")
    if not requantized_file.is_file():
        unfinished_file = folder / "partial.gguf"
        command = ["-m", "bench.parts.peers.gguf_requantized", small_file, unfinished_file]
        environments.run(None, command, requantized_file.name)
        unfinished_file.replace(requantized_file)
    return [small_file, requantized_file]


def _line(row: Result) -> str:
    unit = "MB" if row["row"] == "memory" else "ms"
    values = row[unit.lower()]
    shown_values = "  ".join(f"{engine} {value:.2f} {unit}" for engine, value in values.items())
    shown_ratio = "" if row["ratio"] is None else f"  ratio {row['ratio']:.2f}"
    threads = f"{row['threads']} thread{'s' if row['threads'] > 1 else ''}"
    return f"{row['model']}, {threads}, {row['row']}: {shown_values}{shown_ratio}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a line for each row, and write the result. Returns 1 if an engine or a file is missing, else 0."""
    options = _parser().parse_args(arguments)
    environments = Environments(options.cache, RECIPES)
    rows: list[Result] = []
    versions: dict[str, dict[str, str]] = {}
    skipped: dict[str, str] = {}
    try:
        files = _prepare_files(options, environments)
    except (NotFetched, NotInstalled) as error:
        print(f"bench.gguf: {error}", file=sys.stderr)
        return 1
    for file in files:
        for threads in options.threads:
            workers: dict[str, WorkerProcess] = {}
            with ExitStack() as stack:
                for engine in _WORKERS:
                    try:
                        process = _build_worker(
                            engine, file, threads, options.context_tokens, environments, options.cache
                        )
                    except NotInstalled as error:
                        skipped[engine] = str(error)
                        continue
                    worker = workers[engine] = stack.enter_context(process)
                    versions[engine] = worker.wait_until_ready().versions
                planned = build_rows(options.prompt_tokens, options.new_tokens)
                for row in measure(workers, planned, options.repetitions):
                    rows.append({"model": file.name, "threads": threads, **row})
                    print(_line(rows[-1]), flush=True)
            result = {
                "rows": rows,
                "engines": versions,
                "skipped": skipped,
                "prompt_tokens": options.prompt_tokens,
                "new_tokens": options.new_tokens,
                "context_tokens": options.context_tokens,
                "repetitions": options.repetitions,
            }
            write_result(options.json, "bench.gguf", arguments, result)
    for engine, reason in skipped.items():
        print(f"skipped {engine}: {reason}", file=sys.stderr)
    return 1 if skipped else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare radixkv and llama.cpp on GGUF files.", allow_abbrev=False)
    parser.add_argument("--models", nargs="+", type=Path, metavar="FILE.gguf", help="instead of SmolLM2 135M")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--context-tokens", type=int, default=4096)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--cache", type=Path, default=Path("build/peers"), help="environments and files; kept between runs"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
