"""The engine's work: admit, compute a step, publish, answer. The thread that does it is in `engine.py`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Sequence

import torch

from radixkv.api.result import ProbeResult, Retained
from radixkv.api.retention import Retention
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.compute.runner import Runner
from radixkv.config import EngineConfig
from radixkv.engine.answers import Answers
from radixkv.engine.compression.compressions import Compressions
from radixkv.engine.delivery import Delivery
from radixkv.engine.early_ends import EarlyEnds
from radixkv.engine.endings import Endings
from radixkv.engine.growth import Growth, extend_lease
from radixkv.engine.observer import Observer, Observers
from radixkv.engine.offload.deletions import PurgeBegun
from radixkv.engine.offload.offload import Offload, do_nothing
from radixkv.engine.step import Computed, NextStep, Step, settle, start_step, trial_chunk
from radixkv.engine.step_budget import StepBudget
from radixkv.engine.steps_ahead import StepsAhead
from radixkv.engine.tally import Tally
from radixkv.errors import OutOfMemory, RadixKVError, StepFailed
from radixkv.events.tree_feed import TreeFeed
from radixkv.namespace import TRIAL_TENANT, Namespace, PromptKey
from radixkv.scheduling.admission import Admitter
from radixkv.scheduling.held_leases import HeldLeases
from radixkv.scheduling.lending import Lending
from radixkv.scheduling.request import Outcome, Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.single_flight import SingleFlight
from radixkv.tokens import TOKEN_BYTES

_log = logging.getLogger(__name__)


class EngineCore:
    """Turns requests into steps. One thread at a time may use it.

        submit ─▶ waiting ─▶ admit: match, lease ─▶ running ─▶ step: forward, commit ─▶ answer ─▶ lease closed or held
                   ▲   ▲          │                  │  ▲ └───────── next token ◀──┘
                   │   └ following┘                  │  │   while a running request computes what it needs
                   └──────────── paused ◀────────────┘      while there are no blocks for its next token

    Every way out of this picture leads through `Endings`, which gives the blocks back.

    Args:
        runner: model and K/V memory.
        cache: trees and block ids of the same memory.
        config: budgets and limits.
        clock: seconds, never going back.
        on_end: called with every request that is over.
        on_start: called with every request that got its blocks, each time.
        observers: are told of requests and steps. What they raise is logged.
        weights: shares of each step by tenant; 1 for a tenant that is not there.
        has_news: whether callers wait for the engine. Asked before a step is prepared or started ahead.
        events: listens to the cache, and publishes after each step.
        offload: saves blocks that leave the device, and loads them again; None if they are lost.
        work_clock: seconds of work of the calling thread.

    Attributes:
        cache: the one that was passed in.
        held_leases: leases that outlive their request.
        tally: counts requests, tokens and blocks.
        observer: tells all observers.
        num_failed_steps: failed steps since the last one that worked.
    """

    def __init__(
        self,
        runner: Runner,
        cache: PrefixCache,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[Request], None] = lambda _: None,
        on_start: Callable[[Request], None] = lambda _: None,
        observers: Iterable[Observer] = (),
        weights: dict[str, float] | None = None,
        has_news: Callable[[], bool] = lambda: False,
        events: TreeFeed | None = None,
        offload: Offload | None = None,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.cache = cache
        self.held_leases = held_leases = HeldLeases(
            cache.kept, config.held_lease_ttl_s, config.max_held_leases, config.max_tenant_held_leases
        )
        self.observer = observer = Observers(observers)
        self.num_failed_steps = 0
        self._events, self._offload = events, offload
        self._copy, self._save = (do_nothing, do_nothing) if offload is None else (offload.copy, offload.save)
        self._runner, self._clock, self._on_end, storage = runner, clock, on_end, runner.storage
        self._under_way: Step | None = None  # the step that was started ahead
        self._budget = StepBudget(config.step_tokens)
        self._scheduler = scheduler = Scheduler(config.step_tokens, config.max_running_requests, weights, work_clock)
        self._flights = flights = SingleFlight(cache.block_size)
        self._early_ends = early_ends = EarlyEnds()
        self.tally = tally = Tally(cache, scheduler, held_leases, storage.block_bytes, storage.kv_dtype, clock, offload)
        self._endings = endings = Endings(scheduler, flights, early_ends, tally, observer, self._leave, clock)
        lending = Lending(cache, config.step_tokens)
        self._admitter = Admitter(cache, flights, held_leases, lending, clock, endings.fail, on_start, offload)
        self._compressions = Compressions(runner, scheduler, endings.fail)
        self._growth = Growth(scheduler, flights, lending, tally, observer)
        is_awaited = has_news if offload is None else lambda: has_news() or offload.has_answers
        self._steps_ahead = StepsAhead(runner, scheduler, early_ends, held_leases, is_awaited, clock)
        self._answers = answers = Answers(cache, held_leases, offload)
        self._delivery = Delivery(answers, endings, scheduler, flights, early_ends, tally, clock, cache.block_size)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self._scheduler.has_work

    def submit(self, request: Request) -> None:
        """Queue a validated request."""
        self._scheduler.add(request)
        self._early_ends.watch(request)
        if self._offload is not None and self._offload.begin(request):
            self._scheduler.hold_back(request)

    def step(self) -> None:
        """Compute one step, unless there is nothing to compute. Publish the events since the last call in any case.

            begin: sweep, grow, admit ─▶ wait ─▶ advance ─────▶ publish: commit, answer or tell the next token
                                      └ prepare the next step └ start it

        The next step is prepared and started ahead only on a device that computes beside the host, and only while all
        there is to do is to decode. Then the device works on it while tokens are published, and when this returns.
        """
        step = self._under_way or self._begin()
        self._under_way = None
        if step is not None:
            self._compute(step)
        if self._events is not None:
            self._events.publish()

    def _compute(self, step: Step) -> None:
        next_step = self._steps_ahead.prepare(step)
        computed = self._wait_for(step)
        self._delivery.advance(computed)
        if next_step is not None and self._steps_ahead.may_start(next_step, computed):
            self._start_ahead(next_step, computed)
        self._delivery.publish(computed)
        self._save()  # no answer waits for it

    def try_step(self) -> None:
        """Compute a token that nobody asked for, to learn whether steps work again.

        It takes a block: while floors and held leases leave none for it, steps count as failing.
        """
        try:
            with self.cache.lease(Namespace("", TRIAL_TENANT), bytes(TOKEN_BYTES), read=False) as lease:
                self._copy()
                self._save()
                step = self._runner.run([trial_chunk(lease)])
        except Exception:  # noqa: BLE001 - whatever a forward pass raises, steps do not work yet
            _log.exception("steps still fail")
        else:
            self.num_failed_steps = 0 if all(step.is_finite) else self.num_failed_steps

    def seconds_to_rest(self) -> float | None:
        """Seconds until there is something to do without requests; None if there will be nothing."""
        if self._events is not None and self._events.has_backlog:
            return 0.0
        expires_s = self.held_leases.next_expiry_s()
        until_expiry_s = None if expires_s is None else max(0.0, expires_s - self._clock())
        until_flush_s = None if self._offload is None else self._offload.seconds_to_rest()
        return min((each for each in (until_expiry_s, until_flush_s) if each is not None), default=None)

    def close(self, error: RadixKVError) -> None:
        """Fail every unfinished request with `error` and close every held lease."""
        self._under_way = None
        for request in self._scheduler.requests():
            self._endings.fail(request, error)
        self.held_leases.close()
        if self._offload is not None:
            self._offload.close()
        if self._events is not None:
            self._events.close(error)

    def renew(self, lease_id: str, tenant: str) -> float:
        """Let a held lease live on; see `HeldLeases.renew`. Returns when it expires, in Unix time."""
        return self._answers.renew(lease_id, tenant, self._clock())

    def probe(self, namespace: Namespace, tokens: bytes, former: Sequence[PromptKey] = ()) -> ProbeResult:
        """Say what a prefill of this prompt would reuse now; see `Request.former`. Changes nothing."""
        return self._answers.probe(namespace, tokens, former)

    def retain(self, namespace: Namespace, tokens: bytes, retention: Retention) -> Retained:
        """Set the retention priority of a cached range, whatever it was before; see `PrefixCache.retain`."""
        return self._answers.retain(namespace, tokens, retention, self._clock())

    def purging(
        self, *, tenant: str | None, adapter: str | None, salt: str | None
    ) -> Generator[None, None, PurgeBegun]:
        """Forget namespaces, in slices between which steps may run; see `PrefixCache.purge`.

        Unfinished requests of theirs publish nothing more.
        """
        yield from () if self._offload is None else self._offload.reading()
        for request in self._scheduler.requests():
            request.is_revoked = request.is_revoked or request.is_among(tenant, adapter, salt)
        self._leave_revoked()
        deletions = [] if self._offload is None else self._offload.purge(tenant, adapter, salt)
        purged = yield from self.cache.purging(tenant=tenant, adapter=adapter, salt=salt)
        for request in self._scheduler.running:  # those that came between the slices
            request.is_revoked = request.is_revoked or request.open_lease.is_revoked
        self._leave_revoked()
        if self._offload is not None:
            deletions += self._offload.purge(tenant, adapter, salt)  # what was saved meanwhile
        return PurgeBegun(purged, deletions)

    def _leave_revoked(self) -> None:
        for request in self._scheduler.running:
            if request.is_revoked:
                self._scheduler.resume(self._flights.leave(request))

    def _begin(self) -> Step | None:
        """Start a step of the running requests and those that are admitted now; None if nothing is to be computed."""
        self._sweep()
        self._compressions.settle()
        self._growth.extend_leases()
        self._growth.free_slot()
        self._scheduler.max_step_tokens = self._budget.num_tokens
        self._scheduler.resume(() if self._offload is None else self._offload.ready())
        slices = self._scheduler.next_step(self._admitter)
        self._copy()  # before anything is written over what has left the cache
        step = start_step(self._runner, slices, self._clock(), self._compressions.watcher_of) if slices else None
        if step is None or self._runner.is_asynchronous:  # else `wait` computes, and stores would work beside it
            self._save()
        return step

    def _start_ahead(self, next_step: NextStep, computed: list[Computed]) -> None:
        """Start a prepared step, and do then what else belongs to the start of a step."""
        self._copy()
        self._under_way = next_step.start(computed, self._clock())
        self._save()
        for request, _, _ in next_step.slices:
            extend_lease(request)
        slices = self._scheduler.next_tokens()
        assert slices == next_step.slices, "no other request has anything to compute"

    def _leave(self, request: Request) -> None:
        if self._offload is not None:
            self._offload.leave(request)
        self._on_end(request)

    def _sweep(self) -> None:
        """Close expired leases, and end the requests that are finished or cancelled early, are late or have to fail."""
        now_s = self._clock()
        self.held_leases.expire(now_s)
        self.cache.expire()
        for request in self._early_ends.finished():
            self._delivery.finish(request)
        for request, error in self._early_ends.due(now_s):
            if error is None:
                self._endings.end(request, Outcome.CANCELLED)
            else:
                self._endings.fail(request, error)

    def _wait_for(self, step: Step) -> list[Computed]:
        """Wait for a step. Returns nothing if it failed, or if it did not fit and is tried again with fewer tokens."""
        try:
            computed = step.wait()
        except torch.OutOfMemoryError:
            self.observer.step_failed(self._clock() - step.started_s, len(step.slices))
            self._try_smaller(step)
            return []
        except Exception as error:  # noqa: BLE001 - whatever a forward pass raises, the other requests go on
            _log.exception("a step of %d requests failed", len(step.slices))
            self.num_failed_steps += 1
            self.observer.step_failed(self._clock() - step.started_s, len(step.slices))
            failed = StepFailed(f"step: the forward pass raised {type(error).__name__}")
            for part in step.slices:
                self._endings.fail(part.request, failed)
            return []
        self._budget.grow()
        self.num_failed_steps = 0 if any(each.is_finite for each in computed) else self.num_failed_steps + 1
        seconds, num_decoded = self._clock() - step.started_s, step.num_decoded_tokens
        self.observer.step_done(seconds, len(step.slices), step.num_tokens - num_decoded, num_decoded)
        if self._offload is not None:
            self._offload.note_step(seconds, step.slices)
        return computed

    def _try_smaller(self, step: Step) -> None:
        """Make the next steps smaller. The tokens of this one were not published and are computed again."""
        num_tokens = step.num_tokens
        _log.warning("the device has no memory for a step of %d tokens in %d requests", num_tokens, len(step.slices))
        for part in step.slices:
            settle(part.request)
        if not self._budget.shrink(num_tokens):
            self.num_failed_steps += 1
            for part in step.slices:
                self._endings.fail(part.request, OutOfMemory("step: the device has no memory to compute one token"))
