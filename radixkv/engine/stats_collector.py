"""Collects the statistics of the engine."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

from radixkv.api.result import Usage
from radixkv.api.stats import (
    DEFAULT_MAX_TENANTS,
    BlockStats,
    EngineLoad,
    EngineStats,
    RequestStats,
    SessionStats,
    TenantStats,
    TimeStats,
    TokenStats,
)
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.tenants import RecentTenants, TenantUsage
from radixkv.offload.offload import Offload
from radixkv.scheduling.held_leases import HeldLeases
from radixkv.scheduling.request import Outcome, Request
from radixkv.scheduling.scheduler import Scheduler

# Upper bounds of the histogram's buckets, from 0.5 ms to 107 s, each 1.25 times the previous one. An estimated quantile
# between them is therefore at most 25 % too high, or 20 % too low.
_BOUNDS_S = tuple(0.0005 * 1.25**index for index in range(56))

# The time per computed token is measured by requests that compute at least this many, since a step also takes time that
# does not depend on its tokens. Each request reduces the weight of all earlier ones by this fraction.
_MIN_TIMED_TOKENS = 128
_DECAY = 0.05


class _TokenTime(NamedTuple):
    """Computed prompt tokens of a tenant's recent requests, and the seconds that these requests took."""

    tokens: float
    seconds: float


