from __future__ import annotations

from collections import Counter

import pytest

from bench.fleet.agents import agents_trace
from radixkv.planning.trace import TOKENS_PER_ID

TRACE = agents_trace(8000)


def test_the_trace_is_the_same_each_time_and_another_for_another_seed() -> None:
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
    seen: set[tuple[int, ...]] = set()
    sessions = 0
    added = Counter[int]()
    for request in TRACE:
        before = next((n for n in range(len(request.hash_ids) - 1, 0, -1) if request.hash_ids[:n] in seen), 0)
        sessions += not before
        if before:
            added[len(request.hash_ids) - before] += 1
        seen.add(request.hash_ids)
    assert 2.8 < len(TRACE) / sessions < 4
    assert sum(size * num for size, num in added.items()) / added.total() == pytest.approx(2, rel=0.05)
    assert len({request.hash_ids[0] for request in TRACE}) > 500
