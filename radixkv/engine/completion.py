"""Completion of requests: publishes computed blocks, streams tokens, returns results, and releases resources."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import cast

from radixkv.api.hints import HintAction, HintOutcome
from radixkv.api.logprob_table import LogprobTable
from radixkv.api.result import (
    FinishReason,
    GeneratedTokens,
    GenerateResult,
    HeldLease,
    PrefillResult,
    Retained,
    Timing,
    TokenLogprobs,
)
from radixkv.api.retention import DEFAULT_PRIORITY, Grant, Retention
from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.engine.cancellation import Cancellations, deadline_error
from radixkv.engine.observer import Observer
from radixkv.engine.sampler import Prediction
from radixkv.engine.stats_collector import StatsCollector
from radixkv.engine.step import SliceResult, release_parts
from radixkv.errors import NotFinite, RadixKVError, StepFailed
from radixkv.namespace import PromptKey
from radixkv.scheduling.held_leases import HeldLeases
from radixkv.scheduling.request import Generation, Outcome, Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.single_flight import SingleFlight

_log = logging.getLogger(__name__)

ApplyHints = Callable[[Sequence[HintAction], str, PromptKey | None], tuple[HintOutcome, ...]]


class RequestCompleter:
    """Turns the results of a step into published blocks, streamed tokens and results, and ends requests.

        advance   the request has its next token                       (not visible to any caller yet)
        publish   commit ─▶ stream the token, or return the result     (other requests can match the blocks)
        end       close the lease, resume followers, notify observers  (the only way out of the engine)

    The next step may be started between `advance` and `publish`.

    Args:
        cache: retains prompts.
        scheduler, flights: resume the followers of a request when the tokens that they wait for are published.
        cancellations: marks requests that must fail.
        held_leases: owns the leases that outlive their request.
        stats: counts requests and tokens.
        observer: is notified of each request that ends.
        on_end: called last with each request that has ended.
        apply_hints: applies hints to the cache; see `HintApplier.apply`.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        cache: PrefixCache,
        scheduler: Scheduler,
        flights: SingleFlight,
        cancellations: Cancellations,
        held_leases: HeldLeases,
        stats: StatsCollector,
        observer: Observer,
        on_end: Callable[[Request], None],
        apply_hints: ApplyHints,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._flights = flights
        self._cancellations = cancellations
        self._held_leases = held_leases
        self._stats = stats
        self._observer = observer
        self._on_end = on_end
        self._apply_hints = apply_hints
        self._clock = clock

    def advance(self, results: Iterable[SliceResult]) -> None:
        """Record the computed tokens and the next token of each request."""
        for result in results:
            if result.is_finite:
                self._advance(result)

    def publish(self, results: Iterable[SliceResult]) -> None:
        """Publish the blocks of each request, and stream its next token or return its result."""
        for result in results:
            self._publish(result)

    def finish(self, request: Request) -> None:
        """End a running or preempted generation with the tokens that it has."""
        assert request.generation is not None, "only generations can be finished by their caller"
        request.generation.is_finished = True
        if request.lease is not None and request.computed_upto > request.lease.committed_tokens:
            self._commit(request, request.computed_upto)
        self._complete(request, FinishReason.STOP)

    def fail(self, request: Request, error: RadixKVError) -> None:
        """End a request and raise `error` for its caller."""
        self.end(request, Outcome.FAILED, error)
        if request.future.set_running_or_notify_cancel():
            request.future.set_exception(error)

    def end(self, request: Request, outcome: Outcome, error: RadixKVError | None = None) -> None:
        """Remove a request from the engine, close its lease and resume its followers. Does not change its future."""
        request.is_over = True
        self._scheduler.remove(request)
        followers = self._flights.leave(request)
        if followers:
            self._scheduler.resume(followers)
        self._stats.count_end(request, outcome)
        self._cancellations.forget(request)
        request.release()
        self._observer.request_ended(request, outcome, error, self._clock())
        self._on_end(request)

    def _advance(self, result: SliceResult) -> None:
        request, start, end = result.token_slice
        lease = request.lease
        assert lease is not None, "a running request holds a lease"
        request.computed_upto = end
        request.has_computed = True
        lease.copy = None  # the step has made the copy
        if request.state_lease is not None:
            request.state_lease.advance(end)
        release_parts(request)
        generation, prediction = request.generation, result.prediction
        if generation is not None and result.prompt_logprobs is not None:
            if generation.prompt_logprobs is None:
                generation.prompt_logprobs = LogprobTable(request.num_prompt_tokens - 1)
            generation.prompt_logprobs.put(start, result.prompt_logprobs)
        if prediction is None or prediction.refusal is not None:
            return
        if request.times.prefilled_s is None:
            request.times.prefilled_s = self._clock()
        if generation is not None:
            try:
                request.append(prediction.next_token_id)
            except BaseException:  # noqa: BLE001 - the code of a constraint; the other requests continue
                _log.exception("a constraint raised an exception")
                self._cancellations.fail(request, StepFailed("constraint: failed to accept the next token"))

    def _publish(self, result: SliceResult) -> None:
        (request, _, end), prediction = result.token_slice, result.prediction
        if self._cancellations.is_failing(request):
            return
        if not result.is_finite:
            message = "step: the model computed NaN or infinite values for this request; its tokens were discarded"
            self.fail(request, NotFinite(message))
        elif prediction is None:
            self._commit(request, end)
        elif prediction.refusal is not None:
            self.fail(request, prediction.refusal)
        elif request.generation is None:
            self._commit(request, end)
            self._complete(request, None, prediction)
        elif (finish_reason := request.generation.finish_reason) is not None:
            self._commit(request, end)
            self._complete(request, finish_reason, prediction)
        else:
            self._publish_token(request, request.generation, end, prediction)

    def _publish_token(self, request: Request, generation: Generation, end: int, prediction: Prediction) -> None:
        """Publish the computed tokens of a running generation, and stream its next token.

        The prompt is published up to its last token, and generated tokens only in whole blocks: a block that is
        published before it is full must be copied for the next token.
        """
        is_first_token = len(generation.token_ids) == 1
        block_size = self._cache.block_size
        publishable_tokens = end if is_first_token else end // block_size * block_size
        if publishable_tokens > request.open_lease.committed_tokens:
            self._commit(request, publishable_tokens)
        followers = self._flights.leave(request)  # no request follows generated tokens
        if followers:
            self._scheduler.resume(followers)
        prompt_logprobs = (generation.prompt_logprobs or ()) if is_first_token else ()
        new_tokens = GeneratedTokens((prediction.next_token_id,), request.usage, prediction.logprobs, prompt_logprobs)
        try:
            generation.on_tokens(new_tokens)
        except BaseException:  # noqa: BLE001 - a caller's code on the engine's thread; the other requests continue
            _log.exception("the callback of a generation raised an exception")
            self._cancellations.fail(request, StepFailed("generation: the caller's callback raised an exception"))

    def _commit(self, request: Request, upto: int) -> None:
        """Publish computed tokens: after each chunk, or all at the end if the request must not read from the cache.

        A commit may replace blocks of the request by equal blocks that other requests published. If it came after each
        chunk, the later chunks of the request would read such blocks, which are blocks of the cache.
        """
        params = request.params
        lease = request.lease
        generation = request.generation
        assert lease is not None, "the lease holds the computed tokens"
        if not params.write_cache or request.is_revoked:
            return
        if generation is not None and not generation.sampling.write_generated:
            upto = min(upto, request.num_prompt_tokens)
        is_finished = upto == request.num_tokens if generation is None else generation.finish_reason is not None
        if not params.read_cache and not is_finished:
            return
        request.written_tokens += lease.commit(upto)
        if request.state_lease is not None:
            request.state_lease.publish(lease.block_ids, lease.num_published_blocks)
        followers = self._flights.record_published(request, lease.committed_tokens)
        if followers:
            self._scheduler.resume(followers)

    def _complete(
        self, request: Request, finish_reason: FinishReason | None, prediction: Prediction | None = None
    ) -> None:
        """Return the result of a request, unless it is cancelled or its deadline has passed.

        Args:
            request: all its tokens are computed, or its caller has finished it.
            finish_reason: why a generation ended; None for a prefill.
            prediction: the last token; None if it has been streamed.
        """
        now_s = self._clock()
        if request.params.deadline_s is not None and request.is_late(now_s):
            self.fail(request, deadline_error())
            return
        if not request.future.set_running_or_notify_cancel():
            self.end(request, Outcome.CANCELLED)
            return
        if request.lease is not None:
            request.lease.awaits = request.awaits
        result: PrefillResult | GenerateResult
        if finish_reason is None:
            assert prediction is not None, "a prefill has one token"
            result = self._prefill_result(request, request.open_lease, prediction, now_s)
        else:
            logprobs = () if prediction is None else prediction.logprobs
            result = self._generate_result(request, finish_reason, logprobs, now_s)
        self._stats.count_tokens(request.tenant, result.usage, result.timing.prefill_us / 1e6)
        self.end(request, Outcome.FINISHED)
        if request.params.hints:  # applied after the lease of the request has closed
            prompt = PromptKey(request.namespace, request.prompt_tokens)
            outcomes = self._apply_hints(request.params.hints, request.tenant, prompt)
            result = dataclasses.replace(result, hints=outcomes)
        cast("Future[PrefillResult | GenerateResult]", request.future).set_result(result)

    def _prefill_result(self, request: Request, lease: Lease, prediction: Prediction, now_s: float) -> PrefillResult:
        """Create the result of a prefill. If its caller requested to hold the lease, `held_leases` owns it afterwards.

        The lease of a prompt that was purged is not held.
        """
        # If an invoked adapter is purged, only its requests are revoked, and not their leases.
        is_purged = request.is_revoked or lease.is_revoked
        is_held = request.params.hold_lease and not is_purged
        logprobs = prediction.logprobs
        return PrefillResult(
            request_id=request.params.request_id,
            usage=request.usage,
            next_token_id=prediction.next_token_id,
            top_logprobs=logprobs[0].top if logprobs else (),
            logits=prediction.logits,
            miss_reason=request.reuse.miss_reason,
            timing=_timing(request, now_s),
            retained=self._retain(request, lease),
            held_lease=self._hold(request, lease) if is_held else None,
        )

    def _generate_result(
        self, request: Request, finish_reason: FinishReason, logprobs: Sequence[TokenLogprobs], now_s: float
    ) -> GenerateResult:
        """Create the result of a generation, which may be preempted. `logprobs` belong to its last token."""
        assert request.generation is not None, "only a generation has a finish reason"
        return GenerateResult(
            request_id=request.params.request_id,
            usage=request.usage,
            token_ids=tuple(request.generation.token_ids),
            logprobs=logprobs,
            prompt_logprobs=request.generation.prompt_logprobs or (),
            finish_reason=finish_reason,
            miss_reason=request.reuse.miss_reason,
            timing=_timing(request, now_s),
            retained=self._retain(request, request.lease),
        )

    def _retain(self, request: Request, lease: Lease | None) -> Retained | None:
        """Apply the retention of a request.

        A priority below the default applies only to tokens that this request published; tokens that other requests
        published keep their priority. Without a lease it is unknown who published them, so no priority is lowered.
        """
        retention = request.params.retention
        if retention is None:
            return None
        start, end = retention.range_in(request.num_prompt_tokens)
        is_lower = retention.priority < DEFAULT_PRIORITY
        own_start = start
        if is_lower:
            written_from = None if lease is None else lease.written_from_tokens
            if written_from is None:
                written_from = end
            block_size = self._cache.block_size
            # Rounded up, since the block before may also have tokens that other requests published.
            own_start = max(start, min(end, -(-written_from // block_size) * block_size))
        grant = self._retain_range(request, retention, start, own_start, only_raise=True)
        grant = grant.joined(self._retain_range(request, retention, own_start, end, only_raise=not is_lower))
        return retained_until(grant, self._clock)

    def _retain_range(self, request: Request, retention: Retention, start: int, end: int, *, only_raise: bool) -> Grant:
        if start >= end:
            return Grant(0, 0, 0)
        retention = dataclasses.replace(retention, start=start, end=end)
        return self._cache.retain(request.namespace, request.prompt_tokens, retention, only_raise=only_raise)

    def _hold(self, request: Request, lease: Lease) -> HeldLease:
        block_ids = lease.block_ids
        lease_id, expires_s = self._held_leases.hold(lease, request.tenant, self._clock())
        request.lease = None  # `held_leases` owns it
        return HeldLease(lease_id, unix_time_of(expires_s, self._clock), block_ids)


def _timing(request: Request, now_s: float) -> Timing:
    assert request.times.scheduled_s is not None, "a result comes after admission"
    assert request.times.prefilled_s is not None, "a result comes after the first token"
    return Timing(
        queue_us=_microseconds(request.times.scheduled_s - request.times.received_s),
        prefill_us=_microseconds(request.times.prefilled_s - request.times.scheduled_s),
        decode_us=0 if request.generation is None else _microseconds(now_s - request.times.prefilled_s),
        total_us=_microseconds(now_s - request.times.received_s),
    )


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def unix_time_of(when_s: float, clock: Callable[[], float]) -> float:
    """Return the Unix time at which a clock shows `when_s`.

    It is slightly earlier if the thread is interrupted between reading the two clocks.
    """
    return time.time() + when_s - clock()


def retained_until(grant: Grant, clock: Callable[[], float]) -> Retained:
    """Return a grant with its expiry in Unix time; `clock` is the clock of the grant."""
    return Retained(grant, None if grant.expires_s is None else unix_time_of(grant.expires_s, clock))
