"""Ways to break the engine on purpose. The simulation must detect each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from radixkv.api.result import GeneratedTokens
from radixkv.api.sampling import Sampling
from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.public_prefixes import PublicPrefix, PublicPrefixes, PublicRoot
from radixkv.cache.tenants import Tenants
from radixkv.compute.forward import Chunk
from radixkv.compute.runner import Launch
from radixkv.engine import overlap, sampler, step
from radixkv.engine.completion import RequestCompleter
from radixkv.engine.core import EngineCore
from radixkv.engine.overlap import OverlapScheduler
from radixkv.engine.preemption import Preemptor
from radixkv.engine.sampler import Prediction
from radixkv.engine.step import PreparedStep, SliceResult, Step
from radixkv.errors import RadixKVError, StepFailed
from radixkv.invocation import InvocationMarks
from radixkv.namespace import Namespace
from radixkv.offload.purge import PendingPurge
from radixkv.scheduling.admission import Admission, Admitter
from radixkv.scheduling.request import Outcome, Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.single_flight import SingleFlight
from radixkv.scheduling.step_budget import StepBudget
from radixkv.scheduling.step_plan import Slice
from radixkv.tokens import TOKEN_BYTES
from tests.engine.simulation.simulated_model import SimulatedRunner

BreakEngine = Callable[[pytest.MonkeyPatch], None]


def publishes_before_the_step(patch: pytest.MonkeyPatch) -> None:
    wait_for = EngineCore._wait_for

    def publish_and_wait(core: EngineCore, running: Step) -> list[SliceResult]:
        for part in running.slices:
            core._completer._commit(part.request, part.end)
        return wait_for(core, running)

    patch.setattr(EngineCore, "_wait_for", publish_and_wait)


def starts_ahead_requests_that_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        overlap,
        "_continues_decoding",
        lambda request, num_coming=0: request.generation is not None and request.is_decoding,
    )


def starts_ahead_whatever_is_due(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OverlapScheduler, "may_start", lambda _, prepared, results: bool(results))


def starts_two_steps_ahead(patch: pytest.MonkeyPatch) -> None:
    start_ahead = EngineCore._start_ahead

    def start_twice(core: EngineCore, prepared: PreparedStep, results: list[SliceResult]) -> None:
        start_ahead(core, prepared, results)
        prepared.start(results, 0.0)

    patch.setattr(EngineCore, "_start_ahead", start_twice)


def starts_ahead_with_the_tokens_of_other_requests(patch: pytest.MonkeyPatch) -> None:
    start = PreparedStep.start
    patch.setattr(PreparedStep, "start", lambda prepared, results, now_s: start(prepared, results[::-1], now_s))


def prepares_copies_again(patch: pytest.MonkeyPatch) -> None:
    prepare = SimulatedRunner.prepare

    def prepare_with_copies(runner: SimulatedRunner, chunks: Sequence[Chunk]) -> Launch:
        copies = [runner._lease_of(chunk).copy for chunk in chunks]
        return prepare(
            runner, [dataclasses.replace(chunk, copy=copy) for chunk, copy in zip(chunks, copies, strict=True)]
        )

    patch.setattr(SimulatedRunner, "prepare", prepare_with_copies)


def prepares_without_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "reserve", lambda *_: None)


def skips_copies(patch: pytest.MonkeyPatch) -> None:
    chunk_of = step.chunk_of

    def without_copy(part: Slice) -> Chunk:
        return dataclasses.replace(chunk_of(part), copy=None)

    patch.setattr(step, "chunk_of", without_copy)


def repeats_copies(patch: pytest.MonkeyPatch) -> None:
    chunk_of = step.chunk_of
    copies = {}

    def with_first_copy(part: Slice) -> Chunk:
        copy = copies.setdefault(part.request.lease, chunk_of(part).copy)
        return dataclasses.replace(chunk_of(part), copy=copy)

    patch.setattr(step, "chunk_of", with_first_copy)


def leads_while_it_is_preempted(patch: pytest.MonkeyPatch) -> None:
    preempt, leave = Preemptor.preempt, SingleFlight.leave

    def preempt_and_lead(preemptor: Preemptor, request: Request) -> None:
        patch.setattr(SingleFlight, "leave", lambda *_: [])
        preempt(preemptor, request)
        patch.setattr(SingleFlight, "leave", leave)

    patch.setattr(Preemptor, "preempt", preempt_and_lead)


def ends_cancelled_requests_while_a_step_runs(patch: pytest.MonkeyPatch) -> None:
    submit = EngineCore.submit

    def submit_and_listen(core: EngineCore, request: Request) -> None:
        submit(core, request)

        def end_if_cancelled(future: Future[Any]) -> None:
            if future.cancelled() and not request.is_over:
                core._completer.end(request, Outcome.CANCELLED)

        request.future.add_done_callback(end_if_cancelled)

    patch.setattr(EngineCore, "submit", submit_and_listen)


def releases_the_blocks_of_cancelled_requests_while_a_step_runs(patch: pytest.MonkeyPatch) -> None:
    submit = EngineCore.submit

    def submit_and_listen(core: EngineCore, request: Request) -> None:
        submit(core, request)

        def release_if_cancelled(future: Future[Any]) -> None:
            if future.cancelled() and request.lease:
                request.lease.close()

        request.future.add_done_callback(release_if_cancelled)

    patch.setattr(EngineCore, "submit", submit_and_listen)


def counts_no_recomputed_tokens(patch: pytest.MonkeyPatch) -> None:
    admit = Admitter.admit

    def admit_and_forget(admitter: Admitter, request: Request, *args: Any, **options: Any) -> Admission:
        admission = admit(admitter, request, *args, **options)
        request.recomputed_tokens = 0
        return admission

    patch.setattr(Admitter, "admit", admit_and_forget)


def resumes_after_a_preemption_as_if_nothing_was_evicted(patch: pytest.MonkeyPatch) -> None:
    admit = Admitter.admit

    def admit_and_skip_evicted_tokens(admitter: Admitter, request: Request, *args: Any, **options: Any) -> Admission:
        computed_upto = request.computed_upto
        admission = admit(admitter, request, *args, **options)
        request.computed_upto = max(computed_upto, request.computed_upto)
        return admission

    patch.setattr(Admitter, "admit", admit_and_skip_evicted_tokens)


def accepts_values_that_are_not_finite(patch: pytest.MonkeyPatch) -> None:
    wait = Step.wait
    patch.setattr(Step, "wait", lambda running: [each._replace(is_finite=True) for each in wait(running)])


def reports_no_failed_steps_to_callers(patch: pytest.MonkeyPatch) -> None:
    fail = RequestCompleter.fail

    def fail_silently(completer: RequestCompleter, request: Request, error: RadixKVError) -> None:
        if isinstance(error, StepFailed):
            completer.end(request, Outcome.FAILED, error)
        else:
            fail(completer, request, error)

    patch.setattr(RequestCompleter, "fail", fail_silently)


def shares_between_salts(patch: pytest.MonkeyPatch) -> None:
    lease = PrefixCache.lease

    def lease_without_salt(cache: PrefixCache, namespace: Namespace, tokens: bytes, **options: Any) -> Lease:
        opened = lease(cache, namespace._replace(salt=""), tokens, **options)
        opened.namespace = namespace
        return opened

    patch.setattr(PrefixCache, "lease", lease_without_salt)


def samples_by_the_size_of_the_batch(patch: pytest.MonkeyPatch) -> None:
    predict = step.predict

    def predict_by_batch_size(
        logits: Any, most_likely: list[int], requests: list[Request], allowed: dict[int, Any]
    ) -> list[Prediction]:
        draw = sampler.draw

        def draw_at_another_position(rows: Any, samplings: list[Sampling], positions: list[int]) -> Any:
            return draw(rows, samplings, [position + len(requests) for position in positions])

        patch.setattr(sampler, "draw", draw_at_another_position)
        predictions = predict(logits, most_likely, requests, allowed)
        patch.setattr(sampler, "draw", draw)
        return predictions

    patch.setattr(step, "predict", predict_by_batch_size)


def restarts_matchers_at_each_token(patch: pytest.MonkeyPatch) -> None:
    allowed_tokens = step.allowed_tokens

    def restart_matchers(requests: list[Request]) -> dict[int, Any]:
        for request in requests:
            if request.generation is not None:
                request.generation.matcher = None
        return allowed_tokens(requests)

    patch.setattr(step, "allowed_tokens", restart_matchers)


def continues_without_an_allowed_token(patch: pytest.MonkeyPatch) -> None:
    predict = step.predict

    def predict_without_refusals(*args: Any) -> list[Prediction]:
        return [prediction._replace(refusal=None) for prediction in predict(*args)]

    patch.setattr(step, "predict", predict_without_refusals)


def resumes_no_followers_when_it_publishes(patch: pytest.MonkeyPatch) -> None:
    record_published = SingleFlight.record_published

    def publish_and_forget(flights: SingleFlight, leader: Request, upto_tokens: int) -> list[Request]:
        record_published(flights, leader, upto_tokens)
        return []

    patch.setattr(SingleFlight, "record_published", publish_and_forget)


def resumes_followers_only_when_their_leader_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SingleFlight, "record_published", lambda *_: [])


def never_lets_requests_follow(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SingleFlight, "follow", lambda *_: False)


def continues_in_a_published_block(patch: pytest.MonkeyPatch) -> None:
    extend = Lease.extend

    def extend_in_place(lease: Lease, tokens: bytes) -> None:
        lease.num_published_blocks = min(lease.num_published_blocks, lease.block_ids.size - 1)
        extend(lease, tokens)

    patch.setattr(Lease, "extend", extend_in_place)


def keeps_the_blocks_of_failed_requests(patch: pytest.MonkeyPatch) -> None:
    end = RequestCompleter.end

    def end_and_keep(
        completer: RequestCompleter, request: Request, outcome: Outcome, error: RadixKVError | None = None
    ) -> None:
        if outcome is Outcome.FAILED:
            request.lease = None
        end(completer, request, outcome, error)

    patch.setattr(RequestCompleter, "end", end_and_keep)


def publishes_after_a_purge(patch: pytest.MonkeyPatch) -> None:
    purge_in_slices = EngineCore.purge_in_slices

    def purge_and_allow_publishing(core: EngineCore, **names: str | None) -> Generator[None, None, PendingPurge]:
        pending_purge = yield from purge_in_slices(core, **names)
        for request in core._scheduler.requests():
            request.is_revoked = False
        return pending_purge

    patch.setattr(EngineCore, "purge_in_slices", purge_and_allow_publishing)


def streams_the_last_token_twice(patch: pytest.MonkeyPatch) -> None:
    advance = RequestCompleter._advance

    def advance_and_stream_again(completer: RequestCompleter, result: SliceResult) -> None:
        advance(completer, result)
        request = result.token_slice.request
        if request.generation is not None and request.generation.finish_reason is not None:
            request.generation.on_tokens(GeneratedTokens(tuple(request.generation.token_ids[-1:]), request.usage))

    patch.setattr(RequestCompleter, "_advance", advance_and_stream_again)


def ignores_deadlines(patch: pytest.MonkeyPatch) -> None:
    complete = RequestCompleter._complete

    def complete_late(completer: RequestCompleter, request: Request, *args: Any) -> None:
        clock, completer._clock = completer._clock, lambda: request.times.received_s
        complete(completer, request, *args)
        completer._clock = clock

    patch.setattr(RequestCompleter, "_complete", complete_late)


def admits_no_request_after_a_refusal(patch: pytest.MonkeyPatch) -> None:
    remove = Scheduler.remove

    def remove_and_stay_blocked(scheduler: Scheduler, request: Request) -> None:
        blocked = scheduler._blocked
        remove(scheduler, request)
        scheduler._blocked = blocked

    patch.setattr(Scheduler, "remove", remove_and_stay_blocked)


def fails_requests_that_fit_into_a_smaller_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepBudget, "shrink", lambda *_: False)


def retries_steps_without_memory_at_the_same_size(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepBudget, "shrink", lambda _, num_tokens: num_tokens > 1)


def refuses_requests_that_only_have_to_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Admitter, "_can_fit", lambda *_: False)


def puts_all_tenants_into_one_tree(patch: pytest.MonkeyPatch) -> None:
    roots = PublicPrefixes.roots

    def roots_of_one_tenant(public: PublicPrefixes, namespace: Namespace, tokens: bytes) -> Iterator[PublicRoot]:
        for root in roots(public, namespace, tokens):
            yield root._replace(namespace=root.namespace._replace(tenant="", salt=""))

    patch.setattr(PublicPrefixes, "roots", roots_of_one_tenant)


def uses_public_prefixes_for_tenants_that_opted_out(patch: pytest.MonkeyPatch) -> None:
    quota_of = Tenants.quota_of
    patch.setattr(
        Tenants,
        "quota_of",
        lambda tenants, tenant: dataclasses.replace(quota_of(tenants, tenant), uses_public_prefixes=True),
    )


def uses_the_public_prefixes_of_other_adapters(patch: pytest.MonkeyPatch) -> None:
    key = PublicPrefixes._key
    patch.setattr(
        PublicPrefixes, "_key", lambda public, namespace, tokens: key(public, namespace._replace(adapter=""), tokens)
    )


def frees_public_prefixes_that_are_used(patch: pytest.MonkeyPatch) -> None:
    unregister = PublicPrefixes.unregister

    def unregister_and_free(public: PublicPrefixes, name: str) -> PublicPrefix:
        prefix = unregister(public, name)
        if prefix.lease is not None:
            public._free(prefix)
            public._draining.add(prefix)
        return prefix

    patch.setattr(PublicPrefixes, "unregister", unregister_and_free)


def keeps_unused_public_prefixes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PublicPrefixes, "_free", lambda *_: None)


def counts_public_tokens_as_own(patch: pytest.MonkeyPatch) -> None:
    open_lease = PrefixCache.lease

    def lease_without_public_tokens(cache: PrefixCache, *args: Any, **options: Any) -> Lease:
        lease = open_lease(cache, *args, **options)
        lease.public_tokens -= len(lease.root_prefix.tokens) // TOKEN_BYTES
        return lease

    patch.setattr(PrefixCache, "lease", lease_without_public_tokens)


def does_not_count_unregistered_prefixes_that_are_being_computed(patch: pytest.MonkeyPatch) -> None:
    unregister = PublicPrefixes.unregister

    def unregister_and_forget(public: PublicPrefixes, name: str) -> PublicPrefix:
        prefix = unregister(public, name)
        if prefix.is_computing:
            public._draining.discard(prefix)
        return prefix

    patch.setattr(PublicPrefixes, "unregister", unregister_and_forget)


def computes_the_whole_prompt_with_an_invoked_adapter(patch: pytest.MonkeyPatch) -> None:
    chunk_of = step.chunk_of
    patch.setattr(step, "chunk_of", lambda part: dataclasses.replace(chunk_of(part), adapter_from=0))


def shares_what_an_invoked_adapter_generated_with_the_base_model(patch: pytest.MonkeyPatch) -> None:
    def tokens_without_marks(request: Request, start: int) -> bytes:
        assert request.generation is not None
        token_ids = request.generation.token_ids[start - request.params.num_tokens :]
        return np.array(token_ids, dtype="<u4").tobytes()

    patch.setattr(Request, "tokens_from", tokens_without_marks)


def invokes_adapters_a_token_late(patch: pytest.MonkeyPatch) -> None:
    invocation = InvocationMarks.invocation
    patch.setattr(InvocationMarks, "invocation", lambda marks, digest, start: invocation(marks, digest, start + 1))


BREAKS: tuple[BreakEngine, ...] = (
    publishes_before_the_step,
    starts_ahead_requests_that_ended,
    starts_ahead_whatever_is_due,
    starts_two_steps_ahead,
    starts_ahead_with_the_tokens_of_other_requests,
    prepares_copies_again,
    prepares_without_blocks,
    skips_copies,
    repeats_copies,
    leads_while_it_is_preempted,
    ends_cancelled_requests_while_a_step_runs,
    releases_the_blocks_of_cancelled_requests_while_a_step_runs,
    counts_no_recomputed_tokens,
    resumes_after_a_preemption_as_if_nothing_was_evicted,
    accepts_values_that_are_not_finite,
    reports_no_failed_steps_to_callers,
    shares_between_salts,
    samples_by_the_size_of_the_batch,
    restarts_matchers_at_each_token,
    continues_without_an_allowed_token,
    resumes_no_followers_when_it_publishes,
    resumes_followers_only_when_their_leader_ends,
    never_lets_requests_follow,
    continues_in_a_published_block,
    keeps_the_blocks_of_failed_requests,
    publishes_after_a_purge,
    streams_the_last_token_twice,
    ignores_deadlines,
    admits_no_request_after_a_refusal,
    fails_requests_that_fit_into_a_smaller_step,
    retries_steps_without_memory_at_the_same_size,
    refuses_requests_that_only_have_to_wait,
    puts_all_tenants_into_one_tree,
    uses_public_prefixes_for_tenants_that_opted_out,
    uses_the_public_prefixes_of_other_adapters,
    frees_public_prefixes_that_are_used,
    keeps_unused_public_prefixes,
    counts_public_tokens_as_own,
    does_not_count_unregistered_prefixes_that_are_being_computed,
    computes_the_whole_prompt_with_an_invoked_adapter,
    shares_what_an_invoked_adapter_generated_with_the_base_model,
    invokes_adapters_a_token_late,
)
