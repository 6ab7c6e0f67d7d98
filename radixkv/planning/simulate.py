"""Replays a request trace through the prefix cache, without a model, to find the hit rate for a capacity."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.api.awaits import Awaits
from radixkv.api.caller import Caller
from radixkv.api.params import PrefillParams
from radixkv.blocks import BlockIds
from radixkv.cache.eviction_policy import EvictionPolicy
from radixkv.cache.lease import Lease
from radixkv.cache.node import Node
from radixkv.cache.policies import make_policy
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.sessions import MAX_SESSION_PROMPT_BYTES
from radixkv.config import EVICTION_POLICIES
from radixkv.errors import ConfigError
from radixkv.namespace import Namespace
from radixkv.planning.tiers import SimulatedTiers, TierCapacity, TierUsage, check_tiers
from radixkv.planning.time_model import TimeModel
from radixkv.planning.trace import MIN_STEP_S, TOKENS_PER_ID, TraceRequest, prompt_tokens, sequence_tokens
from radixkv.planning.virtual_clock import VirtualClock
from radixkv.scheduling.request import Request

OPTIMAL = "optimal"
SIMULATED_POLICIES = (*EVICTION_POLICIES, OPTIMAL)
NO_HINTS, STOP, STOP_AND_END = HINTS = ("none", "stop", "stop+end")
_NEVER = np.iinfo(np.int32).max
_TIMELY_FACTOR = 1.1  # maximum ratio of the TTFT of a timely return to that of a ready one


@dataclass(frozen=True, slots=True)
class Latency:
    """Times to the first token (TTFT) on a server that is otherwise idle: loading and computing, by a `TimeModel`.

    A return is a request of a session whose previous answer ended in a tool call. It can reuse the tokens that it
    repeats of the previous prompt, in whole blocks and except for its own last token.

    Attributes:
        ttft_p50_s, ttft_p95_s: median and 95th percentile of the TTFT of all requests, in seconds.
        num_returns: number of returns.
        ready_share: share of the returns for which everything that they repeat was on the device when they arrived.
        timely_share: share of the returns whose TTFT was at most 1.1 times what it would have been if all this had been
            on the device.
        prefetched_tokens: tokens that were loaded before a request asked for them.
    """

    ttft_p50_s: float
    ttft_p95_s: float
    num_returns: int
    ready_share: float
    timely_share: float
    prefetched_tokens: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of one policy with one capacity.

    Attributes:
        policy: name of the eviction policy.
        capacity_tokens: capacity of the cache.
        block_size: tokens per block.
        requests: number of replayed requests.
        prompt_tokens: tokens of all prompts.
        cached_tokens: prompt tokens that were reused.
        token_hit_rate: `cached_tokens / prompt_tokens`.
        evicted_tokens: evicted blocks times `block_size`.
        seconds: wall time of the replay.
        tiers: the tiers below the cache, whose hits are included in `cached_tokens`.
        latency: times to the first token; None without a time model.
    """

    policy: str
    capacity_tokens: int
    block_size: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    token_hit_rate: float
    evicted_tokens: int
    seconds: float
    tiers: tuple[TierUsage, ...] = ()
    latency: Latency | None = None

    @property
    def device_tokens(self) -> int:
        """Prompt tokens that were reused on the device."""
        return self.cached_tokens - sum(tier.cached_tokens for tier in self.tiers)


class FarthestFuture(EvictionPolicy):
    """Evicts the block whose next use is farthest away: the offline optimum, which knows the future.

    Source: Belady: "A study of replacement algorithms for a virtual-storage computer", 1966.

    Args:
        num_blocks: blocks in the cache's pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._next_uses = np.full(num_blocks, _NEVER, dtype=np.int32)

    def set_next_uses(self, block_ids: BlockIds, next_uses: npt.NDArray[np.int32]) -> None:
        """Record which request uses each of these blocks next."""
        self._next_uses[block_ids] = next_uses

    def key(self, node: Node) -> int:
        """Return the next use of the node's last block, negated so that the farthest one sorts first."""
        last_block_id = int.from_bytes(node.block_ids[-4:], "little")  # int32
        return -int(self._next_uses[last_block_id])

    def num_offered_blocks(self, leaf: Node) -> int:
        """Count the blocks at the leaf's end that have the same next use."""
        next_uses = self._next_uses[np.frombuffer(leaf.block_ids, dtype=np.int32)]
        sooner = np.flatnonzero(next_uses != next_uses[-1])
        return len(next_uses) - (int(sooner[-1]) + 1 if sooner.size else 0)


