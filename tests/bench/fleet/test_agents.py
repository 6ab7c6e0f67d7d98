from __future__ import annotations

import statistics

import pytest

from bench.fleet.agents import agents_trace
from radixkv.planning.trace import TOKENS_PER_ID

TRACE = agents_trace(8000)


def test_a_seed_always_makes_the_same_trace() -> None:
    assert agents_trace(200) == agents_trace(200)
    assert agents_trace(200) != agents_trace(200, seed=1)


def test_requests_are_in_order_and_fill_their_blocks() -> None:
    times = [request.timestamp_ms for request in TRACE]
    assert times == sorted(times)
    assert times[-1] <= 3_600_000
    for request in TRACE:
        assert len(set(request.hash_ids)) == len(request.hash_ids)
        assert (
            TOKENS_PER_ID * (len(request.hash_ids) - 1) < request.input_length <= TOKENS_PER_ID * len(request.hash_ids)
        )


def test_the_statistics_are_the_documented_ones() -> None:
    assert 5500 < len(TRACE) <= 8000  # the sessions of the last minutes continue after the end
    earlier_prompts: set[tuple[int, ...]] = set()
    num_sessions = 0
    num_blocks_added: list[int] = []  # by each later request of a session
    for request in TRACE:
        prefix_lengths = range(len(request.hash_ids) - 1, 0, -1)
        num_old_blocks = next((n for n in prefix_lengths if request.hash_ids[:n] in earlier_prompts), 0)
        if num_old_blocks:
            num_blocks_added.append(len(request.hash_ids) - num_old_blocks)
        else:
            num_sessions += 1
        earlier_prompts.add(request.hash_ids)
    assert 2.8 < len(TRACE) / num_sessions < 4
    assert statistics.mean(num_blocks_added) == pytest.approx(2, rel=0.05)
    assert len({request.hash_ids[0] for request in TRACE}) > 500
