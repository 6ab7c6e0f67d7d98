"""Real calls, some of them cancelled, timed out or killed. `make campaign` makes fifty thousand."""

from tests.whole.campaign import NUM_WORKERS, run_campaign


def test_no_call_leaks_and_no_answer_is_wrong() -> None:
    report = run_campaign(1000, calls_per_kill=200)
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