def simulate(
    requests: Sequence[TraceRequest],
    *,
    policy: str,
    capacity_tokens: int,
    block_size: int = TOKENS_PER_ID,
    probation_share: float = 1.0,
    tiers: Sequence[TierCapacity] = (),
    hints: str = NO_HINTS,
    times: TimeModel | None = None,
    on_request: Callable[[], object] | None = None,
) -> Simulation:
    """Replay a trace in order and on its clock; each prompt is leased, published and closed at one time.

    The same arguments give the same counts on every machine. A prompt longer than the cache is counted but not cached.
    Only `optimal` gets space for the longest prompt in addition to its capacity, and evicts down to its capacity after
    each request: an upper bound must not lose hits to the prompt that is being computed.

    The engine's own parts decide what tiers store, evict and load. Storing takes no time. Without `times`, loading
    takes no time either, and everything that tiers have is loaded. With `times`, a request waits until its blocks are
    loaded, sessions are loaded ahead of their next turn, and blocks that are faster to compute are computed. With
    tiers, the policy `optimal` is one cache with the capacity of all of them, which is an upper bound.

    Args:
        requests: the trace, at least one request.
        policy: one of `SIMULATED_POLICIES`.
        capacity_tokens: capacity of the cache, rounded down to whole blocks.
        block_size: tokens per block, at least 1.
        probation_share: probation share of the cache, see `PrefixCache`; `optimal` has none.
        tiers: tiers below the cache, the fastest first.
        hints: what the cache knows of sessions, one of `HINTS`: `none`: nothing; `stop`: why each answer ended;
            `stop+end`: also which answer was the last one of its session.
        times: how long prefills and loads take; None for no time. The policy `optimal` ignores `times`.
        on_request: called after each request.

    Raises:
        ConfigError: the policy or `hints` is unknown, the block size is below 1, a capacity is less than a block, or
            two tiers have one name.
    """
    check_simulation(policy=policy, capacity_tokens=capacity_tokens, block_size=block_size, tiers=tiers, hints=hints)
    start_s = time.perf_counter()
    num_blocks = capacity_tokens // block_size
    if policy == OPTIMAL and tiers:
        num_blocks, tiers = _total_blocks(requests, num_blocks, block_size, tiers), ()
    replay = _CacheReplay(requests, policy, num_blocks, block_size, probation_share, tiers, hints, times)
    for index in range(len(requests)):
        replay.step(index)
        if on_request is not None:
            on_request()
    replay.finish()
    return Simulation(
        policy=policy,
        capacity_tokens=capacity_tokens,
        block_size=block_size,
        requests=len(requests),
        prompt_tokens=replay.num_prompt_tokens,
        cached_tokens=replay.num_cached_tokens,
        token_hit_rate=replay.num_cached_tokens / replay.num_prompt_tokens,
        evicted_tokens=replay.cache.num_evicted_blocks * block_size,
        seconds=time.perf_counter() - start_s,
        tiers=replay.tiers.usage(replay.num_prompt_tokens) if replay.tiers else (),
        latency=replay.latency(),
    )


