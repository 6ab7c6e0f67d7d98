"""What the engine's thread does: admit, schedule, run, commit, answer. No threads in here."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator

from radixkv.config import EngineConfig
from radixkv.errors import DeadlineExceeded, OutOfBlocks, QuotaExceeded, RadixKVError, StepFailed
from radixkv.held_leases import HeldLeases
from radixkv.lease import Lease
from radixkv.miss_reason import MissReason
from radixkv.namespace import Namespace
from radixkv.node import DEFAULT_PRIORITY
from radixkv.prediction import Prediction, predict
from radixkv.prefix_cache import PrefixCache, Purged
from radixkv.request import HeldLease, Outcome, PrefillResult, Request, Retained, Timing, Usage
from radixkv.retention import Grant, Retention
from radixkv.runner import Chunk, Runner
from radixkv.scheduler import Admission, Scheduler, Slice
from radixkv.single_flight import SingleFlight
from radixkv.stats import BlockStats, EngineStats, RequestStats, TenantStats, TokenStats
from radixkv.tenants import TenantUsage

_log = logging.getLogger(__name__)


class EngineCore:
    """Turns requests into steps. One thread at a time may use it.

        submit ─▶ waiting ─▶ admit: match, lease ─▶ running ─▶ step: forward, commit ─▶ answer ─▶ lease closed or held
                     ▲            │
                     └ following ◀┘ while a running request computes what it needs

    Every way out of this picture goes through `_end`, which gives the blocks back.

    Args:
        runner: model and K/V memory.
        cache: trees and block ids of the same memory.
        config: budgets and limits.
        clock: seconds, never going back.
        on_end: told of every request that is over.
    """

    def __init__(
        self,
        runner: Runner,
        cache: PrefixCache,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[Request], None] = lambda _: None,
    ) -> None:
        self.cache = cache
        self.held_leases = HeldLeases(config.held_lease_ttl_s)
        self._runner = runner
        self._scheduler = Scheduler(config.max_step_tokens, config.max_running_requests)
        self._flights = SingleFlight(cache.block_size)
        self._clock = clock
        self._on_end = on_end
        self._started_s = clock()
        self._num_ended = dict.fromkeys((Outcome.FINISHED, Outcome.FAILED, Outcome.CANCELLED), 0)
        self._tokens = TokenStats()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._scheduler.running or self._scheduler.waiting)  # who follows, follows a running one

    def submit(self, request: Request) -> None:
        """Queue a validated request."""
        self._scheduler.add(request)

    def step(self) -> None:
        """Drop what nobody waits for, admit what fits, compute one step, publish and answer."""
        self._sweep()
        slices = self._scheduler.next_step(self._admit)
        if slices:
            self._run(slices)

    def seconds_to_next_expiry(self) -> float | None:
        """How long until a held lease expires; None if none is held."""
        expires_s = self.held_leases.next_expiry_s()
        return None if expires_s is None else max(0.0, expires_s - self._clock())

    def close(self, error: RadixKVError) -> None:
        """Fail every unfinished request with `error` and close every held lease."""
        for request in self._scheduler.requests():
            self._fail(request, error)
        self.held_leases.close()

    def stats(self) -> EngineStats:
        """Count everything. Complexity: O(segments)."""
        pool = self.cache.pool
        return EngineStats(
            uptime_s=self._clock() - self._started_s,
            blocks=BlockStats(
                total=pool.num_blocks,
                free=pool.num_free,
                leased=pool.num_leased,
                published=pool.num_published,
                pinned=self.cache.num_pinned_blocks,
                retained=self.cache.num_retained_blocks,
                retainable=self.cache.max_retained_blocks,
            ),
            requests=RequestStats(
                waiting=len(self._scheduler.waiting),
                running=len(self._scheduler.running),
                following=len(self._scheduler.following),
                finished=self._num_ended[Outcome.FINISHED],
                failed=self._num_ended[Outcome.FAILED],
                cancelled=self._num_ended[Outcome.CANCELLED],
            ),
            tokens=self._tokens,
            namespaces=self.cache.num_namespaces,
            segments=self.cache.num_segments,
            held_leases=len(self.held_leases),
            evicted_blocks=self.cache.num_evicted_blocks,
            block_bytes=self._runner.storage.block_bytes,
            kv_dtype=self._runner.storage.kv_dtype,
            tenants=tuple(_tenant_stats(tenant, usage) for tenant, usage in self.cache.tenants.items()),
        )

    def retain(self, namespace: Namespace, tokens: bytes, retention: Retention) -> Retained:
        """Give a cached range a priority, whatever it had before; see `PrefixCache.retain`."""
        return self._retained(self.cache.retain(namespace, tokens, retention))

    def purge(self, *, tenant: str | None, adapter: str | None, salt: str | None) -> Purged:
        """Forget namespaces; see `PrefixCache.purge`. Requests that wait publish nothing either."""
        for request in (*self._scheduler.waiting, *self._scheduler.following):
            request.is_revoked = request.is_revoked or request.namespace.is_among(tenant, adapter, salt)
        purged = self.cache.purge(tenant=tenant, adapter=adapter, salt=salt)
        for request in self._scheduler.running:
            if _open_lease(request).is_revoked:
                self._resume(self._flights.leave(request))
        return purged

    # -- before a step ---------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        now = self._clock()
        self.held_leases.expire(now)
        for request in self._scheduler.requests():
            deadline_s = request.params.deadline_s
            if request.future.cancelled():
                self._end(request, Outcome.CANCELLED)
            elif deadline_s is not None and now >= deadline_s:
                self._fail(request, DeadlineExceeded("deadline: passed before the answer was known"))

    def _admit(self, request: Request, most_tokens: int) -> Admission:
        """Give a waiting request its blocks, if there are enough and nobody computes the same.

        Args:
            request: it waits.
            most_tokens: it may have so many tokens to compute.
        """
        params = request.params
        if params.read_cache and (self._flights.has_leaders(request.namespace) or most_tokens < request.num_tokens):
            cached_tokens = self.cache.match(request.namespace, params.tokens).cached_tokens
            if self._flights.follow(request, cached_tokens):
                return Admission.FOLLOWS
        else:
            cached_tokens = 0
        if request.num_tokens - cached_tokens > most_tokens:
            return Admission.TOO_LONG
        try:
            lease = self.cache.lease(request.namespace, params.tokens, read=params.read_cache)
        except QuotaExceeded as error:  # waiting for this tenant's own blocks would hold up the others
            self._fail(request, error)
            return Admission.ENDED
        except OutOfBlocks as error:
            if self._scheduler.running:
                return Admission.NO_ROOM
            # Only held leases could give blocks back, and not soon.
            error.retry_after_s = self.seconds_to_next_expiry() or error.retry_after_s
            self._fail(request, error)
            return Admission.ENDED
        request.lease = lease
        request.computed_upto = lease.cached_tokens
        request.miss_reason = (
            self.cache.explain(request.namespace, params.tokens, lease.cached_tokens)
            if params.read_cache
            else MissReason.READ_DISABLED
        )
        request.scheduled_s = self._clock()
        if params.read_cache and params.write_cache and not request.is_revoked:
            self._flights.lead(request)
        return Admission.ADMITTED

    def _resume(self, followers: list[Request]) -> None:
        for follower in followers:
            self._scheduler.resume(follower)

    # -- the step --------------------------------------------------------------------------------------------------

    def _run(self, slices: list[Slice]) -> None:
        try:
            is_finite, predictions = self._compute(slices)
        except Exception as error:  # noqa: BLE001 - whatever a forward pass raises, the other requests go on
            _log.exception("a step of %d requests failed", len(slices))
            failed = StepFailed(f"step: the forward pass raised {type(error).__name__}")
            for part in slices:
                self._fail(part.request, failed)
            return
        for part, finite in zip(slices, is_finite, strict=True):
            prediction = next(predictions) if part.is_last else None
            if not finite:
                self._fail(part.request, StepFailed("step: the model's values are not finite; nothing was published"))
                continue
            part.request.computed_upto = part.end
            self._commit(part.request)
            if prediction is not None:
                self._answer(part.request, prediction)

    def _compute(self, slices: list[Slice]) -> tuple[list[bool], Iterator[Prediction]]:
        """Everything that waits for the device, and so everything that can fail there."""
        step = self._runner.run([_chunk(part) for part in slices])
        predictions = predict(step.logits, [part.request.params for part in slices if part.is_last])
        return step.is_finite, iter(predictions)

    def _commit(self, request: Request) -> None:
        """Publish what is computed: chunk by chunk, or all at the end if the request must not read from the cache.

        A commit may adopt blocks that others published, and later chunks would read them.
        """
        params, lease = request.params, _open_lease(request)
        is_finished = request.computed_upto == request.num_tokens
        if params.write_cache and not request.is_revoked and (params.read_cache or is_finished):
            request.written_tokens += lease.commit(request.computed_upto)
            self._resume(self._flights.published(request, lease.committed_tokens))

    def _answer(self, request: Request, prediction: Prediction) -> None:
        params, lease = request.params, _open_lease(request)
        now = self._clock()
        if params.deadline_s is not None and now >= params.deadline_s:
            self._fail(request, DeadlineExceeded("deadline: passed before the answer was known"))
            return
        if not request.future.set_running_or_notify_cancel():
            self._end(request, Outcome.CANCELLED)
            return
        usage = Usage(
            prompt_tokens=request.num_tokens,
            cached_tokens=lease.cached_tokens,
            computed_tokens=request.num_tokens - lease.cached_tokens,
            written_tokens=request.written_tokens,
        )
        self._tokens = TokenStats(
            prompt=self._tokens.prompt + usage.prompt_tokens,
            cached=self._tokens.cached + usage.cached_tokens,
            computed=self._tokens.computed + usage.computed_tokens,
            written=self._tokens.written + usage.written_tokens,
        )
        result = PrefillResult(
            request_id=params.request_id,
            usage=usage,
            next_token_id=prediction.next_token_id,
            top_logprobs=prediction.top_logprobs,
            logits=prediction.logits,
            miss_reason=request.miss_reason,
            timing=Timing(
                queue_us=_microseconds(request.scheduled_s - request.received_s),
                prefill_us=_microseconds(now - request.scheduled_s),
                total_us=_microseconds(now - request.received_s),
            ),
            held_lease=self._hold(request, lease, now) if params.hold_lease else None,
            retained=self._retain(request, lease),
        )
        self._end(request, Outcome.FINISHED)
        request.future.set_result(result)

    def _retain(self, request: Request, lease: Lease) -> Retained | None:
        """What others cached is never lowered: a low priority is for what this request has published."""
        retention = request.params.retention
        if retention is None:
            return None
        start, end = retention.range_in(request.num_tokens)
        shared_upto = start
        if retention.priority < DEFAULT_PRIORITY:
            written_from = end if lease.written_from_tokens is None else lease.written_from_tokens
            block_size = self.cache.block_size
            shared_upto = max(start, min(end, -(-written_from // block_size) * block_size))
        grant = Grant(0, 0, 0)
        for part_start, part_end, only_raise in (
            (start, shared_upto, True),
            (shared_upto, end, retention.priority >= DEFAULT_PRIORITY),
        ):
            if part_start < part_end:
                part = dataclasses.replace(retention, start=part_start, end=part_end)
                grant = grant.joined(
                    self.cache.retain(request.namespace, request.params.tokens, part, only_raise=only_raise)
                )
        return self._retained(grant)

    def _retained(self, grant: Grant) -> Retained:
        ends_s = grant.expires_s
        return Retained(grant, None if ends_s is None else time.time() + ends_s - self._clock())

    def _hold(self, request: Request, lease: Lease, now: float) -> HeldLease:
        lease_id, expires_s = self.held_leases.hold(lease, request.params.tenant, now)
        request.lease = None  # the holder's now
        return HeldLease(lease_id, time.time() + expires_s - now, lease.block_ids.copy())

    # -- the ways out ----------------------------------------------------------------------------------------------

    def _fail(self, request: Request, error: RadixKVError) -> None:
        self._end(request, Outcome.FAILED)
        if request.future.set_running_or_notify_cancel():
            request.future.set_exception(error)

    def _end(self, request: Request, outcome: Outcome) -> None:
        self._scheduler.remove(request)
        self._resume(self._flights.leave(request))
        self._num_ended[outcome] += 1
        if request.lease is not None:
            request.lease.close()
            request.lease = None
        self._on_end(request)


def _open_lease(request: Request) -> Lease:
    assert request.lease is not None, "a running request holds a lease"
    return request.lease


def _tenant_stats(tenant: str, usage: TenantUsage) -> TenantStats:
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
    )


def _chunk(part: Slice) -> Chunk:
    request, start, end = part
    lease = _open_lease(request)
    return Chunk(
        tokens=lease.tokens,
        start=start,
        end=end,
        block_ids=lease.block_ids,
        copy=lease.copy if start == lease.cached_tokens else None,
        wants_logits=part.is_last,
    )


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
