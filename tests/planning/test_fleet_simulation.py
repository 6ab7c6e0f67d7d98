"""Fleets with known results. Blocks have 512 tokens, and a server computes 512 tokens per second."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import pytest

from radixkv.api.events import BlocksRemoved, BlocksStored
from radixkv.errors import ConfigError
from radixkv.events.block_identity import Identities
from radixkv.namespace import Namespace
from radixkv.planning.fleet_simulation import (
    Fleet,
    FleetSimulation,
    SimulatedReplica,
    SimulatedRequest,
    check_fleet,
    simulate_fleet,
)
from radixkv.planning.simulate import simulate
from radixkv.planning.trace import TOKENS_PER_ID, TraceRequest
from radixkv.routing.candidate import Hits
from radixkv.routing.policies import ROUTINGS, RoutingWeights
from radixkv.routing.router import Route

RULE = RoutingWeights(least_match_tokens=512)


def trace(paths: Iterable[tuple[int, ...]], every_ms: float = 100_000) -> list[TraceRequest]:
    return [
        TraceRequest(index * every_ms, len(path) * TOKENS_PER_ID, 1, tuple(path)) for index, path in enumerate(paths)
    ]


def conversations(num: int, turns: int) -> list[tuple[int, ...]]:
    """Turns of conversations that take turns; each turn is a block longer."""
    return [tuple(range(1000 * each, 1000 * each + turn + 2)) for turn in range(turns) for each in range(num)]


def run(
    requests: list[TraceRequest], replicas: int, routing: str = "prefix", num_blocks: int = 1000, delay_s: float = 0.01
) -> FleetSimulation:
    fleet = Fleet(replicas, num_blocks * TOKENS_PER_ID, tokens_per_s=512.0, event_delay_s=delay_s)
    return simulate_fleet(requests, fleet, routing=routing, policy="lru", weights=RULE)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_fleet_of_one_finds_what_one_cache_finds(routing: str) -> None:
    requests = trace(conversations(5, 6))
    alone = simulate(requests, policy="lru", capacity_tokens=20 * TOKENS_PER_ID)
    found = run(requests, 1, routing, num_blocks=20)
    assert (found.cached_tokens, found.prompt_tokens) == (alone.cached_tokens, alone.prompt_tokens)
    assert (found.evicted_tokens, found.load_spread) == (alone.evicted_tokens, 1.0)


def test_conversations_stay_where_they_began_and_share_the_fleet() -> None:
    requests = trace(conversations(30, 6), every_ms=500)
    alone = simulate(requests, policy="lru", capacity_tokens=4000 * TOKENS_PER_ID)
    found = run(requests, 4)
    assert found.cached_tokens > 0.95 * alone.cached_tokens
    assert found.load_spread < 1.15
    assert run(requests, 4, "round-robin").cached_tokens < 0.75 * found.cached_tokens


def test_times_are_those_of_a_queue() -> None:
    done = run(trace([(1,), (2, 3), (4,)], every_ms=0), 1)
    assert done.ttft_p99_s == pytest.approx(4.0, abs=0.1)
    assert done.ttft_p50_s == pytest.approx(3.0, abs=0.1)
    assert done.busy == pytest.approx(1.0, abs=0.01)


def test_what_is_cached_takes_no_time() -> None:
    done = run(trace([(1, 2, 3, 4)] * 2), 1)
    assert done.ttft_p50_s == pytest.approx(4.0, abs=0.1)
    assert done.cached_tokens == 4 * TOKENS_PER_ID - 1
    assert done.busy == pytest.approx(0.04, rel=0.01)


def test_requests_follow_each_other_before_events_tell() -> None:
    requests = trace([(1, 2, 3, 4)] * 4, every_ms=1000)
    assert run(requests, 4, delay_s=1e6).cached_tokens == 3 * (4 * TOKENS_PER_ID - 1)


def test_each_request_is_counted_once_whatever_the_routing() -> None:
    requests = trace(conversations(7, 5), every_ms=300)
    for routing in ROUTINGS:
        done = run(requests, 3, routing, num_blocks=12)
        assert done.requests == len(requests)
        assert done.prompt_tokens == sum(request.input_length for request in requests)
        assert done.token_hit_rate == done.cached_tokens / done.prompt_tokens


def test_the_same_trace_gives_the_same_counts() -> None:
    requests = trace(conversations(7, 5), every_ms=300)
    first, second = (dataclasses.replace(run(requests, 3, num_blocks=12), seconds=0.0) for _ in range(2))
    assert first == second


def test_a_prompt_larger_than_a_cache_is_a_miss_without_side_effects() -> None:
    done = run(trace([(1,), (2, 3, 4), (1, 5)]), 1, num_blocks=2)
    assert (done.cached_tokens, done.prompt_tokens) == (512, 6 * 512)


def test_each_request_is_reported() -> None:
    seen: list[int] = []
    simulate_fleet(trace([(1,), (2,)]), Fleet(2, 5120), routing="random", on_request=lambda: seen.append(1))
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"replicas": 0}, "replicas: expected at least 1, got 0"),
        ({"capacity_tokens": 511}, "capacity_tokens: expected at least a block"),
        ({"tokens_per_s": 0.0}, "tokens_per_s: expected a positive number"),
        ({"event_delay_s": -1.0}, "event_delay_s: expected at least 0"),
    ],
)
def test_a_fleet_that_can_not_be_is_refused(change: dict[str, float], message: str) -> None:
    fleet = dataclasses.replace(Fleet(2, 5120), **change)
    with pytest.raises(ConfigError, match=message):
        check_fleet(fleet, routing="prefix", policy="lru")


def test_names_that_a_fleet_can_not_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="policy: expected one that replicas can have, got optimal"):
        check_fleet(Fleet(2, 5120), routing="prefix", policy="optimal")
    with pytest.raises(ConfigError, match="routing: expected one of prefix"):
        check_fleet(Fleet(2, 5120), routing="sideways", policy="lru")


class World:
    """A replica of two blocks of 4 tokens that computes a token in a second."""

    def __init__(self) -> None:
        self.now_s = 10.0
        self.replica = SimulatedReplica(
            "a",
            num_blocks=2,
            block_size=4,
            policy="lru",
            probation_share=1.0,
            namespace=Namespace("m"),
            identities=Identities(),
            compute_s=1.0,
            clock=lambda: self.now_s,
        )

    def send(self, index: int, *ids: int) -> float | None:
        tokens = np.array(ids, "<u4").tobytes()
        return self.replica.send(SimulatedRequest(index, self.now_s, tokens, Route("a", Hits(), False, index)))


def test_requests_are_computed_one_after_the_other() -> None:
    world = World()
    assert world.send(0, 1, 2, 3, 4, 5) == 15.0
    world.now_s = 11.0
    assert world.send(1, 1, 2, 3, 4, 6, 7) is None
    world.now_s = 15.0
    request, computed_tokens, next_end_s = world.replica.end()
    assert (request.index, computed_tokens, next_end_s) == (0, 5, 17.0)  # 4 tokens are cached
    world.now_s = 17.0
    request, computed_tokens, next_end_s = world.replica.end()
    assert (request.index, computed_tokens, next_end_s) == (1, 2, None)
    assert (world.replica.computed_tokens, world.replica.cached_tokens) == (7, 4)
    assert world.replica.ttfts_s == [5.0, 6.0]


def test_news_are_the_events_of_the_cache() -> None:
    world = World()
    number = world.replica.last_sequence_number
    assert number > 0
    for index in range(2):
        world.send(index, *range(100 * index, 100 * index + 8))
        world.replica.end()
    batches = list(world.replica.take_events())
    assert [batch.sequence_number for batch in batches] == [number + 1, number + 2]
    assert [type(event) for batch in batches for event in batch.events] == [BlocksStored, BlocksRemoved, BlocksStored]
    assert list(world.replica.take_events()) == []
    assert world.replica.num_evicted_blocks == 2


def test_a_prompt_without_room_is_computed_and_not_cached() -> None:
    world = World()
    assert world.send(0, *range(9)) == 19.0
    assert world.replica.end()[1] == 9
    assert list(world.replica.take_events()) == []
