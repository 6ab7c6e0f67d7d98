"""Fleets with known results. Blocks have 512 tokens, and a replica computes 512 tokens per second."""

from __future__ import annotations

import dataclasses

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

from .traces import trace

WEIGHTS = RoutingWeights(least_match_tokens=512)


def conversations(num_conversations: int, num_turns: int) -> list[tuple[int, ...]]:
    """Return the first prompts of all conversations, then the second ones, which are a block longer, and so on."""
    return [
        tuple(range(1000 * conversation, 1000 * conversation + 2 + turn))
        for turn in range(num_turns)
        for conversation in range(num_conversations)
    ]


def run(
    requests: list[TraceRequest],
    num_replicas: int,
    routing: str = "prefix",
    num_blocks: int = 1000,
    event_delay_s: float = 0.01,
) -> FleetSimulation:
    """Simulate a fleet whose replicas have `num_blocks` blocks each."""
    fleet = Fleet(num_replicas, num_blocks * TOKENS_PER_ID, tokens_per_s=512.0, event_delay_s=event_delay_s)
    return simulate_fleet(requests, fleet, routing=routing, policy="lru", weights=WEIGHTS)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_fleet_of_one_replica_reuses_what_one_cache_reuses(routing: str) -> None:
    requests = trace(conversations(5, 6), every_ms=100_000)
    cache = simulate(requests, policy="lru", capacity_tokens=20 * TOKENS_PER_ID)
    fleet = run(requests, 1, routing, num_blocks=20)
    assert (fleet.cached_tokens, fleet.prompt_tokens) == (cache.cached_tokens, cache.prompt_tokens)
    assert (fleet.evicted_tokens, fleet.load_spread) == (cache.evicted_tokens, 1.0)


def test_conversations_stay_on_their_replica_and_spread_over_the_fleet() -> None:
    requests = trace(conversations(30, 6), every_ms=500)
    cache = simulate(requests, policy="lru", capacity_tokens=4000 * TOKENS_PER_ID)
    fleet = run(requests, 4)
    assert fleet.cached_tokens > 0.95 * cache.cached_tokens
    assert fleet.load_spread < 1.15
    assert run(requests, 4, "round-robin").cached_tokens < 0.75 * fleet.cached_tokens


def test_times_to_the_first_token_include_the_wait_for_earlier_requests() -> None:
    """Three requests of 1, 2 and 1 blocks arrive together: they end after 1, 3 and 4 seconds."""
    done = run(trace([(1,), (2, 3), (4,)], every_ms=0), 1)
    assert done.ttft_p99_s == pytest.approx(4.0, abs=0.1)
    assert done.ttft_p50_s == pytest.approx(3.0, abs=0.1)
    assert done.busy == pytest.approx(1.0, abs=0.01)


def test_cached_tokens_take_no_time() -> None:
    """The first request takes 4 seconds, and the second one, 100 seconds later, the time of one token."""
    done = run(trace([(1, 2, 3, 4)] * 2, every_ms=100_000), 1)
    assert done.ttft_p50_s == pytest.approx(4.0, abs=0.1)
    assert done.cached_tokens == 4 * TOKENS_PER_ID - 1
    assert done.busy == pytest.approx(0.04, rel=0.01)


def test_requests_with_one_prefix_go_to_one_replica_before_events_arrive() -> None:
    requests = trace([(1, 2, 3, 4)] * 4, every_ms=1000)
    assert run(requests, 4, event_delay_s=1e6).cached_tokens == 3 * (4 * TOKENS_PER_ID - 1)


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
    done = run(trace([(1,), (2, 3, 4), (1, 5)], every_ms=100_000), 1, num_blocks=2)
    assert (done.cached_tokens, done.prompt_tokens) == (512, 6 * 512)


def test_each_request_is_reported() -> None:
    calls: list[None] = []
    simulate_fleet(trace([(1,), (2,)]), Fleet(2, 5120), routing="random", on_request=lambda: calls.append(None))
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"replicas": 0}, "replicas: expected at least 1, got 0"),
        ({"capacity_tokens": 511}, "capacity_tokens: expected at least a block"),
        ({"tokens_per_s": 0.0}, "tokens_per_s: expected a positive number"),
        ({"event_delay_s": -1.0}, "event_delay_s: expected at least 0"),
    ],
)
def test_impossible_numbers_of_a_fleet_are_refused(change: dict[str, float], message: str) -> None:
    fleet = dataclasses.replace(Fleet(2, 5120), **change)
    with pytest.raises(ConfigError, match=message):
        check_fleet(fleet, routing="prefix", policy="lru")


def test_unsupported_policies_and_routings_are_refused() -> None:
    with pytest.raises(ConfigError, match="policy: expected one that replicas can have, got optimal"):
        check_fleet(Fleet(2, 5120), routing="prefix", policy="optimal")
    with pytest.raises(ConfigError, match="routing: expected one of prefix"):
        check_fleet(Fleet(2, 5120), routing="sideways", policy="lru")


class ReplicaAndClock:
    """A replica of two blocks of 4 tokens that computes one token per second, and the clock that it reads."""

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

    def send(self, ticket: int, *ids: int) -> float | None:
        """Send a prompt now. Returns when it ends; None if it waits for another request."""
        tokens = np.array(ids, "<u4").tobytes()
        return self.replica.send(SimulatedRequest(self.now_s, tokens, Route("a", Hits(), False, ticket)))


def test_requests_are_computed_one_after_the_other() -> None:
    setup = ReplicaAndClock()
    assert setup.send(0, 1, 2, 3, 4, 5) == 15.0  # 5 tokens from time 10 on
    setup.now_s = 11.0
    assert setup.send(1, 1, 2, 3, 4, 6, 7) is None
    setup.now_s = 15.0
    request, computed_tokens, next_end_s = setup.replica.end()
    assert (request.route.ticket, computed_tokens, next_end_s) == (0, 5, 17.0)  # 4 tokens are cached
    setup.now_s = 17.0
    request, computed_tokens, next_end_s = setup.replica.end()
    assert (request.route.ticket, computed_tokens, next_end_s) == (1, 2, None)
    assert (setup.replica.computed_tokens, setup.replica.cached_tokens) == (7, 4)
    assert setup.replica.ttfts_s == [5.0, 6.0]


def test_a_replica_passes_on_the_events_of_its_cache() -> None:
    setup = ReplicaAndClock()
    before = setup.replica.last_sequence_number
    assert before > 0
    for index in range(2):
        setup.send(index, *range(100 * index, 100 * index + 8))
        setup.replica.end()
    batches = list(setup.replica.take_events())
    assert [batch.sequence_number for batch in batches] == [before + 1, before + 2]
    assert [type(event) for batch in batches for event in batch.events] == [BlocksStored, BlocksRemoved, BlocksStored]
    assert list(setup.replica.take_events()) == []
    assert setup.replica.num_evicted_blocks == 2


def test_a_prompt_that_exceeds_the_cache_is_computed_and_not_cached() -> None:
    setup = ReplicaAndClock()
    assert setup.send(0, *range(9)) == 19.0
    assert setup.replica.end()[1] == 9
    assert list(setup.replica.take_events()) == []
