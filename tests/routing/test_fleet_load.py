"""Queue lengths and recently computed tokens, with a clock that tests set."""

from __future__ import annotations

import pytest

from radixkv.routing.fleet_load import FleetLoad
from tests.fakes import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def load(clock: FakeClock) -> FleetLoad:
    load = FleetLoad(half_life_s=10, lost_s=60, clock=clock)
    load.join("a")
    load.join("b")
    return load


def queue_tokens(load: FleetLoad, name: str) -> int:
    ((num_queue_tokens, _),) = load.waits([name], "", [0])
    return num_queue_tokens


def recent_tokens(load: FleetLoad, name: str) -> float:
    ((_, num_recent_tokens),) = load.waits([name], "", [0])
    return num_recent_tokens


def test_the_queue_of_a_replica_is_the_tokens_that_were_sent_and_are_not_finished(load: FleetLoad) -> None:
    first, second = load.sent("a", 100), load.sent("a", 30)
    assert (queue_tokens(load, "a"), queue_tokens(load, "b")) == (130, 0)
    assert load.finished("a", first)
    assert not load.finished("a", first)
    assert queue_tokens(load, "a") == 30
    load.finished("a", second)
    assert queue_tokens(load, "a") == 0


def test_a_request_whose_end_is_never_reported_is_forgotten(load: FleetLoad, clock: FakeClock) -> None:
    load.sent("a", 100)
    clock.now_s += 59
    load.sent("a", 1)
    assert queue_tokens(load, "a") == 101
    clock.now_s += 1
    assert queue_tokens(load, "a") == 1


def test_computed_tokens_count_half_after_the_half_life(load: FleetLoad, clock: FakeClock) -> None:
    load.sent("a", 800)
    clock.now_s += 10
    load.sent("a", 100)
    assert recent_tokens(load, "a") == pytest.approx(500)
    clock.now_s += 20
    assert recent_tokens(load, "a") == pytest.approx(125)


def test_the_number_of_computed_tokens_is_corrected_when_a_request_has_finished(
    load: FleetLoad, clock: FakeClock
) -> None:
    ticket = load.sent("a", 800)
    clock.now_s += 10
    load.finished("a", ticket, 200)
    assert recent_tokens(load, "a") == pytest.approx(100)


def test_a_newcomer_counts_as_the_mean_of_the_others(load: FleetLoad) -> None:
    load.sent("a", 600)
    load.join("c")
    assert recent_tokens(load, "c") == pytest.approx(300)
    load.join("a")  # as a newcomer, it counts as the mean of b, with 0 tokens, and c, with 300
    assert recent_tokens(load, "a") == pytest.approx(150)


def test_the_end_of_a_request_to_a_replica_that_left_changes_nothing(load: FleetLoad) -> None:
    ticket = load.sent("a", 600)
    load.leave("a")
    load.leave("a")
    load.finished("a", ticket, 600)
    load.join("a")
    load.finished("a", ticket, 600)
    assert (queue_tokens(load, "a"), recent_tokens(load, "a")) == (0, 0)


def test_a_tenant_waits_for_as_many_tokens_of_each_other_as_of_its_own(load: FleetLoad) -> None:
    load.sent("a", 1000, "flood")
    load.sent("a", 30, "small")
    load.sent("b", 50, "small")
    assert load.waits(["a", "b"], "small", [20, 20]) == [(30 + 50, 1030), (50, 50)]
    assert load.waits(["a", "b"], "flood", [20, 20]) == [(1030, 1030), (20, 50)]
    assert load.waits(["a"], "new", [10]) == [(20, 1030)]


def test_a_request_whose_end_is_never_reported_is_forgotten_on_each_replica_after_the_same_time(
    load: FleetLoad, clock: FakeClock
) -> None:
    load.sent("a", 100)
    clock.now_s += 30
    ticket = load.sent("b", 10)
    load.sent("b", 7)
    clock.now_s += 30
    load.finished("b", ticket)
    assert (queue_tokens(load, "b"), queue_tokens(load, "a")) == (7, 0)
    clock.now_s += 29
    assert queue_tokens(load, "b") == 7
    clock.now_s += 1
    assert queue_tokens(load, "b") == 0
