"""Replays requests with a shared prefix against server F (fast mode) and server E (exact mode), with `bench.replay`.

python -m bench.gpu.product.replay --json build/replay.json
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import replay
from bench.gpu.product.product_server import running_server
from bench.gpu.product.run_state import read_state
from bench.gpu.product.stage_report import open_report

_GOAL_SPEEDUP = 8  # median TTFT without the cache, divided by that with the cache


@dataclass(frozen=True, slots=True)
class ReplaySizes:
    """Sizes of the traffic; see `python -m bench.replay --help`."""

    prefix_tokens: int
    suffix_tokens: int
    requests: int
    baseline_requests: int
    concurrencies: tuple[int, ...]


_SIZES = ReplaySizes(prefix_tokens=2048, suffix_tokens=64, requests=200, baseline_requests=20, concurrencies=(1, 4, 16))
_DRY_SIZES = ReplaySizes(prefix_tokens=256, suffix_tokens=16, requests=24, baseline_requests=16, concurrencies=(1, 4))


def main() -> int:
    """Replay on each server. Returns 1 if a request failed, or if the cache changed an answer of the exact server."""
    report = open_report("Replay requests with a shared prefix against both servers.")
    sizes = _DRY_SIZES if report.is_dry_run else _SIZES
    vocab_size = read_state().get("vocab_size", 256)
    summary = []
    for name, concurrency in itertools.product(("F", "E"), sizes.concurrencies):
        with report.row(f"{name}, {concurrency} at a time") as row:
            result = _replay(running_server(name).address, vocab_size, sizes, concurrency)
            judge_replay(row, result, is_exact=name == "E")
            if concurrency == 1:
                row["is_goal_met"] = report.goal((row["speedup"] or 0) >= _GOAL_SPEEDUP)
                summary.append(f"{name} TTFT {row['ttft_p50_ms']:.1f} ms, {row['speedup'] or 0:.1f} times less")
    return report.finish("; ".join(summary))


def _replay(address: str, vocab_size: int, sizes: ReplaySizes, concurrency: int) -> dict[str, Any]:
    file = Path("replay_result.json").absolute()
    file.unlink(missing_ok=True)
    # Without the cache, only one request at a time is replayed: with more, the times would be those of the queue.
    baseline = ["--baseline-requests", str(sizes.baseline_requests)] if concurrency == 1 else ["--no-baseline"]
    with contextlib.redirect_stdout(io.StringIO()):
        replay.main(
            [
                *("--workload", "shared-prefix", "--address", address, "--json", str(file)),
                *("--requests", str(sizes.requests), "--concurrency", str(concurrency)),
                *("--prefix-tokens", str(sizes.prefix_tokens), "--suffix-tokens", str(sizes.suffix_tokens)),
                *("--vocab-size", str(vocab_size), *baseline),
            ]
        )
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result


def judge_replay(row: dict[str, Any], result: dict[str, Any], *, is_exact: bool) -> None:
    """Fill a row from the result of `bench.replay`.

    In fast mode an answer may differ in its last bits, and with random weights also in its token, so differences are
    only counted.
    """
    errors = result["errors"]
    if result["without_cache"]:
        errors += result["without_cache"]["errors"]
    different = result["answers"]["different"]
    row |= {
        "requests": result["requests"],
        "errors": errors,
        "different": different,
        "ttft_p50_ms": result["ttft_ms"]["p50"],
        "requests_per_s": result["requests"] / result["wall_s"],
        "token_hit_rate": result["token_hit_rate"],
        "speedup": (result["speedup"] or {}).get("ttft_p50"),
        "is_right": not errors and not (is_exact and different),
    }
    row["text"] = f"TTFT p50 {row['ttft_p50_ms']:.1f} ms, {row['requests_per_s']:.1f} requests/s, {errors} errors"
    if row["speedup"] is not None:
        row["text"] += f", {row['speedup']:.1f} times less than without the cache, {different} answers different"


if __name__ == "__main__":
    sys.exit(main())
