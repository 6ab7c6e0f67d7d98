"""Real calls, some of them cancelled, timed out or killed. `make campaign` makes fifty thousand."""

from __future__ import annotations

import pytest

from tests.whole.campaign import NUM_WORKERS, run_campaign


@pytest.mark.parametrize("num_calls", [250, pytest.param(1000, marks=pytest.mark.long)])
def test_no_call_leaks_and_no_answer_is_wrong(num_calls: int) -> None:
    report = run_campaign(num_calls, calls_per_kill=num_calls // 5)
    assert report.mistakes == []
    assert report.num_killed >= 4 + NUM_WORKERS
    happened = {
        "prefilled",
        "generated",
        "stopped reading",
        "held",
        "cancelled by us",
        "too late",
        "probed",
        "retained",
    }
    assert {event for event in happened if not report.outcomes[event]} == set()
    assert report.pressure["evicted blocks"] > 0
    assert report.resident_mib[-1] < 1.1 * report.resident_mib[2]
