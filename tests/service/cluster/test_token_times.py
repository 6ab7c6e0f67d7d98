from __future__ import annotations

import pytest

from radixkv.routing.candidate import DEFAULT_TIMES
from radixkv.service.cluster.token_times import MeasuredTimes


def test_a_replica_that_told_nothing_has_the_mean_of_the_others() -> None:
    times = MeasuredTimes()
    assert times.of("new") == DEFAULT_TIMES
    times.note("slow", 100, 3.0)
    times.note("fast", 100, 1.0)
    assert times.of("new").compute_s == pytest.approx(0.02)
    assert times.of("slow").compute_s == pytest.approx(0.03)


def test_later_answers_move_the_average() -> None:
    times = MeasuredTimes()
    times.note("a", 100, 1.0)
    times.note("a", 100, 2.0)
    assert times.of("a").compute_s == pytest.approx(0.011)


def test_short_answers_tell_nothing() -> None:
    times = MeasuredTimes()
    times.note("a", 63, 1.0)
    times.note("a", 64, 0.0)
    assert times.of("a") == DEFAULT_TIMES


def test_a_replica_is_forgotten() -> None:
    times = MeasuredTimes()
    times.note("a", 64, 1.0)
    times.forget("a")
    times.forget("b")
    assert times.of("a") == DEFAULT_TIMES


def test_one_that_has_told_nothing_has_the_mean_of_those_that_are_there() -> None:
    times = MeasuredTimes()
    times.note("a", 100, 1.0)
    times.note("b", 100, 3.0)
    assert times.of("c").compute_s == pytest.approx(0.02)
    times.forget("a")
    assert times.of("c").compute_s == pytest.approx(0.03)
