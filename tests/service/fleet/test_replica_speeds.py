from __future__ import annotations

import math

import pytest

from radixkv.routing.candidate import DEFAULT_TIMES
from radixkv.service.fleet.replica_speeds import ReplicaSpeeds


class SpeedTrial:
    """Measures speeds from the responses of a test, with a clock that the test advances."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.measured = ReplicaSpeeds(lambda: self.now_s)

    def respond(
        self, name: str, seconds: float, computed_tokens: int | None = 100, sent_s: float | None = None
    ) -> None:
        """Advance the clock, and record a response to a request that was sent at `sent_s`, by default before."""
        sent_s = self.now_s if sent_s is None else sent_s
        self.now_s += seconds
        self.measured.note(name, sent_s, computed_tokens)

    def compute_s(self, name: str) -> float:
        return self.measured.of(name).compute_s


def test_an_unmeasured_replica_has_the_mean_of_the_others() -> None:
    speeds = SpeedTrial()
    assert speeds.measured.of("new") == DEFAULT_TIMES
    speeds.respond("a", 1.0)
    speeds.respond("b", 1.5)
    assert speeds.compute_s("new") == pytest.approx((1.0 + 1.5) / (100 + 100))
    speeds.measured.forget("a")
    assert speeds.compute_s("new") == pytest.approx(0.015)
    speeds.measured.forget("b")
    speeds.measured.forget("c")
    assert speeds.measured.of("b") == DEFAULT_TIMES


def test_later_answers_move_the_average_by_their_tokens() -> None:
    speeds = SpeedTrial()
    speeds.respond("a", 1.0)
    speeds.respond("a", 2.0)
    assert speeds.compute_s("a") == pytest.approx((0.9 * 1 + 2) / (0.9 * 100 + 100))
    speeds = SpeedTrial()
    speeds.respond("a", 1.0, 900)
    speeds.respond("a", 1.0, 100)
    assert speeds.compute_s("a") == pytest.approx((0.9 * 1 + 1) / (0.9 * 900 + 100))


def test_prompts_that_are_computed_side_by_side_do_not_make_a_replica_slow() -> None:
    speeds = SpeedTrial()
    sent_s = speeds.now_s
    for _ in range(5):  # all are sent at once, and each takes a second of its own
        speeds.respond("busy", 1.0, sent_s=sent_s)
    assert speeds.compute_s("busy") == pytest.approx(0.01)


def test_an_idle_replica_is_not_slow() -> None:
    speeds = SpeedTrial()
    speeds.respond("a", 1.0)
    speeds.now_s += 1000
    speeds.respond("a", 1.0)
    assert speeds.compute_s("a") == pytest.approx(0.01)


def test_speeds_that_differ_by_less_than_two_times_count_as_equal() -> None:
    speeds = SpeedTrial()
    speeds.respond("a", 1.0)
    speeds.respond("b", 1.9)
    speeds.respond("c", 3.0)
    assert speeds.compute_s("a") == speeds.compute_s("b") == pytest.approx((1.0 + 1.9) / (100 + 100))
    assert speeds.compute_s("c") == pytest.approx(0.03)


def test_a_slow_replica_is_tried_again() -> None:
    speeds = SpeedTrial()
    speeds.respond("a", 1.0)
    speeds.respond("b", 10.0)
    assert speeds.compute_s("b") == pytest.approx(0.1)
    speeds.now_s += 30
    assert speeds.compute_s("b") == pytest.approx(0.01 + 0.09 / math.e)  # 30 s divide the difference from a by e
    speeds.now_s += 60
    assert speeds.measured.of("b") == speeds.measured.of("a")
    speeds.respond("b", 10.0)
    assert speeds.compute_s("b") == pytest.approx(0.1), "the new measurement counts"


def test_short_answers_and_failures_are_not_measured() -> None:
    speeds = SpeedTrial()
    speeds.respond("a", 1.0, 63)
    speeds.respond("a", 1.0, None)
    speeds.respond("a", 0.0, 64)
    assert speeds.measured.of("a") == DEFAULT_TIMES
    sent_s = speeds.now_s
    speeds.respond("a", 5.0, 1)
    speeds.respond("a", 1.0, 100, sent_s)
    assert speeds.compute_s("a") == pytest.approx(0.01), "only the time since the previous response counts"
