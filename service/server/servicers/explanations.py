"""Explains prompts: looks them up on the engine's thread, and compares them with cached branches on another thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from radixkv.api.caller import Caller
from radixkv.api.explanation import Difference, Excerpt, Explanation, LookUp, PromptSegment, require_segments
from radixkv.explain.comparison import Decode
from radixkv.explain.explanation import explain
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.server.receive.fair_shares import FairShares, QuotaKey
from radixkv.service.server.servicers.engine_calls import result_of
from radixkv.service.server.servicers.messages import read_caller, require_names
from radixkv.service.server.thread_call import call_on_thread
from radixkv.service.token_ids import read_token_ids
from radixkv.v1 import cache_pb2, explain_pb2

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine

MAX_WAITING = 32

_logger = logging.getLogger(__name__)


class Explainer:
    """Explains prompts. Prompts are compared one at a time, so that explanations take at most one CPU core.

    A cancelled call leaves the queue. If its thread is already running, the next call waits until the thread has ended.
    For use on one event loop.

    Args:
        engine: looks prompts up.
        tokenizer: the model's tokenizer; loaded for the first explanation.
    """

    def __init__(self, engine: Engine, tokenizer: ModelTokenizer) -> None:
        self._engine = engine
        self._mailbox = Mailbox()
        self._tokenizer = tokenizer
        self._turn = asyncio.Lock()
        self._queue_shares = FairShares(MAX_WAITING, "explanations")

    async def explain(self, request: cache_pb2.ExplainRequest) -> explain_pb2.ExplainResponse:
        """Explain a prompt.

        Raises:
            InvalidRequest: the prompt, a name or a segment is wrong.
            QueueFull: too many explanations wait, and this tenant has its share of them; or as `Engine.look_up`.
            RateExceeded, PromptTooLong, UnknownAdapter, Draining, StepHangs: as `Engine.look_up`.
        """
        caller, segments = read_caller(request), _read_segments(request)
        has_branch = not request.omit_cached_text
        explanation = await self.begin(read_token_ids(request), caller, segments, has_branch=has_branch)
        try:
            return await explanation
        finally:
            explanation.cancel()

    async def begin(
        self, tokens: bytes, caller: Caller, segments: Sequence[PromptSegment] = (), *, has_branch: bool
    ) -> asyncio.Future[explain_pb2.ExplainResponse]:
        """Look up a prompt, and begin to compare it with the cached branches from which it diverges.

        Returns:
            The explanation; see `explanation_message`. It keeps its place among the explanations until it is done or
            cancelled.

        Raises the same errors as `explain`.
        """
        quota_key = QuotaKey.of_tenant(caller.tenant)
        self._queue_shares.take(quota_key, 1)
        try:
            look_up = await result_of(self._engine, self._mailbox, self._engine.look_up(tokens, caller))
        except BaseException:
            self._queue_shares.release(quota_key, 1)
            raise
        explanation = asyncio.ensure_future(self._compare(look_up, segments, has_branch=has_branch))
        explanation.add_done_callback(lambda _: self._queue_shares.release(quota_key, 1))
        return explanation

    async def _compare(
        self, look_up: LookUp, segments: Sequence[PromptSegment], *, has_branch: bool
    ) -> explain_pb2.ExplainResponse:
        decode = await self._decode()
        await self._turn.acquire()
        vocab_size = self._engine.limits.vocab_size
        compare = partial(explain, look_up, segments=segments, decode=decode, vocab_size=vocab_size)
        return explanation_message(await call_on_thread(compare, self._turn.release), has_branch=has_branch)

    async def _decode(self) -> Decode | None:
        """Return the function that decodes tokens; None if the model has no tokenizer that can be loaded."""
        try:
            return (await self._tokenizer.load_async()).decode
        except ValueError as error:
            _logger.debug("explanations have no text, because the model has no tokenizer: %s", error)
            return None


def _read_segments(request: cache_pb2.ExplainRequest) -> Sequence[PromptSegment]:
    segments = [PromptSegment(each.name, each.end_token) for each in request.segments]
    require_segments(segments)
    for index, segment in enumerate(segments):
        require_names(**{f"segments[{index}].name": segment.name})
    return segments


def explanation_message(explanation: Explanation, *, has_branch: bool) -> explain_pb2.ExplainResponse:
    """Write an explanation. The tokens and the text of the cached branch are written only with `has_branch`."""
    difference = explanation.difference
    return explain_pb2.ExplainResponse(
        prompt_tokens=explanation.prompt_tokens,
        cached_tokens=explanation.cached_tokens,
        miss_reason=explanation.miss_reason.value,
        left_at_token=explanation.left_at,
        segment=explanation.segment,
        computed_tokens=explanation.computed_tokens,
        computed_s=explanation.computed_s,
        difference=None if difference is None else _difference_message(difference, has_branch=has_branch),
    )


def _difference_message(difference: Difference, *, has_branch: bool) -> explain_pb2.Difference:
    return explain_pb2.Difference(
        kind=difference.kind.value,
        before_token_ids=difference.before_ids,
        before_text=difference.before_text,
        prompt=_excerpt_message(difference.prompt),
        branch=_excerpt_message(difference.branch) if has_branch else None,
        prompt_span_tokens=difference.prompt_span_tokens,
        branch_span_tokens=difference.branch_span_tokens,
        lost_tokens=difference.lost_tokens,
        lost_s=difference.lost_s,
        idle_s=difference.idle_s,
    )


def _excerpt_message(excerpt: Excerpt) -> explain_pb2.Excerpt:
    return explain_pb2.Excerpt(
        token_ids=excerpt.token_ids,
        different_tokens=excerpt.num_different,
        different_text=excerpt.different_text,
        equal_text=excerpt.equal_text,
    )
