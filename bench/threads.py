"""Measures latency by number of threads, on a quiet machine and on a busy one.

    python -m bench.threads --threads 1 2 --against ../other-checkout --json FILE

One server runs for each model, number of threads and checkout. They answer the same prompts in turn. Each round is
measured on a quiet machine, and then next to processes that keep the CPU busy, so a change of the machine's speed
affects all servers and both conditions about equally. Rows: a prompt that is not cached, 64 new tokens after a cached
prefix, and one decoded token.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.parts.result_file import write_result
from bench.parts.server_process import ServerProcess, serve_command
from radixkv.errors import ConfigError
from radixkv.service.cli.argument_types import positive
from radixkv.service.client import Client

PREFIX_TOKENS = 512
SUFFIX_TOKENS = 64
ROWS = ("cold", "warm", "decode")
CONDITIONS = ("quiet", "busy")
# Token ids of prompts are less than these limits, which the vocabularies of the models exceed.
_TINY_ID_LIMIT = 250
_SMALL_ID_LIMIT = 49_000
_PAUSE_S = 0.05  # between two calls, so that idle threads have stopped spinning
_START_TIMEOUT_S = 600.0
_CALL_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class ThreadSetting:
    """A server that is measured.

    Attributes:
        model: `tiny`, or `small`: the shape of SmolLM2-135M with random weights in bfloat16.
        threads: number of compute threads.
        checkout: another checkout of radixkv; None for this one.
    """

    model: str
    threads: int
    checkout: Path | None

    @property
    def label(self) -> str:
        """Name in the table."""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{threads}, other" if self.checkout else threads


def save_small_model(folder: Path) -> None:
    """Save a Llama model of the shape of SmolLM2-135M, with random weights in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        initializer_range=0.05,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def measure(client: Client, id_limit: int, seed: str, new_tokens: int) -> dict[str, float]:
    """Measure each row once.

    Args:
        client: client of the server.
        id_limit: the token ids of prompts are less than this.
        seed: equal seeds make equal prompts.
        new_tokens: tokens that are decoded, at least 2.

    Returns:
        Milliseconds: per prompt for `cold` and `warm`, per token for `decode`.
    """
    rng = random.Random(seed)

    def draw_ids(count: int) -> list[int]:
        return [rng.randrange(id_limit) for _ in range(count)]

    def prefill_ms(prompt: list[int]) -> float:
        time.sleep(_PAUSE_S)
        start_s = time.perf_counter()
        client.prefill(prompt)
        return (time.perf_counter() - start_s) * 1e3

    prefix = draw_ids(PREFIX_TOKENS)
    cold_ms = prefill_ms(prefix + draw_ids(SUFFIX_TOKENS))
    warm_ms = statistics.median(prefill_ms(prefix + draw_ids(SUFFIX_TOKENS)) for _ in range(3))
    time.sleep(_PAUSE_S)
    arrivals_s: list[float] = []
    for update in client.generate(prefix + draw_ids(4), max_new_tokens=new_tokens, ignore_eos=True):
        arrivals_s += [time.perf_counter()] * len(update.token_ids)
    decode_ms = (arrivals_s[-1] - arrivals_s[0]) / (len(arrivals_s) - 1) * 1e3
    return {"cold": cold_ms, "warm": warm_ms, "decode": decode_ms}


