"""The engine loop: admit, compute a step, publish, return results. Its thread is in `engine.py`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Sequence

import torch

from radixkv.api.explanation import LookUp
from radixkv.api.hints import AgentStats
from radixkv.api.result import ProbeResult, Retained
from radixkv.api.retention import Grant, Retention
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.compute.runner import Runner
from radixkv.config import EngineConfig
from radixkv.doctor.miss_profiler import MAX_BRANCHES, Branches
from radixkv.engine.cancellation import Cancellations
from radixkv.engine.completion import RequestCompleter, retained_until, unix_time_of
from radixkv.engine.compression import Compressor
from radixkv.engine.hints import HintApplier
from radixkv.engine.observer import CompositeObserver, Observer
from radixkv.engine.overlap import OverlapScheduler
from radixkv.engine.preemption import Preemptor
from radixkv.engine.stats_collector import StatsCollector
from radixkv.engine.step import PreparedStep, SliceResult, Step, release_parts, start_step, trial_chunk
from radixkv.errors import OutOfMemory, RadixKVError, StepFailed
from radixkv.events.tree_feed import TreeFeed
from radixkv.namespace import TRIAL_TENANT, Namespace, PromptKey
from radixkv.offload.offload import Offload
from radixkv.offload.prefetch import Prefetcher
from radixkv.offload.purge import PendingPurge
from radixkv.scheduling.admission import Admitter
from radixkv.scheduling.held_leases import HeldLeases
from radixkv.scheduling.lending import Lending
from radixkv.scheduling.request import Outcome, Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.single_flight import SingleFlight
from radixkv.scheduling.step_budget import StepBudget
from radixkv.tokens import TOKEN_BYTES

_log = logging.getLogger(__name__)


class EngineCore:
    """Turns requests into steps. Only one thread at a time may use it.

        submit ─▶ waiting ─▶ admit: match, lease ─▶ running ─▶ step: forward, commit ─▶ answer ─▶ lease closed or held
                   ▲   ▲          │                  │  ▲ └───────── next token ◀──┘
                   │   └ following┘                  │  │   while its next tokens are being computed or loaded
                   └────────── preempted ◀───────────┘      while there are no blocks for its next token

    Every request ends in `RequestCompleter.end`, which releases its blocks.

    `build` creates a core with all its parts. The constructor takes parts that were built for each other.

    Attributes:
        cache: the cache.
        held_leases: leases that outlive their request.
        stats: counts requests, tokens and blocks.
        observer: notifies all observers.
        hints: applies the hints of callers.
        num_failed_steps: failed steps since the last successful one. A step without any finite result also counts; one
            that is retried with fewer tokens does not.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        cache: PrefixCache,
        scheduler: Scheduler,
        flights: SingleFlight,
        admitter: Admitter,
        preemptor: Preemptor,
        cancellations: Cancellations,
        compressor: Compressor,
        overlap: OverlapScheduler,
        completer: RequestCompleter,
        held_leases: HeldLeases,
        stats: StatsCollector,
        observer: Observer,
        events: TreeFeed | None,
        offload: Offload | None,
        prefetcher: Prefetcher | None,
        hints: HintApplier,
        clock: Callable[[], float],
    ) -> None:
        self.cache = cache
        self.held_leases = held_leases
        self.stats = stats
        self.observer = observer
        self.num_failed_steps = 0
        self._runner = runner
        self._scheduler = scheduler
        self._flights = flights
        self._admitter = admitter
        self._preemptor = preemptor
        self._cancellations = cancellations
        self._compressor = compressor
        self._overlap = overlap
        self._completer = completer
        self._events = events
        self._offload = offload
        self._prefetcher = prefetcher
        self.hints = hints
        self._clock = clock
        self._started_step: Step | None = None  # a step that was started before the previous one was published

    @classmethod
    def build(
        cls,
        runner: Runner,
        cache: PrefixCache,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[Request], None] = lambda _: None,
        on_start: Callable[[Request], None] = lambda _: None,
        observers: Iterable[Observer] = (),
        weights: dict[str, float] | None = None,
        has_pending_calls: Callable[[], bool] = lambda: False,
        events: TreeFeed | None = None,
        offload: Offload | None = None,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> EngineCore:
        """Build a core and all its parts.

        Args:
            runner: model and K/V memory.
            cache: trees and block ids of the same memory.
            config: budgets and limits.
            clock: seconds, monotonic.
            on_end: called with every request that ends.
            on_start: called with a request each time it is admitted.
            observers: are notified of requests and steps. Their exceptions are logged.
            weights: shares of each step by tenant; 1 for a tenant that is missing.
            has_pending_calls: whether calls or new requests wait for the time between two steps. Called before a step
                is prepared or started ahead.
            events: listens to the cache, and publishes after each step.
            offload: saves blocks that are evicted from the device, and loads them again; None to discard them.
            work_clock: CPU seconds of the calling thread.
        """
        storage = runner.storage
        observer = CompositeObserver(observers)
        held_leases = HeldLeases(
            cache.held, config.held_lease_ttl_s, config.max_held_leases, config.max_tenant_held_leases
        )
        scheduler = Scheduler(StepBudget(config.step_tokens), config.max_running_requests, weights, work_clock)
        flights = SingleFlight(cache.block_size)
        cancellations = Cancellations()
        stats = StatsCollector(cache, scheduler, held_leases, storage.block_bytes, storage.kv_dtype, clock, offload)

        def has_pending_work() -> bool:
            return has_pending_calls() or (offload is not None and offload.has_results)

        def end_with_tiers(request: Request) -> None:
            assert offload is not None, "there are tiers"
            offload.leave(request)
            on_end(request)

        def report_admission(request: Request) -> None:
            on_start(request)
            observer.request_admitted(request)

        def retain(namespace: Namespace, tokens: bytes, retention: Retention) -> Grant:
            grant = cache.retain(namespace, tokens, retention)
            return grant if offload is None else offload.retain(namespace, tokens, retention, grant)

        prefetcher = None if offload is None else Prefetcher(cache, offload, lambda: len(scheduler.running))
        hints = HintApplier(cache, retain, None if prefetcher is None else prefetcher.begin)
        completer = RequestCompleter(
            cache,
            scheduler,
            flights,
            cancellations,
            held_leases,
            stats,
            observer,
            on_end if offload is None else end_with_tiers,
            hints.apply,
            clock,
        )
        lending = Lending(cache, config.step_tokens)
        return cls(
            runner=runner,
            cache=cache,
            scheduler=scheduler,
            flights=flights,
            admitter=Admitter(
                cache, flights, held_leases, lending, clock, completer.fail, report_admission, loads=offload
            ),
            preemptor=Preemptor(scheduler, flights, lending, stats, observer),
            cancellations=cancellations,
            compressor=Compressor(runner, scheduler, completer.fail),
            overlap=OverlapScheduler(runner, scheduler, cancellations, held_leases, has_pending_work, clock),
            completer=completer,
            held_leases=held_leases,
            stats=stats,
            observer=observer,
            events=events,
            offload=offload,
            prefetcher=prefetcher,
            hints=hints,
            clock=clock,
        )

    @property
    def has_work(self) -> bool:
        """Whether any request runs or waits to be admitted. Requests whose blocks are being loaded do not count."""
        return self._scheduler.has_work

    def submit(self, request: Request) -> None:
        """Queue a validated request."""
        self._scheduler.add(request)
        self._cancellations.watch(request)
        if self._offload is not None and self._offload.begin(request):
            self._scheduler.hold_back(request)

    def step(self) -> None:
        """Compute one step if there is anything to compute. In any case, publish the cache events since the last call.

            schedule: end due requests, allocate, admit ─▶ wait ─▶ advance ───────▶ publish: commit, stream, answer
                                                         └ prepare the next step └ start it

        The next step is prepared and started ahead only on a device that computes asynchronously, and only while all
        requests decode. The device then computes it while tokens are published and after this method returns.
        """
        step = self._started_step or self._schedule()
        self._started_step = None
        if step is not None:
            self._compute(step)
        if self._events is not None:
            self._events.publish()

    def _compute(self, step: Step) -> None:
        prepared = self._overlap.prepare(step) if self._runner.is_asynchronous else None
        results = self._wait_for(step)
        self._completer.advance(results)
        if prepared is not None and self._overlap.may_start(prepared, results):
            self._start_ahead(prepared, results)
        self._completer.publish(results)
        if self._offload is not None:
            self._offload.save()  # after the results were returned, so that no caller waits for it

    def try_step(self) -> None:
        """Compute one token that no request needs, to find out whether steps succeed again.

        This needs a block. While tenants' floors and held leases leave no block for it, steps count as failing.
        """
        try:
            with self.cache.lease(Namespace("", TRIAL_TENANT), bytes(TOKEN_BYTES), read=False) as lease:
                if self._offload is not None:
                    self._offload.copy()
                    self._offload.save()
                result = self._runner.run([trial_chunk(lease)])
        except Exception:  # noqa: BLE001 - whatever a forward pass raises, steps still fail
            _log.exception("steps still fail")
        else:
            if all(result.is_finite):
                self.num_failed_steps = 0

    def seconds_until_due(self) -> float | None:
        """Return the seconds until the next timed task of an idle engine; None if there is none."""
        if self._events is not None and self._events.has_backlog:
            return 0.0
        now_s = self._clock()
        expires_s = self.held_leases.next_expiry_s()
        delays_s = [
            None if expires_s is None else max(0.0, expires_s - now_s),
            None if self._offload is None else self._offload.seconds_until_due(),
            None if self._prefetcher is None else self._prefetcher.seconds_until_due(now_s),
        ]
        return min((delay_s for delay_s in delays_s if delay_s is not None), default=None)

    def agent_stats(self) -> AgentStats:
        """Return the numbers of sessions, hints and prefetches. Any thread may call this."""
        counts = dict(self.hints.counts)
        if self._prefetcher is None:
            return AgentStats(len(self.cache.sessions), counts)
        prefetcher = self._prefetcher
        return AgentStats(len(self.cache.sessions), counts, prefetcher.num_loaded_tokens, prefetcher.num_dropped)

    def close(self, error: RadixKVError) -> None:
        """Fail every unfinished request with `error`, and close all held leases, the tiers and the events."""
        self._started_step = None
        for request in self._scheduler.requests():
            self._completer.fail(request, error)
        self.held_leases.close()
        if self._prefetcher is not None:
            self._prefetcher.close()
        if self._offload is not None:
            self._offload.close()
        if self._events is not None:
            self._events.close(error)

    def renew(self, lease_id: str, tenant: str) -> float:
        """Extend a held lease; see `HeldLeases.renew`. Returns when it expires, in Unix time."""
        return unix_time_of(self.held_leases.renew(lease_id, tenant, self._clock()), self._clock)

    def probe(self, namespace: Namespace, tokens: bytes, former: Sequence[PromptKey] = ()) -> ProbeResult:
        """Return what a prefill of this prompt would reuse now. Changes nothing. `former` is as in `Request`."""
        cached_tokens = self.cache.match(namespace, tokens).cached_tokens
        miss_reason = self.cache.explain(namespace, tokens, cached_tokens, former)
        offload = self._offload
        stored_tokens = 0 if offload is None else offload.stored_tokens(namespace, tokens, cached_tokens)
        return ProbeResult(cached_tokens, len(tokens) // TOKEN_BYTES, miss_reason, stored_tokens)

    def look_up(self, namespace: Namespace, tokens: bytes, former: Sequence[PromptKey] = ()) -> LookUp:
        """Return what `explain` of `radixkv.explain` needs of a prompt. Changes nothing. `former` is as in `Request`.

        Complexity: at most five look-ups of the prompt and one of each former key, and at most `MAX_EXAMINED_NODES`
        other nodes.
        """
        cached_tokens = self.cache.match(namespace, tokens).cached_tokens
        miss_reason = self.cache.explain(namespace, tokens, cached_tokens, former)
        divergence = self.cache.divergence(namespace, tokens)
        return LookUp(tokens, cached_tokens, miss_reason, divergence, self.stats.token_s(namespace.tenant))

    def branches_at(self, segment_numbers: Sequence[int], tenant: str, session_id: str) -> Branches:
        """Return the branches of a tenant that contain the segments with these numbers, for the profiler of misses."""
        start_s = time.thread_time()
        branches = self.cache.branches_at(segment_numbers, tenant, session_id, MAX_BRANCHES)
        return Branches(branches, self.stats.token_s(tenant), time.thread_time() - start_s)

    def retain(self, namespace: Namespace, tokens: bytes, retention: Retention) -> Retained:
        """Set the retention priority of a range on the device and in tiers; see `PrefixCache.retain`."""
        return retained_until(self.hints.retain(namespace, tokens, retention), self._clock)

    def purge_in_slices(
        self, *, tenant: str | None, adapter: str | None, salt: str | None
    ) -> Generator[None, None, PendingPurge]:
        """Purge namespaces, in slices between which steps may run; see `PrefixCache.purge`.

        Their unfinished requests publish nothing more.
        """
        if self._offload is not None:
            yield from self._offload.wait_for_scan()  # a disk can be purged only once it is scanned
        for request in self._scheduler.requests():
            request.is_revoked = request.is_revoked or request.is_among(tenant, adapter, salt)
        self._resume_followers_of_revoked()
        if self._prefetcher is not None:
            self._prefetcher.forget(tenant, adapter, salt)
        deletions = [] if self._offload is None else self._offload.purge(tenant, adapter, salt)
        purged = yield from self.cache.purge_in_slices(tenant=tenant, adapter=adapter, salt=salt)
        for request in self._scheduler.running:  # includes requests that were admitted between the slices
            request.is_revoked = request.is_revoked or request.open_lease.is_revoked
        self._resume_followers_of_revoked()
        if self._offload is not None:
            deletions += self._offload.purge(tenant, adapter, salt)  # blocks that were saved in the meantime
        return PendingPurge(purged, deletions)

    def _resume_followers_of_revoked(self) -> None:
        """Resume the requests that follow revoked requests, which publish nothing more."""
        for request in list(self._scheduler.running):
            if request.is_revoked:
                self._scheduler.resume(self._flights.leave(request))

    def _schedule(self) -> Step | None:
        """Admit requests, and start a step of all running requests; None if there is nothing to compute."""
        now_s = self._clock()
        self._end_due_requests(now_s)
        if self._scheduler.running:
            self._compressor.prepare_step()
        self._preemptor.prepare_step()
        offload = self._offload
        if offload is not None:
            assert self._prefetcher is not None
            self._prefetcher.look_ahead(now_s)
            ready_requests = offload.ready()
            self._scheduler.resume(self._prefetcher.take(ready_requests))  # without the prefetches among them
        slices = self._scheduler.next_step(self._admitter)
        if offload is not None:
            offload.copy()  # before evicted blocks are overwritten
        step = start_step(self._runner, slices, self._clock(), self._compressor.watcher_of) if slices else None
        if offload is not None and (step is None or self._runner.is_asynchronous):
            offload.save()  # a device that computes in `wait` saves afterwards, since writing would slow the step down
        return step

    def _start_ahead(self, prepared: PreparedStep, results: Sequence[SliceResult]) -> None:
        """Start a prepared step, in place of `_schedule`."""
        if self._offload is not None:
            self._offload.copy()
        self._started_step = prepared.start(results, self._clock())
        if self._offload is not None:
            self._offload.save()
        for request, _, _ in prepared.slices:
            request.extend_lease()
        slices = self._scheduler.next_tokens()
        assert slices == prepared.slices, "no other request has anything to compute"

    def _end_due_requests(self, now_s: float) -> None:
        """Close expired leases, reset expired priorities, and end the requests that `Cancellations` collected."""
        self.held_leases.expire(now_s)
        self.cache.expire()
        if not self._cancellations.is_any_due(now_s):
            return
        for request in self._cancellations.take_finished():
            self._completer.finish(request)
        for request, error in self._cancellations.take_due(now_s):
            if error is None:
                self._completer.end(request, Outcome.CANCELLED)
            else:
                self._completer.fail(request, error)

    def _wait_for(self, step: Step) -> list[SliceResult]:
        """Wait for a step. Returns no results if it failed, or if it did not fit and is retried with fewer tokens."""
        try:
            results = step.wait()
        except torch.OutOfMemoryError:
            self.observer.step_failed(self._clock() - step.started_s, len(step.slices))
            self._try_smaller(step)
            return []
        except Exception as error:  # noqa: BLE001 - whatever a forward pass raises, the other requests continue
            _log.exception("a step of %d requests failed", len(step.slices))
            self.num_failed_steps += 1
            self.observer.step_failed(self._clock() - step.started_s, len(step.slices))
            step_error = StepFailed(f"step: the forward pass raised {type(error).__name__}")
            for each in step.slices:
                self._completer.fail(each.request, step_error)
            return []
        is_any_finite = any(result.is_finite for result in results)
        self.num_failed_steps = 0 if is_any_finite else self.num_failed_steps + 1
        self._scheduler.budget.grow()
        seconds = self._clock() - step.started_s
        num_decoded = step.num_decoded_tokens
        self.observer.step_done(seconds, len(step.slices), step.num_tokens - num_decoded, num_decoded)
        if self._offload is not None:
            self._offload.note_step(seconds, step.slices)
        return results

    def _try_smaller(self, step: Step) -> None:
        """Make the next steps smaller, so that the tokens of this step are computed again in several steps.

        If the step cannot be smaller, its requests fail.
        """
        num_tokens = step.num_tokens
        _log.warning("the device has no memory for a step of %d tokens in %d requests", num_tokens, len(step.slices))
        for each in step.slices:
            release_parts(each.request)
        if not self._scheduler.budget.shrink(num_tokens):
            self.num_failed_steps += 1
            for each in step.slices:
                self._completer.fail(each.request, OutOfMemory("step: the device has no memory to compute one token"))
