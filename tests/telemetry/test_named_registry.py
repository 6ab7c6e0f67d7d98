import pytest
from prometheus_client import Counter, Gauge, Histogram

from radixkv.telemetry.named_registry import NamedRegistry


def registry() -> NamedRegistry:
    made = NamedRegistry()
    Counter("calls_total", "Calls.", registry=made)
    Counter("calls_sent_total", "Calls.", registry=made)
    Histogram("call_seconds", "Time.", ["kind"], registry=made, buckets=(1.0,)).labels("a").observe(2.0)
    Gauge("call", "Calls now.", registry=made)
    return made


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("call_seconds", {"call_seconds_bucket", "call_seconds_sum", "call_seconds_count"}),
        ("call_seconds_sum", {"call_seconds_sum"}),
        ("calls", {"calls_total"}),
        ("calls_total", {"calls_total"}),
        ("calls_created", {"calls_created"}),
        ("call", {"call"}),
        ("cal", set()),
    ],
)
def test_families_and_samples_are_found_by_name(asked: str, found: set[str]) -> None:
    families = registry().restricted_registry([asked]).collect()
    assert {sample.name for family in families for sample in family.samples} == found