class _CacheReplay:
    """Replays requests through one cache with a virtual clock, and counts tokens."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        policy: str,
        num_blocks: int,
        block_size: int,
        probation_share: float,
        tiers: Sequence[TierCapacity],
        hints: str,
        times: TimeModel | None,
    ) -> None:
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._clock = VirtualClock()
        self.tiers = SimulatedTiers(tiers, block_size, self._clock, times) if tiers else None
        self._times = None if policy == OPTIMAL else times
        self._ttfts_s: list[float] = []
        self._num_returns = self._num_ready = self._num_timely = 0
        self._previous_requests: dict[str, TraceRequest] = {}  # by session
        self._hints = hints
        self._requests = requests
        self._capacity_blocks = num_blocks
        self._namespace = Namespace("trace")
        self._caller = Caller()
        self._optimal: FarthestFuture | None = None
        if policy == OPTIMAL:
            num_blocks += -(-max(request.input_length for request in requests) // block_size)
            self._optimal = FarthestFuture(num_blocks)
            self._next_uses = _next_uses(requests)
        self.cache = PrefixCache(
            num_blocks,
            block_size,
            policy=self._optimal or make_policy(policy, num_blocks),
            probation_share=1.0 if self._optimal else probation_share,
            max_evicted_prefixes=0,
            max_session_prompt_bytes=MAX_SESSION_PROMPT_BYTES if self.tiers and times else 0,
            listeners=[self.tiers.index] if self.tiers else (),
            clock=self._clock,
        )
        if self.tiers:
            self.tiers.connect(self.cache)

    def step(self, index: int) -> None:
        """Replay the request at `index`."""
        request = self._requests[index]
        now_s = max(self._clock.now_s + MIN_STEP_S, request.timestamp_ms / 1000)
        if self.tiers:
            self.tiers.advance(now_s)
        else:
            self._clock.advance(now_s)
        self.num_prompt_tokens += request.input_length
        if request.input_length > self.cache.pool.num_blocks * self.cache.block_size:
            return
        prompt, answer = self._tokens_of(request)
        repeated_tokens = self._repeated_tokens(request)
        self._previous_requests[request.session] = request
        is_ready = not repeated_tokens or repeated_tokens <= self._cached_tokens(prompt)

        def serve(loaded: Request | None = None) -> None:
            """Lease and publish the prompt; `loaded` is its request to the tiers, whose blocks have been loaded."""
            with self._lease(request, prompt) as lease:
                num_cached_tokens = lease.cached_tokens
                if loaded is not None:
                    assert self.tiers is not None
                    num_cached_tokens = self.tiers.fill(loaded, lease)
                self.num_cached_tokens += num_cached_tokens
                self._note_time(request, now_s, num_cached_tokens, repeated_tokens, is_ready=is_ready)
                _publish(lease, answer)
                if self._optimal is not None:
                    self._set_next_uses(self._optimal, lease, index)
            if self._optimal is not None:
                self.cache.evict(self.cache.pool.num_published - self._capacity_blocks)
            elif request.is_last and self._hints == STOP_AND_END:
                self.cache.end_session(self._namespace.tenant, request.session)

        if self.tiers:
            self.tiers.request(PrefillParams(prompt, self._caller), self._namespace, serve)
        else:
            serve()

    def finish(self) -> None:
        """Wait for the requests whose blocks are being loaded."""
        if self.tiers:
            self.tiers.finish()

    def latency(self) -> Latency | None:
        """Return the times to the first token; None without a time model."""
        if self._times is None or not self._ttfts_s:
            return None
        p50_s, p95_s = np.quantile(self._ttfts_s, (0.5, 0.95)).tolist()
        return Latency(
            ttft_p50_s=p50_s,
            ttft_p95_s=p95_s,
            num_returns=self._num_returns,
            ready_share=self._num_ready / max(1, self._num_returns),
            timely_share=self._num_timely / max(1, self._num_returns),
            prefetched_tokens=self.tiers.num_prefetched_tokens if self.tiers else 0,
        )

    def _cached_tokens(self, prompt: bytes) -> int:
        return self.cache.match(self._namespace, prompt).cached_tokens

    def _repeated_tokens(self, request: TraceRequest) -> int | None:
        """Return how many tokens of the previous prompt a return can reuse; None if the request is not a return."""
        if self._times is None or not request.session:
            return None
        previous = self._previous_requests.get(request.session)
        if previous is None or previous.awaits is not Awaits.TOOL:
            return None
        pairs = zip(previous.hash_ids, request.hash_ids, strict=False)
        num_equal_ids = next((index for index, (old, new) in enumerate(pairs) if old != new), len(previous.hash_ids))
        num_tokens = min(num_equal_ids * request.tokens_per_id, previous.input_length, request.input_length - 1)
        return num_tokens - num_tokens % self.cache.block_size

    def _note_time(
        self,
        request: TraceRequest,
        arrival_s: float,
        num_cached_tokens: int,
        repeated_tokens: int | None,
        *,
        is_ready: bool,
    ) -> None:
        """Record the time to the first token of a request whose blocks have just been loaded."""
        if self._times is None:
            return
        prefill_s = self._times.prefill_s(num_cached_tokens, request.input_length)
        ttft_s = self._clock.now_s - arrival_s + prefill_s
        self._ttfts_s.append(ttft_s)
        if self.tiers:
            self.tiers.note_prefill(prefill_s, num_cached_tokens, request.input_length)
        if repeated_tokens is not None:
            ready_ttft_s = self._times.prefill_s(max(repeated_tokens, num_cached_tokens), request.input_length)
            self._num_returns += 1
            self._num_ready += is_ready
            self._num_timely += ttft_s <= _TIMELY_FACTOR * ready_ttft_s

    def _lease(self, request: TraceRequest, tokens: bytes) -> Lease:
        """Open a lease of a prompt, with what `hints` allow the cache to know."""
        lease = self.cache.lease(self._namespace, tokens, session_id="" if self._hints == NO_HINTS else request.session)
        if self._hints != NO_HINTS:
            lease.awaits = request.awaits
        return lease

    def _tokens_of(self, request: TraceRequest) -> tuple[bytes, bytes]:
        """Return a prompt and its answer, which is empty unless the trace contains its ids and there is room for it.

        The first id of an answer stands for the block in which the prompt ends. Therefore the end of a prompt with an
        answer has the same tokens as the next turn.
        """
        sequence = None if self._optimal is not None else sequence_tokens(request)
        if sequence is None or sequence.size > self.cache.pool.num_blocks * self.cache.block_size:
            return prompt_tokens(request).tobytes(), b""
        return sequence[: request.input_length].tobytes(), sequence[request.input_length :].tobytes()

    def _set_next_uses(self, policy: FarthestFuture, lease: Lease, index: int) -> None:
        """Set, for each block of the request at `index`, which request uses the block next."""
        last_tokens = np.arange(1, lease.block_ids.size + 1) * self.cache.block_size - 1  # [num_blocks]
        request = self._requests[index]
        id_indexes = np.minimum(last_tokens // request.tokens_per_id, len(request.hash_ids) - 1)
        next_uses = self._next_uses[index][id_indexes]
        policy.set_next_uses(lease.block_ids, next_uses)
        # The tree may have its own copy of a partly filled last block.
        published_block_ids = self.cache.match(self._namespace, bytes(lease.tokens)).block_ids
        policy.set_next_uses(published_block_ids, next_uses[: published_block_ids.size])


def _publish(lease: Lease, answer: bytes) -> None:
    """Cache the prompt of a lease, and its answer."""
    lease.commit(lease.num_tokens)
    if answer:
        lease.extend(answer)
        lease.commit(lease.num_tokens)


def check_simulation(
    *,
    policy: str,
    capacity_tokens: int,
    block_size: int = TOKENS_PER_ID,
    tiers: Sequence[TierCapacity] = (),
    hints: str = NO_HINTS,
) -> None:
    """Check the arguments of `simulate` before anything is replayed.

    Raises:
        ConfigError: an argument is invalid. The message names it.
    """
    if policy not in SIMULATED_POLICIES:
        raise ConfigError(f"policy: expected one of {', '.join(SIMULATED_POLICIES)}, got {policy}")
    if hints not in HINTS:
        raise ConfigError(f"hints: expected one of {', '.join(HINTS)}, got {hints}")
    if block_size < 1:
        raise ConfigError(f"block_size: expected at least 1 token, got {block_size}")
    if capacity_tokens < block_size:
        raise ConfigError(f"capacity_tokens: expected at least a block of {block_size} tokens, got {capacity_tokens}")
    check_tiers(tiers, block_size)


def _total_blocks(
    requests: Sequence[TraceRequest], num_blocks: int, block_size: int, tiers: Sequence[TierCapacity]
) -> int:
    """Return the number of blocks of the device and all tiers together, or of all prompts if that is less."""
    max_blocks = sum(-(-request.input_length // block_size) for request in requests)
    if any(tier.capacity_tokens is None for tier in tiers):
        return max_blocks
    return min(max_blocks, num_blocks + sum((tier.capacity_tokens or 0) // block_size for tier in tiers))


def _next_uses(requests: Sequence[TraceRequest]) -> list[npt.NDArray[np.int32]]:
    """Find, for each id of each request, the next request with the same ids up to there; `_NEVER` if there is none."""
    prefixes: dict[tuple[int, int], int] = {}
    paths = []
    for request in requests:
        path, prefix = [], -1
        for hash_id in request.hash_ids:
            prefix = prefixes.setdefault((prefix, hash_id), len(prefixes))
            path.append(prefix)
        paths.append(np.array(path, dtype=np.int32))
    # [num_prefixes], the earliest request that uses a prefix, among those that the loop from the end has visited.
    upcoming = np.full(len(prefixes), _NEVER, dtype=np.int32)
    next_uses: list[npt.NDArray[np.int32]] = []
    for index in range(len(paths) - 1, -1, -1):
        next_uses.append(upcoming[paths[index]])
        upcoming[paths[index]] = index
    next_uses.reverse()
    return next_uses
