"""Turns what a step computed into published blocks, told tokens and answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import cast

from radixkv.api.logprob_table import LogprobTable
from radixkv.api.result import FinishReason, GeneratedTokens, GenerateResult, PrefillResult
from radixkv.engine.answers import Answers
from radixkv.engine.early_ends import EarlyEnds, deadline_passed
from radixkv.engine.endings import Endings
from radixkv.engine.sampler import Prediction
from radixkv.engine.step import Computed, settle
from radixkv.engine.tally import Tally
from radixkv.errors import NotFinite, StepFailed
from radixkv.scheduling.request import Generation, Outcome, Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.single_flight import SingleFlight

_log = logging.getLogger(__name__)


class Delivery:
    """Delivers computed tokens, in two parts: the next step may be started between them.

        advance   the request has its next token               (nobody else has seen it)
        publish   commit ─▶ next token told, or answer made    (others can match the blocks)

    Args:
        answers: makes results.
        endings: ends the requests that are answered or that failed.
        scheduler, flights: resume followers when what they wait for is published.
        early_ends: notes requests that must fail after the step that is under way.
        tally: counts the tokens of answered requests.
        clock: seconds, never going back.
        block_size: tokens a block.
    """

    def __init__(
        self,
        answers: Answers,
        endings: Endings,
        scheduler: Scheduler,
        flights: SingleFlight,
        early_ends: EarlyEnds,
        tally: Tally,
        clock: Callable[[], float],
        block_size: int,
    ) -> None:
        self._answers = answers
        self._endings = endings
        self._scheduler = scheduler
        self._flights = flights
        self._early_ends = early_ends
        self._tally = tally
        self._clock = clock
        self._block_size = block_size

    def advance(self, computed: Iterable[Computed]) -> None:
        """Note how far each request is computed, and its next token."""
        for each in computed:
            self._advance(each)

    def publish(self, computed: Iterable[Computed]) -> None:
        """Publish the blocks of each request, and answer it or tell its next token."""
        for each in computed:
            self._publish(each)

    def finish(self, request: Request) -> None:
        """End a generation with the tokens that it has: publish what is computed, and answer. It may be paused."""
        assert request.generation is not None, "only generations are finished early"
        request.generation.is_finished = True
        if request.lease is not None and request.computed_upto > request.lease.committed_tokens:
            self._commit(request, request.computed_upto)
        self._answer(request, lambda now_s: self._answers.generation(request, FinishReason.STOP, (), now_s))

    def _advance(self, computed: Computed) -> None:
        (request, start, upto), is_finite, prediction, prompt_logprobs = computed
        if not is_finite:
            return
        request.computed_upto, request.has_computed = upto, True
        request.open_lease.copy = None  # the step has made it
        if request.state is not None:
            request.state.advance(upto)
        settle(request)
        if prompt_logprobs is not None and request.generation is not None:
            if (told := request.generation.prompt_logprobs) is None:
                told = request.generation.prompt_logprobs = LogprobTable(request.num_prompt_tokens - 1)
            told.put(start, prompt_logprobs)
        if prediction is None or prediction.refusal is not None:
            return
        if request.prefilled_s is None:
            request.prefilled_s = self._clock()
        if request.generation is not None:
            try:
                request.generation.append(prediction.next_token_id)
            except BaseException:  # noqa: BLE001 - a caller's code, as in `_tell`
                _log.exception("a constraint raised")
                self._early_ends.fail(request, StepFailed("constraint: expected it to take a token, and it raised"))

    def _publish(self, computed: Computed) -> None:
        (request, _, upto), is_finite, prediction, _ = computed
        if self._early_ends.is_failing(request):
            return
        if not is_finite:
            values = "the model computed NaN or infinite values for this request"
            self._endings.fail(request, NotFinite(f"step: {values}; nothing of the step is answered or cached"))
            return
        if computed.refusal is not None:
            self._endings.fail(request, computed.refusal)
            return
        if prediction is None:
            self._commit(request, upto)
            return
        generation = request.generation
        if generation is None:
            self._commit(request, upto)
            self._answer(request, lambda now_s: self._answers.prefill(request, request.open_lease, prediction, now_s))
            return
        finish_reason = generation.finish_reason
        if finish_reason is not None:
            self._commit(request, upto)
            logprobs = prediction.logprobs
            self._answer(request, lambda now_s: self._answers.generation(request, finish_reason, logprobs, now_s))
            return
        # The prompt is published to its last token, later tokens in full blocks: a block that is published before it
        # is full has to be copied for the next token.
        is_first = len(generation.token_ids) == 1
        publishable = upto if is_first else upto // self._block_size * self._block_size
        if publishable > request.open_lease.committed_tokens:
            self._commit(request, publishable)
        self._scheduler.resume(self._flights.leave(request))  # nobody waits for generated tokens
        self._tell(request, generation, prediction)

    def _commit(self, request: Request, upto: int) -> None:
        """Publish computed tokens: after each chunk, or all at the end if the request must not read from the cache.

        A commit may adopt blocks that others published, and later chunks would read them.
        """
        params, lease = request.params, request.open_lease
        generation = request.generation
        is_finished = upto == request.num_tokens if generation is None else generation.finish_reason is not None
        if params.write_cache and not request.is_revoked and (params.read_cache or is_finished):
            request.written_tokens += lease.commit(upto)
            if request.state is not None:
                request.state.publish(lease.block_ids, lease.own.num_published_blocks)
            self._scheduler.resume(self._flights.published(request, lease.committed_tokens))

    def _tell(self, request: Request, generation: Generation, prediction: Prediction) -> None:
        prompt_logprobs = (generation.prompt_logprobs or ()) if len(generation.token_ids) == 1 else ()
        try:
            token_ids = (prediction.next_token_id,)
            generation.on_tokens(GeneratedTokens(token_ids, request.usage, prediction.logprobs, prompt_logprobs))
        except BaseException:  # noqa: BLE001 - a caller's code on the engine's thread; the other requests go on
            _log.exception("the callback of a generation raised")
            self._early_ends.fail(request, StepFailed("generation: the caller's callback raised"))

    def _answer(self, request: Request, make: Callable[[float], PrefillResult | GenerateResult]) -> None:
        now_s = self._clock()
        if request.is_late(now_s):
            self._endings.fail(request, deadline_passed())
            return
        if not request.future.set_running_or_notify_cancel():
            self._endings.end(request, Outcome.CANCELLED)
            return
        result = make(now_s)
        self._tally.answered(result.usage)
        self._endings.end(request, Outcome.FINISHED)
        cast("Future[PrefillResult | GenerateResult]", request.future).set_result(result)