class StatsCollector:
    """Counts requests as they end, and reads all other numbers on demand from the objects that own them.

    Args:
        cache, scheduler, held_leases: the sources of the current numbers.
        block_bytes: device bytes of one block, scales included.
        kv_dtype: how K and V are stored.
        clock: seconds, monotonic.
        offload: the tiers below the device; None without any.
    """

    def __init__(
        self,
        cache: PrefixCache,
        scheduler: Scheduler,
        held_leases: HeldLeases,
        block_bytes: int,
        kv_dtype: str,
        clock: Callable[[], float],
        offload: Offload | None = None,
    ) -> None:
        self._cache = cache
        self._offload = offload
        self._scheduler = scheduler
        self._held_leases = held_leases
        self._block_bytes = block_bytes
        self._kv_dtype = kv_dtype
        self._clock = clock
        self._started_s = clock()
        self._num_ended = dict.fromkeys((Outcome.FINISHED, Outcome.FAILED, Outcome.CANCELLED), 0)
        self._num_preemptions = 0
        self._tokens = TokenStats()
        self._ttft_counts = [0] * (len(_BOUNDS_S) + 1)  # requests by time to first token
        self._ttft_sum_s = 0.0
        self._token_times: RecentTenants[_TokenTime] = RecentTenants()

    def token_s(self, tenant: str) -> float | None:
        """Return the seconds per computed prompt token, from admission to the first token, of recent requests.

        Only requests of this tenant count, so that the times do not reveal the load of others. None if there are none.
        """
        token_time = self._token_times.get(tenant)
        return None if token_time is None else token_time.seconds / token_time.tokens

    def count_tokens(self, tenant: str, usage: Usage, prefill_s: float) -> None:
        """Count the tokens of a finished request that had its first token `prefill_s` seconds after admission."""
        self._tokens = self._tokens.plus(usage)
        if usage.computed_tokens >= _MIN_TIMED_TOKENS:
            previous = self._token_times.pop(tenant, _TokenTime(0.0, 0.0))
            weight = 1 - _DECAY
            num_tokens = weight * previous.tokens + usage.computed_tokens
            seconds = weight * previous.seconds + prefill_s
            self._token_times.add(tenant, _TokenTime(num_tokens, seconds))  # as the most recent tenant

    def count_end(self, request: Request, outcome: Outcome) -> None:
        """Count a request that ended, and the time to its first token if it had one."""
        self._num_ended[outcome] += 1
        if request.times.prefilled_s is not None:
            seconds = request.times.prefilled_s - request.times.received_s
            self._ttft_counts[bisect_left(_BOUNDS_S, seconds)] += 1
            self._ttft_sum_s += seconds

    def count_preemption(self) -> None:
        """Count a preemption."""
        self._num_preemptions += 1

    def load(self) -> EngineLoad:
        """Return the load of the engine. Complexity: O(requests that wait or follow others)."""
        pool = self._cache.pool
        states = self._cache.state_slots
        return EngineLoad(
            blocks=BlockStats(
                total=pool.num_blocks,
                free=pool.num_free,
                leased=pool.num_leased,
                published=pool.num_published,
                pinned=self._cache.num_pinned_blocks,
                retained=self._cache.num_retained_blocks,
                retainable=self._cache.max_retained_blocks,
                on_probation=self._cache.num_probation_blocks,
                withheld=pool.num_withheld,
            ),
            requests=RequestStats(
                waiting=self._scheduler.num_waiting,
                running=len(self._scheduler.running),
                following=self._scheduler.num_following,
                paused=sum(request.is_preempted for request in self._scheduler.idle_requests()),
                finished=self._num_ended[Outcome.FINISHED],
                failed=self._num_ended[Outcome.FAILED],
                cancelled=self._num_ended[Outcome.CANCELLED],
                pauses=self._num_preemptions,
            ),
            namespaces=self._cache.num_namespaces,
            held_leases=len(self._held_leases),
            evicted_blocks=self._cache.num_evicted_blocks,
            evicted_probation_blocks=self._cache.num_evicted_probation_blocks,
            states=None if states is None else states.stats(),
            parts=self._cache.windows.stats(),
        )

    def stats(self, max_tenants: int = DEFAULT_MAX_TENANTS, tenant: str | None = None) -> EngineStats:
        """Return all statistics.

        Args:
            max_tenants: number of tenants to report, the largest ones; see `Tenants.largest`.
            tenant: report only this tenant, if it is known or has blocks in tiers.

        Complexity: that of `load`, and O(tenants with a quota), regardless of the number of known tenants.
        """
        tenants = self._cache.tenants
        if tenant is None:
            reported = tenants.largest(max_tenants)
        else:
            usage = tenants.get(tenant)
            if usage is None and any(self._stored_blocks(tenant).values()):
                usage = TenantUsage(tenant, tenants.quota_of(tenant))  # only an earlier process served this tenant
            reported = [] if usage is None else [(tenant, usage)]
        return EngineStats(
            load=self.load(),
            uptime_s=self._clock() - self._started_s,
            tokens=self._tokens,
            segments=len(self._cache.segments),
            block_bytes=self._block_bytes,
            kv_dtype=self._kv_dtype,
            tenants=tuple(self._tenant_stats(name, usage) for name, usage in reported),
            known_tenants=len(tenants),
            first_tokens=TimeStats(_BOUNDS_S, tuple(self._ttft_counts), self._ttft_sum_s),
        )

    def sessions(self, max_sessions: int, tenant: str | None = None) -> list[SessionStats]:
        """Return the sessions that were used most recently, of one tenant or of all (None), the last one first.

        Complexity: O(nodes of these sessions); with a tenant also O(sessions).
        """
        now_s = self._clock()
        return [
            SessionStats(
                tenant=each.tenant,
                session_id=each.session_id,
                awaits=each.awaits,
                blocks=each.num_blocks,
                running_requests=each.num_leases,
                idle_s=max(0.0, now_s - each.last_used_s),
            )
            for each in self._cache.sessions.latest(max_sessions, tenant)
        ]

    def _tenant_stats(self, tenant: str, usage: TenantUsage) -> TenantStats:
        return TenantStats(
            tenant=tenant,
            cached_blocks=usage.num_cached_blocks,
            pinned_blocks=usage.num_pinned_blocks,
            leased_blocks=usage.num_leased_blocks,
            evicted_blocks=usage.num_evicted_blocks,
            hit_tokens=usage.num_hit_tokens,
            miss_tokens=usage.num_miss_tokens,
            retained_blocks=usage.num_retained_blocks,
            floor_blocks=usage.quota.floor_blocks,
            ceiling_blocks=usage.quota.ceiling_blocks,
            stored_blocks=self._stored_blocks(tenant),
            sessions=self._cache.sessions.num_of(tenant),
        )

    def _stored_blocks(self, tenant: str) -> dict[str, int]:
        return {} if self._offload is None else self._offload.stored_blocks(tenant)
