import pytest
from prometheus_client import CollectorRegistry

from radixkv.errors import (
    DeadlineExceeded,
    InvalidRequest,
    PermissionDenied,
    QueueFull,
    StepFailed,
    Unauthenticated,
)
from radixkv.telemetry.refused_calls import OTHER_REASON, REASONS, RefusedCalls

ALL_REASONS = [*dict(REASONS).values(), OTHER_REASON]


def counts_of(registry):
    return {
        reason: registry.get_sample_value("radixkv_refused_calls_total", {"reason": reason}) for reason in ALL_REASONS
    }


def test_every_reason_is_there_from_the_start():
    registry = CollectorRegistry()
    RefusedCalls(registry)
    assert counts_of(registry) == dict.fromkeys(ALL_REASONS, 0)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Unauthenticated("x"), "unauthenticated"),
        (PermissionDenied("x"), "forbidden"),
        (InvalidRequest("x"), "malformed"),
        (DeadlineExceeded("x"), "slow"),
        (QueueFull("x"), "busy"),
        (StepFailed("x"), "other"),
    ],
)
def test_a_refusal_counts_for_one_reason(error, reason):
    registry = CollectorRegistry()
    RefusedCalls(registry).count(error)
    assert counts_of(registry) == {**dict.fromkeys(ALL_REASONS, 0), reason: 1}
