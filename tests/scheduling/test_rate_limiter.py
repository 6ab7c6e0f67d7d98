"""Rate limits in virtual time."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from radixkv.api.params import PrefillParams
from radixkv.config import EngineConfig, TenantConfig
from radixkv.engine.admission_control import AdmissionControl
from radixkv.errors import QueueFull, RateExceeded
from radixkv.scheduling.rate_limiter import RateLimiter
from radixkv.scheduling.request import Request
from tests.fake_runner import tokens
from tests.fakes import MODEL, FakeClock


def refused_retry_after_s(rates: RateLimiter, tenant: str = "a") -> float:
    """Assert that a call is refused, and return after how many seconds the tenant may retry."""
    with pytest.raises(RateExceeded) as refused:
        rates.enter(tenant)
    return refused.value.retry_after_s


def rates_of(clock: FakeClock, **bounds: float) -> RateLimiter:
    return RateLimiter({}, TenantConfig(**bounds), clock)


def test_a_burst_is_accepted_and_the_next_call_is_refused_until_the_given_time() -> None:
    clock = FakeClock()
    rates = rates_of(clock, max_calls_per_s=2, rate_burst_s=3)
    for _ in range(6):
        rates.enter("a")
    assert refused_retry_after_s(rates) == pytest.approx(0.5)
    clock.now_s += 0.3
    wait_s = refused_retry_after_s(rates)
    assert wait_s == pytest.approx(0.2)
    clock.now_s += wait_s + 1e-9
    rates.enter("a")
    assert refused_retry_after_s(rates) == pytest.approx(0.5)


def test_unused_capacity_is_limited_to_the_burst() -> None:
    clock = FakeClock()
    rates = rates_of(clock, max_calls_per_s=2, rate_burst_s=2)
    clock.now_s += 1000
    for _ in range(4):
        rates.enter("a")
    assert refused_retry_after_s(rates) == pytest.approx(0.5)


def test_a_low_rate_accepts_one_call() -> None:
    rates = rates_of(FakeClock(), max_calls_per_s=0.1, rate_burst_s=1)
    rates.enter("a")
    assert refused_retry_after_s(rates) == pytest.approx(10)


def test_the_token_bucket_may_become_negative_and_calls_are_refused_until_it_is_not() -> None:
    clock = FakeClock()
    rates = rates_of(clock, max_computed_tokens_per_s=100, rate_burst_s=1)
    rates.enter("a")
    rates.charge("a", 350)
    assert refused_retry_after_s(rates) == pytest.approx(2.5)
    clock.now_s += 2.5 + 1e-9
    rates.enter("a")


def test_calls_that_compute_one_token_cost_one_token() -> None:
    rates = rates_of(FakeClock(), max_computed_tokens_per_s=100, rate_burst_s=1)
    for _ in range(100):
        rates.enter("a")
        rates.charge("a", 1)
    rates.charge("a", 1)
    assert refused_retry_after_s(rates) == pytest.approx(0.01)


def test_tenants_have_rates_of_their_own() -> None:
    rates = RateLimiter({"named": TenantConfig(max_calls_per_s=5, rate_burst_s=1)}, TenantConfig(), FakeClock())
    for _ in range(5):
        rates.enter("named")
    assert refused_retry_after_s(rates, "named") == pytest.approx(0.2)
    for _ in range(1000):
        rates.enter("other")
    assert rates.num_tenants == 1


def test_tenants_whose_buckets_are_full_are_forgotten() -> None:
    clock = FakeClock()
    rates = rates_of(clock, max_calls_per_s=10, rate_burst_s=1)
    for number in range(1000):
        rates.enter(str(number))
    assert rates.num_tenants == 1000
    clock.now_s += 1
    for number in range(1000, 1600):
        rates.enter(str(number))
    assert rates.num_tenants == 600


class TestAdmissionControl:
    """Admission control counts each call against the rates, and charges them for computed tokens."""

    def request(self, num_tokens: int) -> Request:
        return Request(PrefillParams(tokens(list(range(num_tokens)))), MODEL, Future(), 0.0)

    def test_a_refused_request_is_not_submitted(self) -> None:
        clock = FakeClock()
        admission = AdmissionControl(EngineConfig(), rates_of(clock, max_calls_per_s=1, rate_burst_s=1))
        submitted = []
        admission.enter(self.request(3), lambda _: submitted.append(1))
        with pytest.raises(RateExceeded):
            admission.enter(self.request(3), lambda _: submitted.append(2))
        assert submitted == [1]

    def test_calls_that_a_full_queue_refuses_do_not_count_against_the_rate(self) -> None:
        rates = rates_of(FakeClock(), max_calls_per_s=2, rate_burst_s=1)
        admission = AdmissionControl(EngineConfig(max_tenant_requests=1), rates)
        first = self.request(3)
        admission.enter(first, lambda _: None)
        for _ in range(5):
            with pytest.raises(QueueFull):
                admission.enter(self.request(3), lambda _: None)
        admission.leave(first)
        admission.enter(self.request(3), lambda _: None)

    def test_only_tokens_that_are_not_cached_are_charged(self) -> None:
        rates = rates_of(FakeClock(), max_computed_tokens_per_s=10, rate_burst_s=1)
        admission = AdmissionControl(EngineConfig(), rates)
        request = self.request(30)
        admission.enter(request, lambda _: None)
        request.computed_upto = 15
        admission.charge_prompt(request)
        assert refused_retry_after_s(rates, request.tenant) == pytest.approx(0.5), (
            "15 tokens, 5 more than the bucket has, at 10 per s"
        )
