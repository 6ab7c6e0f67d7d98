"""The numbers of a report are those of the outcomes, and two passes are compared over the same requests."""

from __future__ import annotations

import statistics

import pytest

from bench.parts.load_generator import CallOutcome, Ending, Pass
from bench.parts.report import build_comparison, distribution, summarize


def answered_call(
    ttft_s: float, prompt_tokens: int = 10, cached_tokens: int = 4, next_token_id: int = 0, *, index: int = 0
) -> CallOutcome:
    return CallOutcome(
        index,
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


def failed_call(status: str, index: int = 0) -> CallOutcome:
    return CallOutcome(index, status, sent_s=0.0, late_s=0.0, ttft_s=99.0)


def pass_of(*outcomes: CallOutcome, wall_s: float = 1.0) -> Pass:
    return Pass(outcomes, wall_s, cpu_s=0.1, num_planned=len(outcomes))


def test_percentiles_are_interpolated_like_the_inclusive_quantiles() -> None:
    values = [float(value**2 % 97) for value in range(37)]
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    expected = {"mean": statistics.fmean(values), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}
    assert distribution(values) == pytest.approx(expected)


def test_all_percentiles_of_one_value_are_that_value() -> None:
    assert distribution([7.0]) == {"mean": 7.0, "p50": 7.0, "p90": 7.0, "p99": 7.0}


def test_a_summary_adds_up_the_answered_requests() -> None:
    summary = summarize(
        Pass((answered_call(0.1), answered_call(0.3, 30, 24), failed_call("INTERNAL")), 2.0, 0.3, num_planned=3)
    )
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
    summary = summarize(pass_of(*map(failed_call, statuses)))
    assert summary["errors"] == 4
    assert summary["errors_by_status"] == {"INTERNAL": 2, "RESOURCE_EXHAUSTED": 1, "WRONG_ANSWER": 1}


def test_a_pass_that_ended_early_reports_how_many_requests_were_planned() -> None:
    summary = summarize(Pass((answered_call(0.1),), 1.0, 0.1, num_planned=50, ended_by=Ending.TIME_LIMIT))
    assert (summary["requests"], summary["requests_planned"], summary["ended_by"]) == (1, 50, "time limit")


@pytest.mark.parametrize("outcomes", [(), (failed_call("INTERNAL"),)])
def test_numbers_that_were_not_measured_are_null(outcomes: tuple[CallOutcome, ...]) -> None:
    summary = summarize(pass_of(*outcomes))
    assert summary["token_hit_rate"] is None
    assert summary["ttft_ms"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert summary["prompt_tokens_per_s"] is None


def test_the_speedup_is_how_many_times_better_the_cache_is() -> None:
    comparison = build_comparison(pass_of(answered_call(0.1)), pass_of(answered_call(0.4), wall_s=8.0), min_compared=1)
    assert comparison.speedup == pytest.approx({"ttft_p50": 4.0, "prompt_tokens_per_s": 8.0})


def test_times_are_compared_over_the_same_requests() -> None:
    with_cache = pass_of(*(answered_call(0.1 if index % 2 else 0.5, index=index) for index in range(10)))
    without_cache = pass_of(*(answered_call(1.0, index=index) for index in range(0, 10, 2)))
    comparison = build_comparison(with_cache, without_cache, min_compared=5)
    assert comparison.compared == 5
    assert comparison.with_cache_ttft_ms["p50"] == pytest.approx(500)
    assert comparison.speedup is not None
    assert comparison.speedup["ttft_p50"] == pytest.approx(2.0)


@pytest.mark.parametrize(("num_uncached", "has_ratio"), [(15, False), (16, True)])
def test_too_few_answers_give_no_ratio(num_uncached: int, has_ratio: bool) -> None:
    with_cache = pass_of(*(answered_call(0.1, index=index) for index in range(100)))
    without_cache = pass_of(*(answered_call(1.0, index=index) for index in range(num_uncached)))
    comparison = build_comparison(with_cache, without_cache, min_compared=16)
    assert comparison.compared == num_uncached
    assert (comparison.speedup is not None) == has_ratio


def test_without_the_second_pass_nothing_is_compared() -> None:
    comparison = build_comparison(pass_of(answered_call(0.1)), None, min_compared=0)
    assert (comparison.compared, comparison.different, comparison.speedup) == (0, 0, None)


def test_only_requests_that_were_answered_in_both_passes_are_compared() -> None:
    with_cache = pass_of(
        answered_call(1, next_token_id=1, index=0),
        answered_call(1, next_token_id=2, index=1),
        failed_call("INTERNAL", 2),
    )
    without_cache = pass_of(
        answered_call(1, next_token_id=1, index=0),
        answered_call(1, next_token_id=3, index=1),
        answered_call(1, index=2),
    )
    comparison = build_comparison(with_cache, without_cache, min_compared=1)
    assert (comparison.compared, comparison.different) == (2, 1)
