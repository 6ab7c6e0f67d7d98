"""Summarizes a replay as numbers and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.parts.load_generator import OK, CallOutcome, Pass

Summary = dict[str, Any]

# Ratios over fewer requests are not reported, unless the traffic or `--baseline-requests` has fewer.
MIN_COMPARED = 16


def summarize(replayed: Pass) -> Summary:
    """Reduce a pass to its numbers.

    Tokens, rates, TTFT and the times of the server are those of answered requests only; without any, rates and
    distributions are None. `requests` counts those that were answered or failed, of `requests_planned`; `ended_by` says
    why the pass ended.
    """
    answered = [outcome for outcome in replayed.outcomes if outcome.status == OK]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in answered)
    cached_tokens = sum(outcome.cached_tokens for outcome in answered)
    failures = Counter(outcome.status for outcome in replayed.outcomes if outcome.status != OK)
    return {
        "requests": len(replayed.outcomes),
        "requests_planned": replayed.num_planned,
        "ended_by": replayed.ended_by.value,
        "errors": failures.total(),
        "errors_by_status": dict(sorted(failures.items())),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "computed_tokens": sum(outcome.computed_tokens for outcome in answered),
        "token_hit_rate": cached_tokens / prompt_tokens if prompt_tokens else None,
        "ttft_ms": ttft_ms(answered),
        "server_queue_ms": distribution([outcome.queue_us / 1e3 for outcome in answered]),
        "server_prefill_ms": distribution([outcome.prefill_us / 1e3 for outcome in answered]),
        "prompt_tokens_per_s": prompt_tokens / replayed.wall_s if prompt_tokens else None,
        "wall_s": replayed.wall_s,
        "send_late_ms": distribution([outcome.late_s * 1e3 for outcome in replayed.outcomes]),
        "generator_cpu_ms_per_request": replayed.cpu_s * 1e3 / max(1, len(replayed.outcomes)),
    }


def ttft_ms(outcomes: Sequence[CallOutcome]) -> dict[str, float | None]:
    """Return the distribution of the time to first token of answered requests."""
    return distribution([outcome.ttft_s * 1e3 for outcome in outcomes if outcome.status == OK])


def distribution(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean and percentiles, interpolated between the two nearest values; each is None without values."""
    if not values:
        return {"mean": None, "p50": None, "p90": None, "p99": None}
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return {"mean": float(np.mean(values)), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


@dataclass(frozen=True, slots=True)
class PassComparison:
    """Comparison of two passes over the requests that were answered in both.

    Attributes:
        compared: pairs of answers to one prompt.
        different: pairs whose next tokens differ: a hit must not change an answer.
        with_cache_ttft_ms, with_cache_server_prefill_ms: times of the compared requests in the pass with the cache.
        speedup: ratios above 1 if the cache is better; None if too few answers were compared. Ratios of times are over
            the compared requests only.
    """

    compared: int
    different: int
    with_cache_ttft_ms: dict[str, float | None]
    with_cache_server_prefill_ms: dict[str, float | None]
    speedup: dict[str, float | None] | None


def build_comparison(with_cache: Pass, without_cache: Pass | None, min_compared: int) -> PassComparison:
    """Compare two passes.

    Args:
        with_cache: the pass over all requests.
        without_cache: the pass over some of them; None if there was none.
        min_compared: minimum number of pairs of answers for a ratio.
    """
    cached_by_index = {outcome.index: outcome for outcome in with_cache.outcomes}
    uncached_outcomes = () if without_cache is None else without_cache.outcomes
    pairs = [
        (cached_by_index[uncached.index], uncached)
        for uncached in uncached_outcomes
        if uncached.index in cached_by_index
    ]
    answered = [(cached, uncached) for cached, uncached in pairs if cached.status == uncached.status == OK]
    cached_ttft_ms = ttft_ms([cached for cached, _ in answered])
    ratios = None
    if without_cache is not None and len(answered) >= min_compared:
        ratios = {
            "ttft_p50": _ratio(ttft_ms([uncached for _, uncached in answered])["p50"], cached_ttft_ms["p50"]),
            "prompt_tokens_per_s": _ratio(
                summarize(with_cache)["prompt_tokens_per_s"], summarize(without_cache)["prompt_tokens_per_s"]
            ),
        }
    different = sum(cached.next_token_id != uncached.next_token_id for cached, uncached in answered)
    cached_prefill_ms = distribution([cached.prefill_us / 1e3 for cached, _ in answered])
    return PassComparison(len(answered), different, cached_ttft_ms, cached_prefill_ms, ratios)


def describe_served(report: Summary) -> str:
    """Name the model and the device."""
    return f"model {report['model'] or 'unknown'} on {report['device'] or 'unknown device'}"


def format_table(report: Summary) -> str:
    """Format a report as a table."""
    without_cache: Summary | None = report["without_cache"]
    columns = [report] if without_cache is None else [report, without_cache]
    header = ["", "with cache"] if without_cache is None else ["", "with cache", "without cache"]
    has_ratios = report["speedup"] is not None
    rows = [[*header, "ratio"] if has_ratios else header]
    # Ratios of times are over the requests that were answered in both passes.
    compared: Summary = report | {
        "ttft_ms": report["baseline_sample"]["with_cache_ttft_ms"],
        "server_prefill_ms": report["baseline_sample"]["with_cache_server_prefill_ms"],
    }
    for label, path, value_format, better in _ROWS:
        values = [_value_at(column, path) for column in columns]
        cells = [label, *("-" if value is None else value_format.format(value) for value in values)]
        if has_ratios:
            ratio = None
            if better == "less":
                ratio = _ratio(values[1], _value_at(compared, path))
            elif better == "more":
                ratio = _ratio(values[0], values[1])
            cells.append(_format_ratio(ratio))
        rows.append(cells)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["   ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    rule = "-" * max(map(len, lines))
    return "\n".join([*_heading(report), "", lines[0], rule, *lines[1:], rule, *_notes(report)])


def _format_ratio(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.1f}x" if ratio < 100 else f"{ratio:,.0f}x"


# Label, path in a summary, format, and whether less or more of it is better.
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


def describe_partial(report: Summary) -> str | None:
    """Describe how much of the traffic a partial result covers; None for a result of all requests."""
    if not report["partial"]:
        return None
    why = report["interrupted_by"] or report["ended_by"]
    text = f"PARTIAL RESULT ({why}): {report['requests']:,} of {report['requests_planned']:,} requests with the cache"
    without_cache = report["without_cache"]
    num_without_cache = without_cache["requests"] if without_cache else 0
    return f"{text}, {num_without_cache:,} without it"


def _heading(report: Summary) -> list[str]:
    machine = report["machine"]
    partial = describe_partial(report)
    return [
        *([partial] if partial else []),
        f"{report['workload']}: {report['workload_text']}",
        f"{report['traffic_text']}; seed {report['seed']}",
        f"{describe_served(report)}; {machine['cpu']}, {machine['cores']} cores"
        + (f", {machine['gpu']}" if machine["gpu"] else ""),
    ]


def _notes(report: Summary) -> list[str]:
    notes = [f"cache: tenant {report['tenant']}, new for this run, so nothing was cached for it at the start"]
    server = report["server"]
    if server["evicted_blocks"] is not None:
        notes.append(
            f"       {server['capacity_tokens']:,} tokens in blocks of {server['block_size']}; "
            f"{server['evicted_blocks']:,} blocks evicted by this traffic"
        )
    without_cache, sample, answers = report["without_cache"], report["baseline_sample"], report["answers"]
    if without_cache:
        notes.append(f"without cache: {sample['text']}")
        with_ms, without_ms = sample["with_cache_ttft_ms"]["p50"], without_cache["ttft_ms"]["p50"]
        if report["speedup"] and sample["requests"] < sample["of"]:
            notes.append(
                f"       ratios of times are over these {sample['requests']:,} requests only: TTFT p50 "
                f"{with_ms:,.2f} ms with cache, {without_ms:,.2f} ms without"
            )
        notes.append(
            f"answers: {answers['compared']:,} compared with and without cache, {answers['different']} different"
        )
        if not report["speedup"]:
            notes.append(
                f"NO COMPARISON: {answers['compared']:,} requests were answered both with and without the cache, and a "
                f"ratio needs {answers['required']}. Allow more time, or use a machine that is less busy"
            )
    elif sample["planned"]:
        notes.append(f"NO COMPARISON: the pass without the cache was {sample['text']}")
    notes.append(f"load generator: {report['generator_cpu_ms_per_request']:.2f} ms of CPU time per request")
    for name, summary in (("with cache", report), ("without cache", without_cache)):
        if summary and summary["errors"]:
            counts = ", ".join(f"{count:,} {status}" for status, count in summary["errors_by_status"].items())
            notes.append(f"ERRORS {name}: {counts}")
    return notes


def _value_at(summary: Summary, keys: str) -> Any:
    value: Any = summary
    for key in keys.split("."):
        value = value[key]
    return value


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None
