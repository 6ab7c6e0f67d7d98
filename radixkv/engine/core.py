"""What the engine's thread does: admit, schedule, run, commit, answer. No threads in here."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import cast

import torch

from radixkv.api.result import GeneratedTokens, GenerateResult, PrefillResult, Retained
from radixkv.api.retention import Retention
from radixkv.api.stats import EngineLoad, EngineStats
from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import PrefixCache, Purged
from radixkv.compute.forward import Chunk
from radixkv.compute.runner import Runner
from radixkv.config import EngineConfig
from radixkv.engine.answers import Answers
from radixkv.engine.early_ends import Departures, deadline_passed
from radixkv.engine.observer import Observer, Observers
from radixkv.engine.step import Computed, NextStep, Step, start_step
from radixkv.engine.step_budget import StepBudget
from radixkv.engine.steps_ahead import Lookahead
from radixkv.engine.tally import Census
from radixkv.errors import CapacityError, OutOfBlocks, OutOfMemory, RadixKVError, StepFailed
from radixkv.namespace import Namespace
from radixkv.scheduling.admission import Admitter
from radixkv.scheduling.held_leases import HeldLeases
from radixkv.scheduling.request import Generation, Outcome, Request
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

    Every way out of this picture goes through `_end`, which gives the blocks back.

    Args:
        runner: model and K/V memory.
        cache: trees and block ids of the same memory.
        config: budgets and limits.
        clock: seconds, never going back.
        on_end: told of every request that is over.
        observer: told of everything that is worth counting.
        weights: by tenant; see `Scheduler`.
        has_news: whether anything waits to be submitted or called between two steps; asked before a step is prepared
            or started ahead of its time.

    Attributes:
        observer: tells the one that was given, and nothing that it raises gets out.
        num_failed_steps: how many failed since the last one that did not.
    """

    def __init__(
        self,
        runner: Runner,
        cache: PrefixCache,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[Request], None] = lambda _: None,
        observer: Observer | None = None,
        weights: dict[str, float] | None = None,
        has_news: Callable[[], bool] = lambda: False,
    ) -> None:
        self.cache = cache
        self.held_leases = HeldLeases(config.held_lease_ttl_s)
        self.num_failed_steps = 0
        self._runner = runner
        self._budget = StepBudget(config.max_step_tokens)
        self._scheduler = Scheduler(config.max_step_tokens, config.max_running_requests, weights)
        self._flights = SingleFlight(cache.block_size)
        self._admitter = Admitter(cache, self._flights, self.held_leases, clock, self._fail)
        self._answers = Answers(cache, self.held_leases)
        self._clock = clock
        self._on_end = on_end
        self.observer = Observers(() if observer is None else (observer,))
        self._departures = Departures()
        self._lookahead = Lookahead(runner, self._scheduler, self._departures, self.held_leases, has_news, clock)
        self._under_way: Step | None = None  # started before its time
        self._census = Census(cache, self._scheduler, self.held_leases, runner.storage, clock)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self._scheduler.has_work

    def submit(self, request: Request) -> None:
        """Queue a validated request."""
        self._scheduler.add(request)
        self._departures.watch(request)

    def step(self) -> None:
        """Drop what nobody waits for, admit what fits, compute one step, publish and answer.

        While there is nothing to do but to decode, a GPU has the next step prepared while it computes this one, gets it
        before the tokens of this one are published and told, and is at it when this returns.
        """
        step = self._under_way or self._begin()
        self._under_way = None
        if step is None:
            return
        next_step = self._lookahead.prepare(step)
        computed = self._wait_for(step)
        for each in computed:
            self._advance(each)
        if next_step is not None and self._lookahead.may_start(next_step, computed):
            self._start_ahead(next_step, computed)
        for each in computed:
            self._publish(each)

    def try_step(self) -> None:
        """Compute a token that nobody asked for: do steps work again?"""
        token = bytes(TOKEN_BYTES)
        try:
            with self.cache.lease(Namespace(""), token, read=False) as lease:
                step = self._runner.run([Chunk(token, 0, 1, lease.block_ids, None, wants_logits=True)])
        except Exception:  # noqa: BLE001 - whatever a forward pass raises, it does not work yet
            _log.exception("steps still fail")
        else:
            self.num_failed_steps = 0 if all(step.is_finite) else self.num_failed_steps

    def seconds_to_next_expiry(self) -> float | None:
        """How long until a held lease expires; None if none is held."""
        expires_s = self.held_leases.next_expiry_s()
        return None if expires_s is None else max(0.0, expires_s - self._clock())

    def close(self, error: RadixKVError) -> None:
        """Fail every unfinished request with `error` and close every held lease."""
        self._under_way = None
        for request in self._scheduler.requests():
            self._fail(request, error)
        self.held_leases.close()

    def load(self) -> EngineLoad:
        """Say how full it is; see `Census.load`."""
        return self._census.load()

    def stats(self) -> EngineStats:
        """Count everything; see `Census.stats`."""
        return self._census.stats()

    def retain(self, namespace: Namespace, tokens: bytes, retention: Retention) -> Retained:
        """Give a cached range a priority, whatever it had before; see `PrefixCache.retain`."""
        return self._answers.retained(self.cache.retain(namespace, tokens, retention), self._clock())

    def purge(self, *, tenant: str | None, adapter: str | None, salt: str | None) -> Purged:
        """Forget namespaces; see `PrefixCache.purge`. Requests that came before publish nothing any more."""
        for request in self._scheduler.requests():
            request.is_revoked = request.is_revoked or request.namespace.is_among(tenant, adapter, salt)
        purged = self.cache.purge(tenant=tenant, adapter=adapter, salt=salt)
        for request in self._scheduler.running:
            if request.is_revoked:
                self._resume(self._flights.leave(request))
        return purged

    # -- before a step ---------------------------------------------------------------------------------------------

    def _begin(self) -> Step | None:
        """Start a step of those that run and of those that are admitted now; None if there is nothing to compute."""
        self._sweep()
        self._extend_leases()
        if (youngest := self._scheduler.slot_to_free()) is not None:
            self._pause(youngest)
        self._scheduler.max_step_tokens = self._budget.num_tokens
        slices = self._scheduler.next_step(self._admitter)
        return start_step(self._runner, slices, self._clock()) if slices else None

    def _start_ahead(self, next_step: NextStep, computed: list[Computed]) -> None:
        """Start what was prepared, and then do what else belongs to the start of a step."""
        self._under_way = next_step.start(computed, self._clock())
        for request, _, _ in next_step.slices:
            _extend_lease(request)
        slices = self._scheduler.next_tokens()
        assert slices == next_step.slices, "nobody else has anything to compute"

    def _sweep(self) -> None:
        now = self._clock()
        self.held_leases.expire(now)
        for request, error in self._departures.due(now):
            if error is None:
                self._end(request, Outcome.CANCELLED)
            else:
                self._fail(request, error)

    def _extend_leases(self) -> None:
        """Give each running generation the block for its next token. Without one, the youngest is paused.

        The oldest can always pause all others. If it is alone and there is still no block, it is paused itself, which
        lets go of what it pins and does not need; it comes back with the block, or only held leases and others' floors
        stand in its way and it is refused. So it gets on by a token at least each time, and after it the next one.
        """
        for request in sorted(self._scheduler.running, key=lambda running: running.arrival):
            while request.lease is not None and request.lease.num_tokens < request.num_tokens:
                try:
                    _extend_lease(request)
                except CapacityError as error:
                    self._make_room_for(request, error)

    def _make_room_for(self, request: Request, error: CapacityError) -> None:
        """Pause the youngest of those that hold what a request needs; it may be the youngest itself."""
        self._pause(
            max(
                (
                    running
                    for running in self._scheduler.running
                    if isinstance(error, OutOfBlocks) or running.params.tenant == request.params.tenant
                ),
                key=lambda holder: holder.arrival,
            )
        )

    def _pause(self, request: Request) -> None:
        """Take a running request's blocks away; what it published stays cached, and it goes on where it was."""
        self._resume(self._flights.leave(request))
        request.open_lease.close()
        request.lease = None
        self._scheduler.pause(request)
        self._census.paused()
        self.observer.request_paused(request)

    def _resume(self, followers: list[Request]) -> None:
        for follower in followers:
            self._scheduler.resume(follower)

    # -- the step --------------------------------------------------------------------------------------------------

    def _wait_for(self, step: Step) -> list[Computed]:
        """Wait for a step; nothing is returned of one that failed, or that is to be tried smaller."""
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
                self._fail(part.request, failed)
            return []
        self._budget.grow()
        self.num_failed_steps = 0 if any(each.is_finite for each in computed) else self.num_failed_steps + 1
        num_decode_tokens = sum(part.request.is_decoding for part in step.slices)
        num_prefill_tokens = step.num_tokens - num_decode_tokens
        self.observer.step_done(self._clock() - step.started_s, len(step.slices), num_prefill_tokens, num_decode_tokens)
        return computed

    def _try_smaller(self, step: Step) -> None:
        """Let the next steps be smaller. What this one wrote was not published, and is written again."""
        num_tokens, num_requests = step.num_tokens, len(step.slices)
        _log.warning("the device has no memory for a step of %d tokens in %d requests", num_tokens, num_requests)
        if not self._budget.shrink(num_tokens):
            self.num_failed_steps += 1
            for part in step.slices:
                self._fail(part.request, OutOfMemory("step: the device has no memory to compute a single token"))

    def _advance(self, computed: Computed) -> None:
        """Note what a request has computed, and its next token."""
        (request, _, upto), is_finite, prediction = computed
        if not is_finite:
            return
        request.computed_upto, request.has_computed = upto, True
        request.open_lease.copy = None  # it was made
        if prediction is None:
            return
        if request.prefilled_s is None:
            request.prefilled_s = self._clock()
        if request.generation is not None:
            request.generation.token_ids.append(prediction.next_token_id)

    def _publish(self, computed: Computed) -> None:
        """Publish what a request has computed, and answer it or tell its next token."""
        (request, _, upto), is_finite, prediction = computed
        if self._departures.is_failing(request):
            return
        if not is_finite:
            self._fail(request, StepFailed("step: the model's values are not finite; nothing was published"))
            return
        if prediction is None:
            self._commit(request, upto)
            return
        generation = request.generation
        if generation is None:
            self._commit(request, upto)
            self._answer(request, lambda lease, now: self._answers.prefill(request, lease, prediction, now))
            return
        finish_reason = generation.finish_reason
        if finish_reason is not None:
            self._commit(request, upto)
            self._answer(request, lambda lease, now: self._answers.generation(request, lease, finish_reason, now))
            return
        # The prompt is published to the token, and then what is full: more would be copied again for the next token.
        is_first = len(generation.token_ids) == 1
        publishable = upto if is_first else upto // self.cache.block_size * self.cache.block_size
        if publishable > request.open_lease.committed_tokens:
            self._commit(request, publishable)
        self._resume(self._flights.leave(request))  # what it computes from now on is its own
        self._tell(request, generation, prediction.next_token_id)

    def _commit(self, request: Request, upto: int) -> None:
        """Publish what is computed: chunk by chunk, or all at the end if the request must not read from the cache.

        A commit may adopt blocks that others published, and later chunks would read them.
        """
        params, lease = request.params, request.open_lease
        generation = request.generation
        is_finished = upto == request.num_tokens if generation is None else generation.finish_reason is not None
        if params.write_cache and not request.is_revoked and (params.read_cache or is_finished):
            request.written_tokens += lease.commit(upto)
            self._resume(self._flights.published(request, lease.committed_tokens))

    def _tell(self, request: Request, generation: Generation, token_id: int) -> None:
        try:
            generation.on_tokens(GeneratedTokens((token_id,), request.usage))
        except BaseException:  # noqa: BLE001 - the caller's callback, on our thread; the other requests go on
            _log.exception("a caller failed to take its tokens")
            self._departures.fail(request, StepFailed("generation: the caller's callback raised"))

    def _answer(self, request: Request, make: Callable[[Lease, float], PrefillResult | GenerateResult]) -> None:
        now = self._clock()
        if request.is_late(now):
            self._fail(request, deadline_passed())
            return
        if not request.future.set_running_or_notify_cancel():
            self._end(request, Outcome.CANCELLED)
            return
        result = make(request.open_lease, now)
        self._census.answered(result.usage)
        self._end(request, Outcome.FINISHED)
        cast("Future[PrefillResult | GenerateResult]", request.future).set_result(result)

    # -- the ways out ----------------------------------------------------------------------------------------------

    def _fail(self, request: Request, error: RadixKVError) -> None:
        self._end(request, Outcome.FAILED, error)
        if request.future.set_running_or_notify_cancel():
            request.future.set_exception(error)

    def _end(self, request: Request, outcome: Outcome, error: RadixKVError | None = None) -> None:
        request.is_over = True
        self._scheduler.remove(request)
        self._resume(self._flights.leave(request))
        self._census.ended(outcome)
        self._departures.forget(request)
        if request.lease is not None:
            request.lease.close()
            request.lease = None
        self.observer.request_ended(request, outcome, error, self._clock())
        self._on_end(request)


def _extend_lease(request: Request) -> None:
    """Take the blocks for what was generated since."""
    lease = request.open_lease
    if lease.num_tokens < request.num_tokens:
        lease.extend(request.tokens_from(lease.num_tokens))
