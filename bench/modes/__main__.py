"""Compares several ways to reuse K and V on the same traffic, and shows when more caching is not faster.

python -m bench.modes [--redis URL] [--mooncake HOST:PORT] [--json FILE] [--plot FILE.png]

    no cache                  every new token recomputes the whole sequence
    K/V within a request      a prompt is computed once, then one row per token; nothing is kept between requests
    prefix cache              a prefix that prompts share is computed once, as long as it stays on the device
    and a store below it      evicted blocks are kept in host memory, on disk, in Redis or in Mooncake

Engines with the embedded model run in one process, without gRPC. Each prompt is computed in all modes before the next
one, and the answers must be equal. A median over all requests mixes hits and misses, so the table also has the
quartiles, and the median and quartiles of the last round.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.modes.mode import Mode, ModeAnswer, all_modes, memory_bytes
from bench.modes.picture import draw_modes
from bench.modes.traffic import TRAFFICS, ModeTraffic, traffics
from bench.parts.result_file import write_result
from radixkv.service.cli.argument_types import positive

_HEADER = (
    f"{'':26} {'TTFT p50':>11} {'quartiles':>15} {'last round':>11} {'quartiles':>15} {'request':>11} {'hit rate':>9} "
    f"{'K/V memory':>11}"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all modes. Returns 1 if answers differ."""
    parser = argparse.ArgumentParser(description="Compare ways to reuse K and V.")
    parser.add_argument("--documents", type=positive, default=12)
    parser.add_argument("--rounds", type=positive, default=3, help="questions about each document")
    parser.add_argument("--document-tokens", type=positive, default=2048)
    parser.add_argument("--question-tokens", type=positive, default=64)
    parser.add_argument("--new-tokens", type=positive, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traffic", choices=TRAFFICS, action="append", help="may be repeated; default: all")
    parser.add_argument("--redis", metavar="URL", help="a running server")
    parser.add_argument("--mooncake", metavar="HOST:PORT", help="a running master")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    min_documents = 1
    while not all(each.pool_holds_request for each in _selected_traffics(options, min_documents)):
        min_documents += 1
    if options.documents < min_documents:
        parser.error(
            f"--documents: expected at least {min_documents}, so that each pool can hold a request, "
            f"got {options.documents}"
        )
    rows = [
        row
        for traffic in _selected_traffics(options, options.documents)
        for row in _measure(traffic, options.device, options.seed, options.redis, options.mooncake)
    ]
    write_result(options.json, "bench.modes", arguments, {"rows": rows})
    if options.plot is not None:
        draw_modes(options.plot, rows)
    return int(any(row["different_answers"] for row in rows))


def _selected_traffics(options: argparse.Namespace, documents: int) -> list[ModeTraffic]:
    lengths = (options.document_tokens, options.question_tokens, options.new_tokens)
    all_traffics = traffics(documents, options.rounds, *lengths)
    return [each for each in all_traffics if each.name in (options.traffic or TRAFFICS)]


def _measure(
    traffic: ModeTraffic, device: str, seed: int, redis_url: str | None, mooncake_master: str | None
) -> list[dict[str, Any]]:
    """Run the traffic in all modes, and print and return a row for each."""
    print(
        f"{traffic.name}: {traffic.documents} documents of {traffic.document_tokens:,} tokens, "
        f"{traffic.rounds} questions each, a pool of {traffic.pool_tokens:,} tokens\n{_HEADER}"
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        modes = all_modes(Path(folder), redis_url, mooncake_master)
        engines = [(mode, stack.enter_context(mode.running(traffic, device))) for mode in modes]
        vocab_size = engines[0][1].limits.vocab_size
        answers: list[list[ModeAnswer]] = [
            [mode.ask(engine, prompt, traffic.new_tokens) for mode, engine in engines]
            for prompt in traffic.prompts(vocab_size, seed)
        ]
        rows = []
        for index, (mode, engine) in enumerate(engines):
            mode_answers = [each[index] for each in answers]
            reference_answers = [each[0] for each in answers]
            rows.append(_row(traffic, mode, mode_answers, reference_answers, memory_bytes(engine)))
            print(_format_row(rows[-1]), flush=True)
    return rows


def _row(
    traffic: ModeTraffic,
    mode: Mode,
    answers: Sequence[ModeAnswer],
    reference_answers: Sequence[ModeAnswer],
    num_bytes: int,
) -> dict[str, Any]:
    num_tokens = len(answers) * (traffic.document_tokens + traffic.question_tokens)
    later = answers[-traffic.documents :]
    return {
        "traffic": traffic.name,
        "mode": mode.name,
        "requests": len(answers),
        "ttft_ms": 1e3 * statistics.median(each.ttft_s for each in answers),
        "ttft_quartiles_ms": _quartiles_ms(answers),
        "request_ms": 1e3 * statistics.median(each.total_s for each in answers),
        "hit_rate": sum(each.cached_tokens for each in answers) / num_tokens,
        "memory_mb": num_bytes / 1e6,
        "later_ttft_ms": 1e3 * statistics.median(each.ttft_s for each in later),
        "later_ttft_quartiles_ms": _quartiles_ms(later),
        "different_answers": sum(
            ours.token_ids != theirs.token_ids for ours, theirs in zip(answers, reference_answers, strict=True)
        ),
    }


def _quartiles_ms(answers: Sequence[ModeAnswer]) -> list[float]:
    """Return the first and third quartile of the times to first token."""
    quartiles: list[float] = np.percentile([1e3 * each.ttft_s for each in answers], (25, 75)).tolist()
    return quartiles


def _format_row(row: dict[str, Any]) -> str:
    quartiles_ms = (row["ttft_quartiles_ms"], row["later_ttft_quartiles_ms"])
    of_all, of_last = (f"{low:.1f} to {high:.1f}" for low, high in quartiles_ms)
    wrong = f"   {row['different_answers']} answers differ" if row["different_answers"] else ""
    return (
        f"{row['mode']:26} {row['ttft_ms']:8.1f} ms {of_all:>15} {row['later_ttft_ms']:8.1f} ms {of_last:>15} "
        f"{row['request_ms']:8.1f} ms {row['hit_rate']:9.1%} {row['memory_mb']:8.1f} MB{wrong}"
    )


if __name__ == "__main__":
    sys.exit(main())
