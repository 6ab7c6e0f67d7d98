from __future__ import annotations

import pytest

from radixkv.routing.candidate import DEFAULT_TIMES
from radixkv.service.fleet.replica_speeds import ReplicaSpeeds


class Told:
    """Times by answers of a test, at the times that it says."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.times = ReplicaSpeeds(lambda: self.now_s)

    def answer(
        self, name: str, seconds: float, computed_tokens: int | None = 100, asked_s: float | None = None
    ) -> None:
        """Let time pass until an answer comes to what was asked now, or before."""
        asked_s = self.now_s if asked_s is None else asked_s
        self.now_s += seconds
        self.times.note(name, asked_s, computed_tokens)

    def compute_s(self, name: str) -> float:
        return self.times.of(name).compute_s


def test_an_unmeasured_replica_has_the_mean_of_the_others() -> None:
    told = Told()
    assert told.times.of("new") == DEFAULT_TIMES
    told.answer("a", 1.0)
    told.answer("b", 1.5)
    assert told.compute_s("new") == pytest.approx(0.0125)
    told.times.forget("a")
    assert told.compute_s("new") == pytest.approx(0.015)
    told.times.forget("b")
    told.times.forget("c")
    assert told.times.of("b") == DEFAULT_TIMES


def test_later_answers_move_the_average_by_their_tokens() -> None:
    told = Told()
    told.answer("a", 1.0)
    told.answer("a", 2.0)
    assert told.compute_s("a") == pytest.approx((0.9 * 1 + 2) / (0.9 * 100 + 100))
    told = Told()
    told.answer("a", 1.0, 900)
    told.answer("a", 1.0, 100)
    assert told.compute_s("a") == pytest.approx((0.9 * 1 + 1) / (0.9 * 900 + 100))


def test_prompts_that_are_computed_side_by_side_do_not_make_a_replica_slow() -> None:
    told = Told()
    asked_s = told.now_s
    for _ in range(5):  # all asked at once, each takes a second of its own
        told.answer("busy", 1.0, asked_s=asked_s)
    assert told.compute_s("busy") == pytest.approx(0.01)


def test_an_idle_replica_is_not_slow() -> None:
    told = Told()
    told.answer("a", 1.0)
    told.now_s += 1000
    told.answer("a", 1.0)
    assert told.compute_s("a") == pytest.approx(0.01)


def test_what_differs_by_less_than_two_times_is_the_same() -> None:
    told = Told()
    told.answer("a", 1.0)
    told.answer("b", 1.9)
    told.answer("c", 3.0)
    assert told.compute_s("a") == told.compute_s("b") == pytest.approx(0.0145)
    assert told.compute_s("c") == pytest.approx(0.03)


def test_a_slow_replica_is_tried_again() -> None:
    told = Told()
    told.answer("a", 1.0)
    told.answer("b", 10.0)
    assert told.compute_s("b") == pytest.approx(0.1)
    told.now_s += 30
    assert told.compute_s("b") == pytest.approx(0.01 + 0.09 / 2.718, rel=1e-3)
    told.now_s += 60
    assert told.times.of("b") == told.times.of("a")
    told.answer("b", 10.0)
    assert told.compute_s("b") == pytest.approx(0.1), "and found slow again"


def test_short_answers_and_failures_tell_nothing() -> None:
    told = Told()
    told.answer("a", 1.0, 63)
    told.answer("a", 1.0, None)
    told.answer("a", 0.0, 64)
    assert told.times.of("a") == DEFAULT_TIMES
    asked_s = told.now_s
    told.answer("a", 5.0, 1)
    told.answer("a", 1.0, 100, asked_s)
    assert told.compute_s("a") == pytest.approx(0.01), "what came before it took its own time"
