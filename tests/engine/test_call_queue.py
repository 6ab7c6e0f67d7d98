"""The fair queue of calls."""

from __future__ import annotations

import random

import pytest

from radixkv.engine.call_queue import FairCallQueue
from radixkv.errors import QueueFull


def take_all(queue: FairCallQueue[int]) -> list[tuple[str, int]]:
    taken = []
    while (call := queue.take()) is not None:
        taken.append(call)
    return taken


def test_tenants_take_turns_and_keep_their_own_order() -> None:
    queue = FairCallQueue[int](10, 10)
    for tenant, call in (("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5), ("b", 6)):
        queue.add(tenant, call)
    assert len(queue) == 6
    assert take_all(queue) == [("a", 1), ("b", 4), ("c", 5), ("a", 2), ("b", 6), ("a", 3)]
    assert len(queue) == 0


def test_a_tenant_that_returns_is_behind_those_that_wait() -> None:
    queue = FairCallQueue[int](10, 10)
    for tenant, call in (("a", 1), ("b", 2), ("b", 3)):
        queue.add(tenant, call)
    assert queue.take() == ("a", 1)
    queue.add("a", 4)
    assert take_all(queue) == [("b", 2), ("a", 4), ("b", 3)]


def test_a_call_that_is_put_back_precedes_the_others_of_its_tenant() -> None:
    queue = FairCallQueue[int](10, 10)
    for tenant, call in (("a", 1), ("a", 2), ("b", 3)):
        queue.add(tenant, call)
    queue.put_back(*queue.take())  # type: ignore[misc]
    assert len(queue) == 3
    assert take_all(queue) == [("b", 3), ("a", 1), ("a", 2)]


def test_calls_are_bounded_in_total_and_per_tenant_and_room_is_freed() -> None:
    queue = FairCallQueue[int](max_calls=3, max_tenant_calls=2)
    for tenant in ("a", "b", "c"):
        assert queue.add(tenant, 0) is None
    for tenant in ("a", "d"):
        with pytest.raises(QueueFull, match="expected fewer than 3 waiting calls, got 3"):
            queue.add(tenant, 0)
    queue.take()
    assert queue.add("c", 0) is None
    with pytest.raises(QueueFull, match="expected fewer than 2 waiting calls of this tenant, got 2"):
        queue.add("c", 0)
    assert len(queue) == 3


def test_the_newest_call_of_the_tenant_with_the_most_makes_room_for_one_with_fewer() -> None:
    queue = FairCallQueue[int](max_calls=6, max_tenant_calls=4)
    for tenant, call in (("a", 1), ("b", 2), ("b", 3), ("b", 4), ("a", 5), ("a", 6)):
        queue.add(tenant, call)
    assert [queue.add("c", 7), queue.add("d", 8)] == [6, 4]
    for tenant in ("a", "b", "c", "d"):  # they have two, two, one and one calls, so no exchange would be fairer
        with pytest.raises(QueueFull):
            queue.add(tenant, 9)
    assert len(queue) == 6


def test_few_tenants_do_not_keep_another_one_out_and_counts_stay_correct_in_random_walks() -> None:
    rng = random.Random(1)
    max_calls, max_tenant_calls = 40, 16
    queue = FairCallQueue[int](max_calls, max_tenant_calls)
    num_waiting = dict.fromkeys("abcdefg", 0)  # by tenant
    for number in range(20_000):
        if rng.random() < 0.45:
            if (taken := queue.take()) is not None:
                num_waiting[taken[0]] -= 1
                if rng.random() < 0.3:
                    queue.put_back(*taken)
                    num_waiting[taken[0]] += 1
            continue
        tenant = rng.choice("aaaaabbbbcccddefg")
        most_waiting = max(num_waiting.values())
        try:
            removed = queue.add(tenant, number)
        except QueueFull:
            is_total_full = len(queue) >= max_calls and num_waiting[tenant] + 1 >= most_waiting
            assert num_waiting[tenant] == max_tenant_calls or is_total_full
            continue
        num_waiting[tenant] += 1
        if removed is not None:
            num_waiting = {each: len(queue._by_tenant.get(each, ())) for each in num_waiting}
            assert max(num_waiting.values()) in (most_waiting, most_waiting - 1)
        assert len(queue) == sum(num_waiting.values()) <= max_calls + 1
        assert num_waiting == {each: len(queue._by_tenant.get(each, ())) for each in num_waiting}
