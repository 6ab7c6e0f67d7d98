"""Replays a trace through a fleet: real caches and the real router, on a virtual clock."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixkv.api.events import AllCleared, EventBatch, SnapshotPart
from radixkv.errors import ConfigError
from radixkv.events.block_identity import Identities
from radixkv.namespace import Namespace
from radixkv.planning.simulate import OPTIMAL, check_simulation
from radixkv.planning.simulated_replica import Job, SimulatedReplica
from radixkv.planning.trace import TOKENS_PER_ID, TraceRequest, prompt_tokens
from radixkv.routing.candidate import TokenTimes
from radixkv.routing.fleet_load import FleetLoad
from radixkv.routing.fleet_view import FleetView
from radixkv.routing.prefix_demand import PrefixDemand
from radixkv.routing.router import Router
from radixkv.routing.routings import ROUTINGS, make_routing
from radixkv.routing.rule import DEFAULT_RULE, Rule

_VOCAB_SIZE = 2**32
_LEAST_STEP_S = 1e-5  # so that time passes in a trace without times


@dataclass(frozen=True, slots=True)
class Fleet:
    """The fleet of a simulation.

    Attributes:
        replicas: number of them.
        capacity_tokens: that each one's cache holds.
        tokens_per_s: that each one computes.
        event_delay_s: from the end of a request until the router knows what it left in the cache.
    """

    replicas: int
    capacity_tokens: int
    tokens_per_s: float = 20_000.0
    event_delay_s: float = 0.01


@dataclass(frozen=True, slots=True)
class FleetSimulation:
    """The result of one routing.

    Attributes:
        routing: its name.
        policy: name of the eviction policy.
        replicas: number of them.
        capacity_tokens: that each one's cache holds.
        tokens_per_s: that each one computes.
        block_size: tokens a block.
        requests: number of replayed requests.
        prompt_tokens: tokens of all prompts.
        cached_tokens: prompt tokens that were reused.
        token_hit_rate: `cached_tokens / prompt_tokens`.
        evicted_tokens: evicted blocks times `block_size`, of all replicas.
        load_spread: tokens that the busiest replica computed, over the mean.
        busy: part of the time in which the mean replica computed.
        ttft_p50_s, ttft_p99_s: seconds from arrival to the end of the prefill.
        new_homes: prefixes that were computed once more because the replicas that had them were busy with them.
        seconds: wall time of the replay.
    """

    routing: str
    policy: str
    replicas: int
    capacity_tokens: int
    tokens_per_s: float
    block_size: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    token_hit_rate: float
    evicted_tokens: int
    load_spread: float
    busy: float
    ttft_p50_s: float
    ttft_p99_s: float
    new_homes: int
    seconds: float


def simulate_fleet(
    requests: Sequence[TraceRequest],
    fleet: Fleet,
    *,
    routing: str,
    policy: str = "adaptive",
    block_size: int = TOKENS_PER_ID,
    probation_share: float = 1.0,
    rule: Rule = DEFAULT_RULE,
    on_request: Callable[[], object] | None = None,
) -> FleetSimulation:
    """Replay a trace through a fleet on the trace's clock. The same arguments give the same counts everywhere.

    Each replica computes one prompt at a time, in order, in time in proportion to its uncached tokens. The router sees
    what a router sees: events after a delay, and what it sent. Every request is answered, however long it waits.

    Args:
        requests: the trace, in the order of its times.
        fleet: the replicas.
        routing: one of `ROUTINGS`.
        policy: eviction policy of the caches; `optimal` is none that a replica can have.
        block_size: tokens a block, of caches and events.
        probation_share: of the caches, as `PrefixCache` describes.
        rule: weights of the routing `prefix`.
        on_request: called after each request that was sent.

    Raises:
        ConfigError: an argument makes no sense.
    """
    check_fleet(fleet, routing=routing, policy=policy, block_size=block_size)
    start_s = time.perf_counter()
    replay = _Replay(fleet, routing, policy, block_size, probation_share, rule)
    for index, request in enumerate(requests):
        replay.send(index, request)
        if on_request is not None:
            on_request()
    replay.run_until(float("inf"))
    return _result(replay, requests, fleet, routing, policy, block_size, time.perf_counter() - start_s)


def check_fleet(fleet: Fleet, *, routing: str, policy: str, block_size: int = TOKENS_PER_ID) -> None:
    """Check the arguments of `simulate_fleet` before anything is replayed.

    Raises:
        ConfigError: they would be refused. The message names the argument.
    """
    check_simulation(policy=policy, capacity_tokens=fleet.capacity_tokens, block_size=block_size)
    if policy == OPTIMAL:
        raise ConfigError(f"policy: expected one that replicas can have, got {OPTIMAL}, which knows the future")
    if fleet.replicas < 1:
        raise ConfigError(f"replicas: expected at least 1, got {fleet.replicas}")
    if not fleet.tokens_per_s > 0:
        raise ConfigError(f"tokens_per_s: expected a positive number, got {fleet.tokens_per_s}")
    if not fleet.event_delay_s >= 0:
        raise ConfigError(f"event_delay_s: expected at least 0, got {fleet.event_delay_s}")
    if routing not in ROUTINGS:
        raise ConfigError(f"routing: expected one of {', '.join(ROUTINGS)}, got {routing}")


class _Replay:
    """Moves the clock from one end of a request, or arrival of events, to the next."""

    def __init__(
        self, fleet: Fleet, routing: str, policy: str, block_size: int, probation_share: float, rule: Rule
    ) -> None:
        self.now_s = 0.0
        self.num_new_homes = 0
        self._event_delay_s = fleet.event_delay_s
        self._namespace = Namespace("trace")
        self._due: list[tuple[float, int, int, EventBatch | None]] = []  # time, order, replica, events or an end
        self._num_due = 0
        identities, times = Identities(), TokenTimes(compute_s=1 / fleet.tokens_per_s)
        self.router = Router(
            FleetView(block_size, clock=self._clock),
            FleetLoad(clock=self._clock),
            PrefixDemand(clock=self._clock),
            make_routing(routing, rule),
            identities=identities,
            times=lambda name: times,
        )
        self.replicas = [
            SimulatedReplica(
                str(index),
                num_blocks=fleet.capacity_tokens // block_size,
                block_size=block_size,
                policy=policy,
                probation_share=probation_share,
                namespace=self._namespace,
                identities=identities,
                compute_s=times.compute_s,
                clock=self._clock,
            )
            for index in range(fleet.replicas)
        ]
        for replica in self.replicas:
            self.router.join(replica.name)
            self.router.read(replica.name, EventBatch(replica.number, 0.0, (AllCleared(),), SnapshotPart(0, 1, 0)))

    def send(self, index: int, request: TraceRequest) -> None:
        """Route a request at its time."""
        self.run_until(max(self.now_s + _LEAST_STEP_S, request.timestamp_ms / 1000))
        tokens = prompt_tokens(request, vocab_size=_VOCAB_SIZE).tobytes()
        route = self.router.route(self._namespace, tokens)
        self.router.remember()
        self.num_new_homes += route.is_new_home
        place = int(route.name)
        self._note(place, self.replicas[place].send(Job(index, self.now_s, tokens, route)))

    def run_until(self, end_s: float) -> None:
        """Let happen what happens until a time."""
        while self._due and self._due[0][0] <= end_s:
            self.now_s, _, place, batch = heapq.heappop(self._due)
            replica = self.replicas[place]
            if batch is not None:
                self.router.read(replica.name, batch)
                continue
            job, computed_tokens, next_end_s = replica.end()
            self.router.finished(job.route, computed_tokens)
            for news in replica.news():
                self._note(place, self.now_s + self._event_delay_s, news)
            self._note(place, next_end_s)
        if end_s < float("inf"):
            self.now_s = end_s

    def _note(self, place: int, when_s: float | None, batch: EventBatch | None = None) -> None:
        if when_s is not None:
            self._num_due += 1
            heapq.heappush(self._due, (when_s, self._num_due, place, batch))

    def _clock(self) -> float:
        return self.now_s


def _result(
    replay: _Replay,
    requests: Sequence[TraceRequest],
    fleet: Fleet,
    routing: str,
    policy: str,
    block_size: int,
    seconds: float,
) -> FleetSimulation:
    computed = [replica.computed_tokens for replica in replay.replicas]
    cached = sum(replica.cached_tokens for replica in replay.replicas)
    mean = sum(computed) / len(computed)
    waits_s = sorted(wait_s for replica in replay.replicas for wait_s in replica.waits_s)
    return FleetSimulation(
        routing,
        policy,
        fleet.replicas,
        fleet.capacity_tokens,
        fleet.tokens_per_s,
        block_size,
        len(requests),
        cached + sum(computed),
        cached,
        cached / (cached + sum(computed)),
        sum(replica.num_evicted_blocks for replica in replay.replicas) * block_size,
        max(computed) / mean,
        mean / fleet.tokens_per_s / replay.now_s,
        waits_s[len(waits_s) // 2],
        waits_s[len(waits_s) * 99 // 100],
        replay.num_new_homes,
        seconds,
    )
