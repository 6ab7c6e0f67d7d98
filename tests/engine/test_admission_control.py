"""Admission control: when callers of a full queue should retry."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from radixkv.api.params import PrefillParams
from radixkv.config import EngineConfig
from radixkv.engine.admission_control import AdmissionControl
from radixkv.errors import QueueFull
from radixkv.scheduling.request import Request
from tests.fake_runner import tokens
from tests.fakes import MODEL, FakeClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr("radixkv.engine.admission_control.time", SimpleNamespace(monotonic=clock))
    return clock


def retry_after_s(clock: FakeClock, seconds_each: float, num_ended: int) -> float:
    """Return `retry_after_s` of a full queue of 8 requests, after others have ended, one every `seconds_each`."""
    control = AdmissionControl(EngineConfig(max_running_requests=2, max_waiting_requests=6))
    requests = [Request(PrefillParams(tokens([1])), MODEL, Future(), 0.0) for _ in range(num_ended + 8 + 1)]
    for request in requests[:num_ended]:
        control.enter(request, lambda request: None)
        clock.now_s += seconds_each
        control.leave(request)
    for request in requests[num_ended:-1]:
        control.enter(request, lambda request: None)
    with pytest.raises(QueueFull) as refused:
        control.enter(requests[-1], lambda request: None)
    return refused.value.retry_after_s


@pytest.mark.parametrize(
    ("seconds_each", "num_ended", "expected_s"),
    [(0.3, 20, 1.2), (0.3, 200, 1.2), (0.001, 20, 0.05), (100, 20, 60), (0.3, 1, 1.0), (0.3, 0, 1.0)],
    ids=["4 of 8 requests", "a long history", "the minimum", "the maximum", "one end gives no rate", "none ended"],
)
def test_a_full_queue_estimates_when_half_of_its_requests_will_have_ended(
    clock: FakeClock, seconds_each: float, num_ended: int, expected_s: float
) -> None:
    assert retry_after_s(clock, seconds_each, num_ended) == pytest.approx(expected_s)
