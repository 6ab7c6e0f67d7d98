"""Waiting calls by tenant."""

from __future__ import annotations

import random

import pytest

from radixkv.engine.calls.lanes import Lanes
from radixkv.errors import QueueFull


def take_all(lanes: Lanes[int]) -> list[tuple[str, int]]:
    taken = []
    while (call := lanes.take()) is not None:
        taken.append(call)
    return taken


def test_tenants_take_turns_and_keep_their_own_order() -> None:
    lanes = Lanes[int](10, 10)
    for tenant, call in (("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5), ("b", 6)):
        lanes.add(tenant, call)
    assert len(lanes) == 6
    assert take_all(lanes) == [("a", 1), ("b", 4), ("c", 5), ("a", 2), ("b", 6), ("a", 3)]
    assert len(lanes) == 0


def test_a_tenant_that_comes_back_is_behind_those_that_wait() -> None:
    lanes = Lanes[int](10, 10)
    for tenant, call in (("a", 1), ("b", 2), ("b", 3)):
        lanes.add(tenant, call)
    assert lanes.take() == ("a", 1)
    lanes.add("a", 4)
    assert take_all(lanes) == [("b", 2), ("a", 4), ("b", 3)]


def test_a_call_that_is_put_back_goes_before_the_others_of_its_tenant() -> None:
    lanes = Lanes[int](10, 10)
    for tenant, call in (("a", 1), ("a", 2), ("b", 3)):
        lanes.add(tenant, call)
    lanes.put_back(*lanes.take())  # type: ignore[misc]
    assert len(lanes) == 3
    assert take_all(lanes) == [("b", 3), ("a", 1), ("a", 2)]


def test_bounds_hold_for_all_and_for_each_and_room_comes_back() -> None:
    lanes = Lanes[int](3, 2)
    for tenant in ("a", "b", "c"):
        assert lanes.add(tenant, 0) is None
    for tenant in ("a", "d"):
        with pytest.raises(QueueFull, match="expected fewer than 3 waiting calls, got 3"):
            lanes.add(tenant, 0)
    lanes.take()
    assert lanes.add("c", 0) is None
    with pytest.raises(QueueFull, match="expected fewer than 2 waiting calls of this tenant, got 2"):
        lanes.add("c", 0)
    assert len(lanes) == 3


def test_the_newest_call_of_the_longest_lane_makes_room_for_a_shorter_one() -> None:
    lanes = Lanes[int](6, 4)
    for tenant, call in (("a", 1), ("b", 2), ("b", 3), ("b", 4), ("a", 5), ("a", 6)):
        lanes.add(tenant, call)
    assert [lanes.add("c", 7), lanes.add("d", 8)] == [6, 4]
    for tenant in ("a", "b", "c", "d"):  # two, two, one and one: nobody gains what another one loses
        with pytest.raises(QueueFull):
            lanes.add(tenant, 9)
    assert len(lanes) == 6


def test_no_tenants_keep_another_one_out_and_counts_stay_right_in_random_walks() -> None:
    chance = random.Random(1)
    lanes, waiting = Lanes[int](40, 16), dict.fromkeys("abcdefg", 0)
    for number in range(20_000):
        if chance.random() < 0.45:
            if (taken := lanes.take()) is not None:
                waiting[taken[0]] -= 1
                if chance.random() < 0.3:
                    lanes.put_back(*taken)
                    waiting[taken[0]] += 1
            continue
        tenant = chance.choice("aaaaabbbbcccddefg")
        longest = max(waiting.values())
        try:
            removed = lanes.add(tenant, number)
        except QueueFull:
            assert waiting[tenant] == 16 or (len(lanes) >= 40 and waiting[tenant] + 1 >= longest)
            continue
        waiting[tenant] += 1
        if removed is not None:
            waiting = {each: len(lanes._lanes.get(each, ())) for each in waiting}
            assert sorted(waiting.values())[-1] in (longest, longest - 1)
        assert len(lanes) == sum(waiting.values()) <= 41
        assert waiting == {each: len(lanes._lanes.get(each, ())) for each in waiting}
