from __future__ import annotations

import math

import pytest

from radixkv.routing.prefix_demand import PrefixDemand


def test_the_demand_of_a_prefix_is_the_number_of_replicas_that_its_requests_keep_busy() -> None:
    now_s = 0.0
    demand = PrefixDemand(memory_s=60, clock=lambda: now_s)
    for _ in range(6000):  # 0.2 s of work every 0.1 s
        demand.add(1, 0.2)
        now_s += 0.1
    assert demand.of(1) == pytest.approx(2, rel=0.01)
    assert demand.of(2) == 0


def test_the_demand_of_a_prefix_without_further_requests_decays() -> None:
    now_s = 0.0
    demand = PrefixDemand(memory_s=60, clock=lambda: now_s)
    demand.add(1, 60)
    assert demand.of(1) == 1
    now_s = 120.0
    assert demand.of(1) == pytest.approx(math.exp(-120 / 60))


def test_the_prefix_without_requests_for_the_longest_time_is_forgotten() -> None:
    demand = PrefixDemand(max_prefixes=2, clock=lambda: 0.0)
    for key in (1, 2, 1, 3):
        demand.add(key, 6)
    assert len(demand) == 2
    assert (demand.of(1) > 0, demand.of(2), demand.of(3) > 0) == (True, 0, True)
