"""Numbers are what their names say, and the table shows what the JSON says."""

from __future__ import annotations

import statistics

import pytest

from bench.parts.load_generator import Outcome, Pass
from bench.parts.report import compare_answers, distribution, speedup, summarize


def answered(ttft_s: float, prompt_tokens: int = 10, cached_tokens: int = 4, next_token_id: int = 0) -> Outcome:
    return Outcome(
        "OK",
        sent_s=0.0,
        late_s=0.001,
        ttft_s=ttft_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        computed_tokens=prompt_tokens - cached_tokens,
        queue_us=1000,
        prefill_us=3000,
        next_token_id=next_token_id,
    )


def failed(status: str) -> Outcome:
    return Outcome(status, sent_s=0.0, late_s=0.0, ttft_s=99.0)


def test_percentiles_are_interpolated_like_the_inclusive_quantiles() -> None:
    values = [float(value**2 % 97) for value in range(37)]
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    expected = {"mean": statistics.fmean(values), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}
    assert distribution(values) == pytest.approx(expected)


def test_one_value_is_every_percentile() -> None:
    assert distribution([7.0]) == {"mean": 7.0, "p50": 7.0, "p90": 7.0, "p99": 7.0}


def test_a_summary_adds_up_the_answered_requests() -> None:
    summary = summarize(Pass((answered(0.1), answered(0.3, 30, 24), failed("INTERNAL")), wall_s=2.0, cpu_s=0.3))
    assert (summary["requests"], summary["errors"]) == (3, 1)
    assert (summary["prompt_tokens"], summary["cached_tokens"], summary["computed_tokens"]) == (40, 28, 12)
    assert summary["token_hit_rate"] == pytest.approx(0.7)
    assert summary["prompt_tokens_per_s"] == pytest.approx(20)
    assert summary["ttft_ms"]["mean"] == pytest.approx(200)
    assert summary["ttft_ms"]["p50"] == pytest.approx(200)
    assert summary["server_queue_ms"]["p50"] == 1
    assert summary["server_prefill_ms"]["p50"] == 3
    assert summary["generator_cpu_ms_per_request"] == pytest.approx(100)


def test_errors_are_counted_by_status() -> None:
    statuses = ("INTERNAL", "RESOURCE_EXHAUSTED", "INTERNAL", "WRONG_ANSWER")
    summary = summarize(Pass(tuple(map(failed, statuses)), 1.0, 0.1))
    assert summary["errors"] == 4
    assert summary["errors_by_status"] == {"INTERNAL": 2, "RESOURCE_EXHAUSTED": 1, "WRONG_ANSWER": 1}


def test_what_nobody_measured_is_null_not_nan() -> None:
    summary = summarize(Pass((failed("INTERNAL"),), 1.0, 0.1))
    assert summary["token_hit_rate"] is None
    assert summary["ttft_ms"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert speedup(summary, summary) == {"ttft_p50": None, "prompt_tokens_per_s": None}


def test_speedup_is_how_many_times_better_the_cache_is() -> None:
    with_cache = summarize(Pass((answered(0.1),), wall_s=1.0, cpu_s=0.1))
    without_cache = summarize(Pass((answered(0.4),), wall_s=8.0, cpu_s=0.1))
    assert speedup(with_cache, without_cache) == pytest.approx({"ttft_p50": 4.0, "prompt_tokens_per_s": 8.0})


def test_answers_are_compared_where_both_came() -> None:
    with_cache = [answered(1, next_token_id=1), answered(1, next_token_id=2), failed("INTERNAL")]
    without_cache = [answered(1, next_token_id=1), answered(1, next_token_id=3), answered(1)]
    assert compare_answers(with_cache, without_cache) == {"compared": 2, "different": 1}
