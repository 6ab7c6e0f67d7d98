"""Counters and histograms agree with the counts of the engine."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from radixkv.api.caller import Caller
from radixkv.api.miss_reason import MissReason
from radixkv.api.params import PrefillParams
from radixkv.api.sampling import Sampling
from radixkv.errors import (
    DeadlinePassed,
    InvalidCredential,
    InvalidRequest,
    NotPermitted,
    PromptTooLong,
    QueueFull,
    StepFailed,
)
from radixkv.namespace import Namespace
from radixkv.scheduling.request import Generation, Outcome, Request
from radixkv.telemetry.metrics import MAX_UNKNOWN_TENANTS, Metrics
from tests.core_bench import Bench
from tests.fake_runner import tokens

TOKEN_KINDS = ("prompt", "cached", "computed", "generated", "recomputed")


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"radixkv_{name}", labels)


def token_counts(metrics: Metrics, tenant: str) -> tuple[float | None, ...]:
    return tuple(value(metrics, f"{kind}_tokens_total", tenant=tenant) for kind in TOKEN_KINDS)


def ended_request(num_generated: int = 0, **fields: object) -> Request:
    """Return a request with 10 tokens that was received at 100 s, and whose attributes `fields` are set."""
    params = PrefillParams(tokens(range(10)), Caller(str(fields.pop("tenant", ""))))
    generation = None
    if num_generated:
        sampling = Sampling(num_generated)
        generation = Generation(sampling, frozenset(), lambda chunk: None, list(range(num_generated)))
    request = Request(params, Namespace("fake"), Future(), received_s=100.0, generation=generation)
    for name, field_value in fields.items():
        (owner,) = (each for each in (request.times, request.reuse, request) if hasattr(each, name))
        setattr(owner, name, field_value)
    return request


def test_requests_are_counted_by_kind_and_outcome() -> None:
    metrics = Metrics()
    bench = Bench(observers=[metrics])
    bench.prefill(range(8))
    bench.prefill(range(8))
    bench.generate(range(8), 3)
    bench.submit(range(4)).cancel()
    bench.run()
    bench.runner.fail_next = RuntimeError("broken")
    bench.generate(range(50, 58), 3)
    bench.run()
    counts = {
        (kind, outcome): value(metrics, "requests_total", kind=kind, outcome=outcome.value)
        for kind in ("prefill", "generate")
        for outcome in Outcome
    }
    assert {key: count for key, count in counts.items() if count} == {
        ("prefill", Outcome.FINISHED): 2,
        ("prefill", Outcome.CANCELLED): 1,
        ("generate", Outcome.FINISHED): 1,
        ("generate", Outcome.FAILED): 1,
    }
    assert None not in counts.values(), "every series exists before its first request"
    assert value(metrics, "request_failures_total", error="StepFailed") == 1
    assert value(metrics, "step_failures_total") == 1


REASONS = ("unauthenticated", "forbidden", "malformed", "slow", "busy", "other")


def refused_calls(metrics: Metrics) -> dict[str, float | None]:
    return {reason: value(metrics, "refused_calls_total", reason=reason) for reason in REASONS}


def test_every_reason_for_refused_calls_has_a_series_from_the_start() -> None:
    assert refused_calls(Metrics()) == dict.fromkeys(REASONS, 0)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (InvalidCredential("x"), "unauthenticated"),
        (NotPermitted("x"), "forbidden"),
        (InvalidRequest("x"), "malformed"),
        (DeadlinePassed("x"), "slow"),
        (QueueFull("x"), "busy"),
        (StepFailed("x"), "other"),
    ],
)
def test_a_refused_call_counts_for_one_reason(error: Exception, reason: str) -> None:
    metrics = Metrics()
    metrics.call_refused(error)
    assert refused_calls(metrics) == {**dict.fromkeys(REASONS, 0), reason: 1}


def test_refused_requests_are_counted_by_error() -> None:
    metrics = Metrics()
    for error in (QueueFull("full"), QueueFull("full"), PromptTooLong("long")):
        metrics.request_refused(error)
    assert value(metrics, "request_refusals_total", error="QueueFull") == 2
    assert value(metrics, "request_refusals_total", error="PromptTooLong") == 1
    assert value(metrics, "request_failures_total", error="QueueFull") is None


def test_miss_reasons_of_finished_requests_add_up() -> None:
    metrics = Metrics()
    bench = Bench(observers=[metrics])
    bench.prefill(range(8))
    bench.prefill(range(8))
    bench.prefill([0, 1, 98, 99])
    bench.prefill(range(8), read_cache=False)
    bench.submit(range(100, 104)).cancel()
    bench.run()
    reasons = {
        reason.value.lower(): value(metrics, "miss_reasons_total", reason=reason.value.lower()) for reason in MissReason
    }
    assert {reason: count for reason, count in reasons.items() if count} == {
        "cold": 1,
        "none": 1,
        "diverged": 1,
        "read_disabled": 1,
    }


def test_token_counts_per_tenant_equal_those_of_stats() -> None:
    metrics = Metrics()
    bench = Bench(num_blocks=9, observers=[metrics])
    for start in (0, 50, 100):
        bench.generate(range(start, start + 8), 16, tenant="acme")
    bench.run()
    bench.prefill(range(8), tenant="acme")
    stats = bench.core.stats.stats()
    assert token_counts(metrics, "acme") == tuple(getattr(stats.tokens, kind) for kind in TOKEN_KINDS)
    assert stats.tokens.recomputed > 0
    assert value(metrics, "request_pauses_total") == stats.load.requests.pauses > 0


def test_tokens_of_requests_that_did_not_finish_are_not_counted() -> None:
    metrics = Metrics(["acme"])
    for outcome in (Outcome.FAILED, Outcome.CANCELLED):
        metrics.request_ended(ended_request(3, tenant="acme"), outcome, None, 101.0)
    assert token_counts(metrics, "acme") == (0, 0, 0, 0, 0)


def test_the_number_of_series_per_tenant_is_bounded() -> None:
    metrics = Metrics(["known"])
    for n in range(MAX_UNKNOWN_TENANTS + 10):
        metrics.request_ended(ended_request(tenant=f"t{n}"), Outcome.FINISHED, None, 101.0)
    for tenant in ("known", "t0", f"t{MAX_UNKNOWN_TENANTS + 5}"):
        metrics.request_ended(ended_request(tenant=tenant), Outcome.FINISHED, None, 101.0)
    names = {
        sample.labels["tenant"]
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "radixkv_prompt_tokens_total"
    }
    assert names == {"known", "other", *(f"t{n}" for n in range(MAX_UNKNOWN_TENANTS))}
    assert token_counts(metrics, "known")[0] == 10
    assert token_counts(metrics, "t0")[0] == 20
    assert token_counts(metrics, "other")[0] == 11 * 10  # one request each of 10 tenants, and a second one of a tenant


def test_a_finished_generation_records_the_times_of_its_phases() -> None:
    metrics = Metrics()
    request = ended_request(5, scheduled_s=102.0, prefilled_s=105.0)
    metrics.request_ended(request, Outcome.FINISHED, None, 107.0)
    sums = {
        "request_queue_seconds": 2.0,
        "request_prefill_seconds": 3.0,
        "time_to_first_token_seconds": 5.0,
        "time_per_output_token_seconds": (107.0 - 105.0) / 4,  # of the tokens after the first
    }
    assert {name: value(metrics, f"{name}_sum") for name in sums} == sums
    assert value(metrics, "request_duration_seconds_sum", kind="generate") == 7.0
    assert value(metrics, "request_duration_seconds_count", kind="prefill") == 0
    assert value(metrics, "request_queue_seconds_bucket", le="1.0") == 0
    assert value(metrics, "request_queue_seconds_bucket", le="2.5") == 1


@pytest.mark.parametrize(
    ("fields", "num_recorded"),
    [({}, (0, 0)), ({"scheduled_s": 102.0}, (1, 0)), ({"scheduled_s": 102.0, "prefilled_s": 103.0}, (1, 1))],
)
def test_completed_phases_of_a_failed_request_are_recorded(
    fields: dict[str, float], num_recorded: tuple[int, int]
) -> None:
    metrics = Metrics()
    metrics.request_ended(ended_request(5, **fields), Outcome.FAILED, StepFailed("broken"), 107.0)
    num_queue_times, num_first_token_times = (
        value(metrics, f"{name}_count") for name in ("request_queue_seconds", "time_to_first_token_seconds")
    )
    assert (num_queue_times, num_first_token_times) == num_recorded
    assert value(metrics, "time_per_output_token_seconds_count") == 0
    assert value(metrics, "request_duration_seconds_count", kind="generate") == 0


def test_a_generation_of_one_token_has_no_time_per_output_token() -> None:
    metrics = Metrics()
    metrics.request_ended(ended_request(1, scheduled_s=102.0, prefilled_s=103.0), Outcome.FINISHED, None, 103.0)
    assert value(metrics, "time_per_output_token_seconds_count") == 0
    assert value(metrics, "request_duration_seconds_count", kind="generate") == 1


def test_duration_and_size_of_steps_are_recorded() -> None:
    metrics = Metrics()
    metrics.step_done(0.25, 3, 100, 2)
    metrics.step_done(0.5, 2, 0, 2)
    assert value(metrics, "step_seconds_sum") == 0.75
    assert value(metrics, "step_requests_sum") == 5
    assert value(metrics, "step_tokens_sum", phase="prefill") == 100
    assert value(metrics, "step_tokens_sum", phase="decode") == 4
    assert value(metrics, "step_tokens_bucket", phase="prefill", le="0.0") == 1, (
        "steps without prefill tokens have a bucket"
    )


def test_step_tokens_add_up_to_the_computed_tokens() -> None:
    metrics = Metrics()
    bench = Bench(num_blocks=9, observers=[metrics])
    for start in (0, 50, 100):
        bench.generate(range(start, start + 8), 16)
    bench.run()
    phases = [value(metrics, "step_tokens_sum", phase=phase) or 0 for phase in ("prefill", "decode")]
    assert sum(phases) == bench.runner.computed_tokens
    assert value(metrics, "step_seconds_count") == len(bench.runner.steps)


def test_two_services_in_one_process_count_separately() -> None:
    first, second = Metrics(), Metrics()
    first.step_done(1.0, 1, 1, 0)
    assert value(second, "step_seconds_count") == 0


def test_every_tenant_name_can_be_scraped() -> None:
    metrics = Metrics()
    names = ["", 'a"b', "back\\slash", "é€", "{}"]
    escaped = {"new\nline": r"new\nline", "\udcff": r"\udcff", "\x1b[2J\0": r"\x1b[2J\x00"}
    for name in [*names, *escaped]:
        metrics.request_ended(ended_request(tenant=name), Outcome.FINISHED, None, 101.0)
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    scraped = [
        sample.labels["tenant"]
        for family in families
        for sample in family.samples
        if sample.name == "radixkv_prompt_tokens_total"
    ]
    assert sorted(scraped) == sorted([*names, *escaped.values(), "other"])


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        ("step_seconds", {"step_seconds_bucket", "step_seconds_sum", "step_seconds_count"}),
        ("step_seconds_sum", {"step_seconds_sum"}),
        ("requests", {"requests_total"}),
        ("requests_total", {"requests_total"}),
        ("requests_created", {"requests_created"}),
        ("step_second", set()),
    ],
)
def test_a_scrape_selects_metrics_and_samples_by_name(name: str, samples: set[str]) -> None:
    families = Metrics().registry.restricted_registry([f"radixkv_{name}"]).collect()
    assert {each.name for family in families for each in family.samples} == {f"radixkv_{each}" for each in samples}
