"""Waiting calls by tenant."""

from __future__ import annotations

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
    for tenant in ("a", "a", "b"):
        lanes.add(tenant, 0)
    for tenant in ("a", "b", "c"):
        with pytest.raises(QueueFull):
            lanes.add(tenant, 0)
    lanes.take()
    lanes.add("c", 0)
    assert len(lanes) == 3
