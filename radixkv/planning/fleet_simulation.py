"""Replays a trace through a fleet: real caches and the real router, on a virtual clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from radixkv.api.events import AllCleared, EventBatch, SnapshotPart
from radixkv.cache.lease import Lease
from radixkv.cache.policies import make_policy
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.errors import ConfigError
from radixkv.events.block_identity import Identities
from radixkv.events.event_log import EventLog
from radixkv.events.tree_feed import TreeFeed
from radixkv.namespace import Namespace
from radixkv.planning.simulate import OPTIMAL, check_simulation
from radixkv.planning.trace import MIN_STEP_S, TOKENS_PER_ID, TraceRequest, prompt_tokens
from radixkv.planning.virtual_clock import VirtualClock
from radixkv.routing.candidate import TokenTimes
from radixkv.routing.fleet_load import FleetLoad
from radixkv.routing.fleet_view import FleetView
from radixkv.routing.policies import DEFAULT_WEIGHTS, ROUTINGS, RoutingWeights, make_routing
from radixkv.routing.prefix_demand import PrefixDemand
from radixkv.routing.router import Route, Router
from radixkv.tokens import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Fleet:
    """The fleet of a simulation.

    Attributes:
        replicas: number of replicas.
        capacity_tokens: cache capacity per replica.
        tokens_per_s: prefill rate per replica.
        event_delay_s: delay from the end of a request until its events reach the router.
    """

    replicas: int
    capacity_tokens: int
    tokens_per_s: float = 20_000.0
    event_delay_s: float = 0.01


@dataclass(frozen=True, slots=True)
class FleetSimulation:
    """The result of one routing policy.

    Attributes:
        routing: name of the routing policy.
        policy: name of the eviction policy.
        replicas: number of replicas.
        capacity_tokens: cache capacity per replica.
        tokens_per_s: prefill rate per replica.
        block_size: tokens per block.
        requests: number of replayed requests.
        prompt_tokens: tokens of all prompts.
        cached_tokens: prompt tokens that were reused.
        token_hit_rate: `cached_tokens / prompt_tokens`.
        evicted_tokens: evicted blocks times `block_size`, of all replicas.
        load_spread: computed tokens of the busiest replica divided by the mean.
        busy: fraction of the time that a replica spent computing, on average.
        ttft_p50_s, ttft_p99_s: seconds from arrival to the end of the prefill.
        new_homes: number of times that a prefix was computed on a further replica because of its demand.
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
    weights: RoutingWeights = DEFAULT_WEIGHTS,
    on_request: Callable[[], object] | None = None,
) -> FleetSimulation:
    """Replay a trace through a fleet on the trace's clock. The same arguments give the same counts everywhere.

    Each replica computes one prompt at a time, in order, in a time proportional to its uncached tokens. The router
    receives events after a delay, and knows immediately which requests it sent. No request times out.

    Args:
        requests: the trace, in the order of its times.
        fleet: the replicas.
        routing: one of `ROUTINGS`.
        policy: eviction policy of the caches; not `optimal`.
        block_size: tokens per block, of caches and events.
        probation_share: see `PrefixCache`.
        weights: weights of the policy `prefix`.
        on_request: called after each request is sent.

    Raises:
        ConfigError: an argument is invalid.
    """
    check_fleet(fleet, routing=routing, policy=policy, block_size=block_size)
    start_s = time.perf_counter()
    replay = _FleetReplay(fleet, routing, policy, block_size, probation_share, weights)
    for request in requests:
        replay.send(request)
        if on_request is not None:
            on_request()
    replay.finish()

    computed_tokens = [replica.computed_tokens for replica in replay.replicas]
    cached_tokens = sum(replica.cached_tokens for replica in replay.replicas)
    num_prompt_tokens = cached_tokens + sum(computed_tokens)
    mean_computed_tokens = sum(computed_tokens) / len(computed_tokens)
    ttfts_s = sorted(ttft_s for replica in replay.replicas for ttft_s in replica.ttfts_s)
    return FleetSimulation(
        routing=routing,
        policy=policy,
        replicas=fleet.replicas,
        capacity_tokens=fleet.capacity_tokens,
        tokens_per_s=fleet.tokens_per_s,
        block_size=block_size,
        requests=len(requests),
        prompt_tokens=num_prompt_tokens,
        cached_tokens=cached_tokens,
        token_hit_rate=cached_tokens / num_prompt_tokens,
        evicted_tokens=sum(replica.num_evicted_blocks for replica in replay.replicas) * block_size,
        load_spread=max(computed_tokens) / mean_computed_tokens,
        busy=mean_computed_tokens / fleet.tokens_per_s / replay.clock.now_s,
        ttft_p50_s=ttfts_s[len(ttfts_s) // 2],
        ttft_p99_s=ttfts_s[len(ttfts_s) * 99 // 100],
        new_homes=replay.num_new_homes,
        seconds=time.perf_counter() - start_s,
    )


def check_fleet(fleet: Fleet, *, routing: str, policy: str, block_size: int = TOKENS_PER_ID) -> None:
    """Check the arguments of `simulate_fleet` before anything is replayed.

    Raises:
        ConfigError: an argument is invalid. The message names it.
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


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request that was sent to a replica.

    Attributes:
        arrival_s: time of arrival.
        tokens: the prompt, little-endian uint32 bytes.
        route: the decision of the router.
    """

    arrival_s: float
    tokens: bytes
    route: Route


class SimulatedReplica:
    """Computes whole prompts in order of arrival, in a time proportional to their uncached tokens.

    Args:
        name: name of the replica.
        num_blocks, block_size, policy, probation_share: arguments of the cache. Events have the same block size.
        namespace: the namespace of all requests.
        identities: published names of namespaces, shared with the router.
        compute_s: seconds per computed token.
        clock: returns the time of the simulation in seconds.

    Attributes:
        computed_tokens, cached_tokens: totals of the finished prompts.
        ttfts_s: for each finished prompt, the seconds from its arrival to the end of its prefill.
    """

    def __init__(
        self,
        name: str,
        *,
        num_blocks: int,
        block_size: int,
        policy: str,
        probation_share: float,
        namespace: Namespace,
        identities: Identities,
        compute_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.computed_tokens = 0
        self.cached_tokens = 0
        self.ttfts_s: list[float] = []
        self._namespace = namespace
        self._compute_s = compute_s
        self._clock = clock
        self._queue: deque[SimulatedRequest] = deque()
        self._running: tuple[SimulatedRequest, Lease | None, int] | None = None
        # Sequence numbers begin at the clock's microseconds. They must not begin at 0, which would request a snapshot.
        self._log = EventLog(clock=lambda: clock() + 1.0)
        self._feed = TreeFeed(self._log, block_size, block_size, identities)
        self._last_sequence_number = self._log.start
        self._cache = PrefixCache(
            num_blocks,
            block_size,
            policy=make_policy(policy, num_blocks),
            probation_share=probation_share,
            max_evicted_prefixes=0,
            listeners=[self._feed],
            clock=clock,
        )
        self._feed.switch_on(self._cache.nodes)

    @property
    def num_evicted_blocks(self) -> int:
        """Number of blocks that the cache of the replica evicted."""
        return self._cache.num_evicted_blocks

    @property
    def last_sequence_number(self) -> int:
        """Sequence number of the last batch of events that was read."""
        return self._last_sequence_number

    def send(self, request: SimulatedRequest) -> float | None:
        """Queue a request. Return the time at which its prefill will end, or None if another prefill is running."""
        self._queue.append(request)
        return self._begin() if self._running is None else None

    def end(self) -> tuple[SimulatedRequest, int, float | None]:
        """Finish the running request and start the next one.

        Returns:
            The finished request, its computed tokens, and the time at which the next request will finish; None instead
            of a time if no request is queued.
        """
        assert self._running is not None
        request, lease, computed_tokens = self._running
        if lease is not None:
            lease.commit(lease.num_tokens)
            lease.close()
            self._feed.publish()
        self.computed_tokens += computed_tokens
        self.cached_tokens += len(request.tokens) // TOKEN_BYTES - computed_tokens
        self.ttfts_s.append(self._clock() - request.arrival_s)
        self._running = None
        return request, computed_tokens, self._begin() if self._queue else None

    def take_events(self) -> Iterator[EventBatch]:
        """Iterate over the batches since the last call."""
        while (batch := self._log.after(self._last_sequence_number)) is not None:
            self._last_sequence_number = batch.sequence_number
            yield batch

    def _begin(self) -> float:
        request = self._queue.popleft()
        num_tokens = len(request.tokens) // TOKEN_BYTES
        lease = None
        if num_tokens <= self._cache.pool.num_blocks * self._cache.block_size:
            lease = self._cache.lease(self._namespace, request.tokens)
        computed_tokens = num_tokens - (lease.cached_tokens if lease is not None else 0)
        self._running = request, lease, computed_tokens
        return self._clock() + computed_tokens * self._compute_s


class _FleetReplay:
    """Routes requests to replicas on a virtual clock, on which requests end and cache events arrive at the router."""

    def __init__(
        self, fleet: Fleet, routing: str, policy: str, block_size: int, probation_share: float, weights: RoutingWeights
    ) -> None:
        self.clock = VirtualClock()
        self.num_new_homes = 0
        self._event_delay_s = fleet.event_delay_s
        self._namespace = Namespace("trace")
        identities, times = Identities(), TokenTimes(compute_s=1 / fleet.tokens_per_s)
        self.router = Router(
            FleetView(block_size, clock=self.clock),
            FleetLoad(clock=self.clock),
            PrefixDemand(clock=self.clock),
            make_routing(routing, weights),
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
                clock=self.clock,
            )
            for index in range(fleet.replicas)
        ]
        for replica in self.replicas:
            self.router.join(replica.name)
            snapshot = EventBatch(replica.last_sequence_number, 0.0, (AllCleared(),), SnapshotPart(0, 1, 0))
            self.router.read(replica.name, snapshot)

    def send(self, request: TraceRequest) -> None:
        """Route a request at its arrival time."""
        self.clock.advance(max(self.clock.now_s + MIN_STEP_S, request.timestamp_ms / 1000))
        tokens = prompt_tokens(request).tobytes()
        route = self.router.route(self._namespace, tokens)
        self.router.remember()
        self.num_new_homes += route.is_new_home
        replica = self.replicas[int(route.name)]
        self._end_at(replica.send(SimulatedRequest(self.clock.now_s, tokens, route)), replica)

    def finish(self) -> None:
        """Advance the clock until all requests have ended, and the router has received all events."""
        while (next_s := self.clock.next_s) is not None:
            self.clock.advance(next_s)

    def _end_at(self, end_s: float | None, replica: SimulatedReplica) -> None:
        if end_s is not None:
            self.clock.call_at(end_s, partial(self._end, replica))

    def _end(self, replica: SimulatedReplica) -> None:
        """End the running request of a replica, and send its events to the router."""
        request, computed_tokens, next_end_s = replica.end()
        self.router.finished(request.route, computed_tokens)
        for batch in replica.take_events():
            read = partial(self.router.read, replica.name, batch)
            self.clock.call_at(self.clock.now_s + self._event_delay_s, read)
        self._end_at(next_end_s, replica)
