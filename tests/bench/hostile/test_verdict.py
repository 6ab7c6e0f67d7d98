import dataclasses

from bench.hostile.trial import Latencies, Trial
from bench.hostile.verdict import broken_bounds, format_number, memory_budget_mb
from radixkv.config import ServerConfig
from radixkv.service.server.receive.grpc_options import WINDOW_BYTES

ALONE = Latencies(p50_ms=2, p99_ms=10, step_ms=1, calls=10, refusals=0, statuses={"OK": 10})
GOOD_TRIAL = Trial("x", {}, {}, ALONE, ALONE, idle_mb=100, peak_mb=180, after_mb=100, idle_after_s=1)


def broken_with(**changes):
    """Return the bounds that are broken by a good trial with changes."""
    return broken_bounds(dataclasses.replace(GOOD_TRIAL, **changes), budget_mb=50)


def test_an_attack_that_changes_nothing_breaks_nothing():
    assert broken_with() == []


def test_each_bound_can_be_broken():
    assert broken_with(under_attack=dataclasses.replace(ALONE, p99_ms=33)) == ["p99 above 32.0 ms"]
    assert broken_with(under_attack=dataclasses.replace(ALONE, refusals=1)) == ["refusals"]
    assert broken_with(under_attack=dataclasses.replace(ALONE, p99_ms=None)) == ["no answers"]
    assert broken_with(peak_mb=181) == ["peak above 180 MB"]
    assert broken_with(idle_after_s=11) == ["busy after 10 s"]
    assert broken_with(idle_after_s=None) == ["busy after 10 s"]


def test_the_budget_follows_the_configuration():
    config = ServerConfig(max_receiving_bytes=10**6, max_held_bytes=10**6)
    assert memory_budget_mb(config, 0) == 3
    assert memory_budget_mb(config, 2) == 3 + 2 * (config.max_connection_calls + 1) * WINDOW_BYTES / 1e6
    assert memory_budget_mb(config, 10**6) == 3 + (2 * config.max_calls + 10**6) * WINDOW_BYTES / 1e6


def test_a_number_that_was_not_measured_is_a_dash():
    assert [format_number(value) for value in (None, 0.0, 12.34)] == ["-", "0.0", "12.3"]
