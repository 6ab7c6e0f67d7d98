"""Summarizes a replay as numbers and as a table for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.parts.load_generator import OK, Outcome, Pass

Summary = dict[str, Any]


def summarize(replayed: Pass) -> Summary:
    """Reduce a pass to its numbers.

    Tokens, times and rates count answered requests only. A number without any answered request is None.
    """
    answered = [outcome for outcome in replayed.outcomes if outcome.status == OK]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in answered)
    cached_tokens = sum(outcome.cached_tokens for outcome in answered)
    failures = Counter(outcome.status for outcome in replayed.outcomes if outcome.status != OK)
    return {
        "requests": len(replayed.outcomes),
        "errors": failures.total(),
        "errors_by_status": dict(sorted(failures.items())),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "computed_tokens": sum(outcome.computed_tokens for outcome in answered),
        "token_hit_rate": cached_tokens / prompt_tokens if prompt_tokens else None,
        "ttft_ms": ttft_ms(answered),
        "server_queue_ms": distribution([outcome.queue_us / 1e3 for outcome in answered]),
        "server_prefill_ms": distribution([outcome.prefill_us / 1e3 for outcome in answered]),
        "prompt_tokens_per_s": prompt_tokens / replayed.wall_s,
        "wall_s": replayed.wall_s,
        "send_late_ms": distribution([outcome.late_s * 1e3 for outcome in replayed.outcomes]),
        "generator_cpu_ms_per_request": replayed.cpu_s * 1e3 / len(replayed.outcomes),
    }


def ttft_ms(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    """Return the distribution of the time to first token of answered requests."""
    return distribution([outcome.ttft_s * 1e3 for outcome in outcomes if outcome.status == OK])


def distribution(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean and percentiles, interpolated between the two nearest values; each is None without values."""
    if not values:
        return {"mean": None, "p50": None, "p90": None, "p99": None}
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return {"mean": float(np.mean(values)), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def speedup(with_cache: Summary, without_cache: Summary) -> dict[str, float | None]:
    """Return the ratios by which the pass with the cache is better."""
    return {
        "ttft_p50": _ratio(without_cache["ttft_ms"]["p50"], with_cache["ttft_ms"]["p50"]),
        "prompt_tokens_per_s": _ratio(with_cache["prompt_tokens_per_s"], without_cache["prompt_tokens_per_s"]),
    }


def compare_answers(with_cache: Sequence[Outcome], without_cache: Sequence[Outcome]) -> dict[str, int]:
    """Count pairs of answers to one prompt, and pairs with different next tokens: a hit must not change an answer."""
    both = [(a, b) for a, b in zip(with_cache, without_cache, strict=True) if a.status == b.status == OK]
    return {"compared": len(both), "different": sum(a.next_token_id != b.next_token_id for a, b in both)}


def describe_served(report: Summary) -> str:
    """Name the model and the device."""
    return f"model {report['model'] or 'unknown'} on {report['device'] or 'unknown device'}"


def format_table(report: Summary) -> str:
    """Format a report as a table for people."""
    with_cache: Summary = report
    without_cache: Summary | None = report["without_cache"]
    columns = [with_cache] if without_cache is None else [with_cache, without_cache]
    rows: list[list[str]] = [["", "with cache", *(["without cache", "ratio"] if without_cache else [])]]
    for label, keys, shape, better in _ROWS:
        values = [_at(column, keys) for column in columns]
        cells = [label, *("-" if value is None else shape.format(value) for value in values)]
        if without_cache:
            ratio = None
            if better == "less":
                ratio = _ratio(values[1], values[0])
            elif better == "more":
                ratio = _ratio(values[0], values[1])
            cells.append("" if ratio is None else f"{ratio:.1f}x" if ratio < 100 else f"{ratio:,.0f}x")
        rows.append(cells)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["   ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    rule = "-" * max(map(len, lines))
    return "\n".join([*_heading(report), "", lines[0], rule, *lines[1:], rule, *_notes(report)])


# label, where in a summary, format, and whether less or more of it is better
_ROWS: tuple[tuple[str, str, str, str], ...] = (
    ("requests", "requests", "{:,}", ""),
    ("errors", "errors", "{:,}", ""),
    ("prompt tokens", "prompt_tokens", "{:,}", ""),
    ("cached tokens", "cached_tokens", "{:,}", ""),
    ("computed tokens", "computed_tokens", "{:,}", ""),
    ("token hit rate", "token_hit_rate", "{:.2%}", ""),
    ("TTFT mean, ms", "ttft_ms.mean", "{:,.2f}", "less"),
    ("TTFT p50, ms", "ttft_ms.p50", "{:,.2f}", "less"),
    ("TTFT p90, ms", "ttft_ms.p90", "{:,.2f}", "less"),
    ("TTFT p99, ms", "ttft_ms.p99", "{:,.2f}", "less"),
    ("  server queue p50, ms", "server_queue_ms.p50", "{:,.2f}", ""),
    ("  server prefill p50, ms", "server_prefill_ms.p50", "{:,.2f}", "less"),
    ("prompt tokens/s", "prompt_tokens_per_s", "{:,.0f}", "more"),
)


def _heading(report: Summary) -> list[str]:
    machine = report["machine"]
    return [
        f"{report['workload']}: {report['workload_text']}",
        f"{report['traffic_text']}; seed {report['seed']}",
        f"{describe_served(report)}; {machine['cpu']}, {machine['cores']} cores"
        + (f", {machine['gpu']}" if machine["gpu"] else ""),
    ]


def _notes(report: Summary) -> list[str]:
    notes = [f"cache: tenant {report['tenant']}, new for this run, so it started without a token of this traffic"]
    server = report["server"]
    if server["evicted_blocks"] is not None:
        notes.append(
            f"       {server['capacity_tokens']:,} tokens in blocks of {server['block_size']}; "
            f"{server['evicted_blocks']:,} blocks evicted by this traffic"
        )
    without_cache = report["without_cache"]
    if without_cache:
        sample = report["baseline_sample"]
        notes.append(f"without cache: {sample['text']}")
        with_ms, without_ms = sample["with_cache_ttft_ms"]["p50"], without_cache["ttft_ms"]["p50"]
        if sample["requests"] < sample["of"] and with_ms is not None and without_ms is not None:
            notes.append(
                f"       these {sample['requests']:,} alone: TTFT p50 {with_ms:,.2f} ms with cache, "
                f"{without_ms:,.2f} ms without, {without_ms / with_ms:.1f}x"
            )
        answers = report["answers"]
        notes.append(
            f"answers: {answers['compared']:,} compared with and without cache, {answers['different']} different"
        )
    notes.append(f"load generator: {report['generator_cpu_ms_per_request']:.2f} ms of processor time a request")
    for name, summary in (("with cache", report), ("without cache", without_cache)):
        if summary and summary["errors"]:
            counts = ", ".join(f"{count:,} {status}" for status, count in summary["errors_by_status"].items())
            notes.append(f"ERRORS {name}: {counts}")
    return notes


def _at(summary: Summary, keys: str) -> Any:
    value: Any = summary
    for key in keys.split("."):
        value = value[key]
    return value


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None
