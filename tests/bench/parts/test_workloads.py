"""Workloads are reproducible, and have the properties that their names state."""

from __future__ import annotations

import numpy as np
import pytest

from bench.parts.workloads import (
    WorkItem,
    mooncake,
    poisson_arrivals,
    shared_prefix,
    spread_order,
    trace_arrivals,
    unrelated_prompts,
)
from radixkv.planning.trace import TraceRequest
from tests.cache.walk.reusable_tokens import count_reusable_tokens


def prompts_of(items: list[WorkItem]) -> list[list[int]]:
    return [item.token_ids.tolist() for item in items]


def items_at(*arrivals_s: float) -> list[WorkItem]:
    """Return prompts of one token each, which is the index of the prompt."""
    return [WorkItem(arrival_s, np.array([i], np.uint32)) for i, arrival_s in enumerate(arrivals_s)]


def test_shared_prefix_is_the_same_for_the_same_arguments() -> None:
    first, second = (prompts_of(shared_prefix(10, 37, 17, 3, 256, seed=5)) for _ in range(2))
    assert first == second
    assert first != prompts_of(shared_prefix(10, 37, 17, 3, 256, seed=6))


def test_the_tokens_of_a_seed_never_change() -> None:
    assert shared_prefix(1, 3, 2, 1, 256, seed=7)[0].token_ids.tolist() == [1, 107, 24, 34, 185]


def test_a_group_shares_its_prefix_and_nothing_else() -> None:
    items = shared_prefix(9, 37, 17, 3, 2**32, seed=0)
    assert all(item.token_ids.shape == (54,) and item.token_ids.dtype == np.uint32 for item in items)
    assert count_reusable_tokens(prompts_of(items)) == [0, 0, 0, 37, 37, 37, 37, 37, 37]


def test_warm_up_prompts_share_no_prefix_with_the_traffic() -> None:
    prompts = [*prompts_of(shared_prefix(3, 37, 17, 1, 2**32, seed=0))]
    prompts += [prompt.tolist() for prompt in unrelated_prompts(3, 54, 2**32)]
    assert count_reusable_tokens(prompts) == [0, 37, 37, 0, 0, 0]


def test_mooncake_keeps_order_and_counts_arrivals_from_the_first() -> None:
    requests = [TraceRequest(3000, 700, 1, (4, 5)), TraceRequest(3500.0, 512, 1, (4,))]
    items = mooncake(requests, 2**32, scale=1 / 8)
    assert [item.arrival_s for item in items] == [0.0, 0.5]
    assert [len(item.token_ids) for item in items] == [64 + 24, 64]  # an eighth of 512 and of 700 tokens, rounded up
    assert count_reusable_tokens(prompts_of(items)) == [0, 63]


def test_trace_arrivals_are_in_order_and_sped_up() -> None:
    items = trace_arrivals(items_at(4.0, 0.0, 2.0, 2.0), speedup=2)
    assert [item.arrival_s for item in items] == [0.0, 1.0, 1.0, 2.0]
    assert [int(item.token_ids[0]) for item in items] == [1, 2, 3, 0]


def test_poisson_arrivals_have_the_requested_rate() -> None:
    items = items_at(*[0.0] * 20_000)
    arrivals_s = np.array([item.arrival_s for item in poisson_arrivals(items, rate_per_s=50, seed=1)])
    gaps_s = np.diff(arrivals_s)
    assert arrivals_s[0] == 0
    assert (gaps_s >= 0).all()
    assert gaps_s.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps_s.std() == pytest.approx(1 / 50, rel=0.03)  # exponential: deviation equals mean


@pytest.mark.parametrize("num_items", [0, 1, 2, 5, 10, 17, 55, 100, 500, 999, 1000, 1001, 4096])
def test_a_spread_order_has_every_index_once(num_items: int) -> None:
    assert sorted(spread_order(num_items)) == list(range(num_items))


@pytest.mark.parametrize("num_first", [1, 2, 3, 16, 100, 212, 431])
def test_every_beginning_of_a_spread_order_is_spread_evenly(num_first: int) -> None:
    indices = sorted(spread_order(1000)[:num_first])
    assert indices[0] == 0
    assert np.diff([*indices, 1000]).max() <= 2 * (1000 / num_first) + 1