@contextlib.contextmanager
def busy_processes(num_processes: int) -> Iterator[None]:
    """Run other processes that keep the CPU busy while the context lasts. Each has its own session."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(settings: Sequence[ThreadSetting], rounds: int, num_busy: int, new_tokens: int) -> list[dict[str, Any]]:
    """Measure all settings in turn. Returns the median times of each setting, condition and row of the table."""
    samples_ms: dict[tuple[ThreadSetting, str, str], list[float]] = {}  # by setting, condition and row
    with contextlib.ExitStack() as stack:
        small_model = stack.enter_context(tempfile.TemporaryDirectory())
        if any(setting.model == "small" for setting in settings):
            save_small_model(Path(small_model))
        clients: dict[ThreadSetting, Client] = {}
        for setting in settings:
            server_settings = ("model.dtype=bfloat16", "cache.capacity_tokens=65536")
            command = serve_command(small_model if setting.model == "small" else "tiny", "cpu", server_settings)
            if setting.checkout is None:
                command += ["--threads", str(setting.threads)]
            else:  # another checkout may not have the option
                command = ["env", f"OMP_NUM_THREADS={setting.threads}", *command]
            process = ServerProcess(command, start_timeout_s=_START_TIMEOUT_S, checkout=setting.checkout)
            address = stack.enter_context(process)
            clients[setting] = stack.enter_context(Client(address, timeout_s=_CALL_TIMEOUT_S))
        for round_number in range(-1, rounds):  # the first one warms up
            for condition in CONDITIONS:
                with busy_processes(num_busy if condition == "busy" else 0):
                    for setting, client in clients.items():
                        id_limit = _TINY_ID_LIMIT if setting.model == "tiny" else _SMALL_ID_LIMIT
                        measured = measure(client, id_limit, f"{round_number} {condition} {setting.model}", new_tokens)
                        if round_number < 0:
                            continue
                        for row, milliseconds in measured.items():
                            samples_ms.setdefault((setting, condition, row), []).append(milliseconds)
    return [
        {
            "model": setting.model,
            "threads": setting.threads,
            "checkout": None if setting.checkout is None else "other",
            "condition": condition,
            "row": row,
            "ms": statistics.median(each),
            "min_ms": min(each),
            "max_ms": max(each),
        }
        for (setting, condition, row), each in samples_ms.items()
    ]


def table(rows: Sequence[dict[str, Any]], settings: Sequence[ThreadSetting]) -> str:
    """Format rows as a table: a column per number of threads and checkout, and the ratio of busy to quiet."""
    columns = list(dict.fromkeys(setting.label for setting in settings))
    ms_by_cell: dict[tuple[str, str, str, str], float] = {}
    for row in rows:
        column = ThreadSetting("", row["threads"], row["checkout"]).label
        ms_by_cell[row["model"], row["row"], row["condition"], column] = row["ms"]
    lines = ["model  row     condition" + "".join(f"{column:>18}" for column in columns)]
    for model, row_name in itertools.product(dict.fromkeys(setting.model for setting in settings), ROWS):
        for condition in CONDITIONS:
            times = [ms_by_cell[model, row_name, condition, column] for column in columns]
            lines.append(f"{model:6} {row_name:7} {condition:9}" + "".join(f"{each:15.1f} ms" for each in times))
        ratios = [
            ms_by_cell[model, row_name, "busy", column] / ms_by_cell[model, row_name, "quiet", column]
            for column in columns
        ]
        lines.append(f"{'':15}busy/quiet" + "".join(f"{each:17.2f}x" for each in ratios))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write JSON. Returns 2 if a server cannot be started."""
    parser = argparse.ArgumentParser(description="Measure what threads cost on a quiet and on a busy machine.")
    parser.add_argument("--models", nargs="+", choices=("small", "tiny"), default=["small", "tiny"])
    parser.add_argument("--threads", type=positive, nargs="+", default=[1, 2], help="numbers of threads to compare")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout of radixkv, to run in turn")
    parser.add_argument("--busy", type=positive, default=2, help="processes that use the CPU in the busy condition")
    parser.add_argument("--rounds", type=positive, default=5, help="measurements per row, after one that warms up")
    parser.add_argument("--new-tokens", type=positive, default=48, help="tokens to decode, at least 2 (default: 48)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.new_tokens < 2:
        parser.error(f"--new-tokens: expected at least 2, got {options.new_tokens}")
    checkouts = [None] if options.against is None else [options.against.resolve(), None]
    settings = [ThreadSetting(*each) for each in itertools.product(options.models, options.threads, checkouts)]
    try:
        rows = run(settings, options.rounds, options.busy, options.new_tokens)
    except ConfigError as error:
        print(f"bench.threads: {error}", file=sys.stderr)
        return 2
    print(table(rows, settings))
    write_result(options.json, "bench.threads", arguments, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
