"""The result that each request to a simulated engine must get, derived from the request alone."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from radixkv.api.logprob_table import LogprobTable
from radixkv.api.miss_reason import MissReason
from radixkv.api.result import (
    FinishReason,
    GeneratedTokens,
    GenerateResult,
    HeldLease,
    PrefillResult,
    TokenLogprobs,
    Usage,
)
from radixkv.compute.forward import Chunk
from radixkv.engine.sampler import read_logprob_rows
from radixkv.errors import CapacityError, DeadlinePassed, Draining, InvalidRequest, StepFailed
from radixkv.namespace import PUBLIC_TENANT
from radixkv.scheduling.request import Request
from tests.engine.simulation.engine_events import Ask
from tests.engine.simulation.simulated_model import VOCAB_SIZE, content_of, continuation, logits_of

_ROUNDING_S = 1e-6  # results report times in whole microseconds


@dataclass(eq=False)
class RequestRecord:
    """A request, and everything that its caller and the runner have observed.

    Attributes:
        streamed: tokens that were passed to the callback.
        streamed_prompt_logprobs: log probabilities of the prompt that arrived with these tokens.
        held: the lease that the caller holds; None if it has no lease.
        num_computed: tokens that the runner computed for the request.
        upto: end of the last chunk; None before the first.
        num_recomputed, num_skipped: tokens in which successive chunks overlap, and tokens between them.
        written_at_purge: number of tokens that the request had published when its namespace was purged; later it must
            not publish any. None if there was no purge.
        is_cancelled: the caller cancelled the future before it was done.
        is_judged: the result was checked.
        may_end_early: the caller has called `finish`.
        num_streamed_at_finish: number of tokens streamed when the caller called `finish`; None if none, or not called.
        must_fail: the request was in a step that failed, or its callback raised an exception.
        num_ends: number of times that the engine has reported the end of the request.
        reused: number of tokens that the lease reused when the request began, and how many of them were public.
    """

    ask: Ask
    future: Future[Any]
    request: Request = field(init=False)
    streamed: list[int] = field(default_factory=list)
    streamed_prompt_logprobs: list[tuple[TokenLogprobs, ...]] = field(default_factory=list)
    held: HeldLease | None = None
    num_computed: int = 0
    upto: int | None = None
    num_recomputed: int = 0
    num_skipped: int = 0
    written_at_purge: int | None = None
    is_cancelled: bool = False
    is_judged: bool = False
    may_end_early: bool = False
    num_streamed_at_finish: int | None = None
    must_fail: bool = False
    num_ends: int = 0
    reused: tuple[int, int] = (0, 0)

    @property
    def expected(self) -> tuple[int, ...]:
        """Compute the tokens of a whole generation."""
        return continuation(self.ask.namespace, self.ask.path, self.ask.sampling)

    @property
    def is_refused(self) -> bool:
        """Whether the constraint raises instead of allowing a next token."""
        if not self.ask.rises or len(self.expected) != self.ask.refuses_after:
            return False
        has_ended = self.expected[-1] in (VOCAB_SIZE - 1, *self.ask.stop_token_ids)
        return not has_ended and len(self.expected) < self.ask.max_new_tokens

    @property
    def expected_prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Compute the log probabilities of the prompt if they were requested."""
        count, tokens = self.ask.sampling.prompt_logprobs, self.ask.tokens
        if count is None or len(tokens) == 4:
            return ()
        content = content_of(self.ask.namespace, self.ask.path)
        rows = torch.from_numpy(np.stack([logits_of(content[:upto]) for upto in range(1, len(content))]))
        table = LogprobTable()
        table.put(0, read_logprob_rows(rows, np.frombuffer(tokens, dtype="<u4")[1:].tolist(), count))
        return tuple(table)

    def record_chunk(self, chunk: Chunk) -> None:
        """Record that a chunk of the request is being computed."""
        if self.upto is not None:
            self.num_recomputed += max(0, self.upto - chunk.start)
            self.num_skipped += max(0, chunk.start - self.upto)
        self.num_computed += chunk.num_tokens
        self.upto = chunk.end

    def add_chunk(self, chunk: GeneratedTokens) -> list[str]:
        """Add a streamed chunk, which must have the next tokens and the current usage. Returns the errors."""
        self.streamed.extend(chunk.token_ids)
        if len(self.streamed) == 1 or chunk.prompt_logprobs:
            self.streamed_prompt_logprobs.append(chunk.prompt_logprobs)
        streamed, expected = tuple(self.streamed), self.expected
        return [
            *self._usage_errors(chunk.usage),
            *_error_unless(
                streamed == expected[: len(streamed)] and len(streamed) < len(expected) + self.is_refused,
                "a streamed token is not the next one",
            ),
            *_error_unless(not self.request.is_over, "a token was streamed after the end"),
            *_error_unless(
                chunk.usage.generated_tokens == len(streamed), "more or fewer tokens are counted than were streamed"
            ),
        ]

    def judge(self, now_s: float, *, is_closed: bool) -> Counter[str]:
        """Check a finished future: whether it may be finished, and its result. Returns how it ended."""
        assert self.request.is_over or self.future.cancelled()
        if self.future.cancelled():
            assert self.is_cancelled
            return Counter(("cancelled",))
        error = self.future.exception(0)
        if error is not None:
            self._judge_error(error, now_s, is_closed)
            return Counter((f"failed with {type(error).__name__}",))
        result = self.future.result(0)
        assert not self.must_fail, "a request was answered whose step failed"
        assert self.ask.deadline_s is None or self._answer_time_s(result) < self.ask.deadline_s + _ROUNDING_S
        if isinstance(result, GenerateResult):
            self._judge_generation(result)
        else:
            self._judge_prefill(result)
        self._judge_usage(result.usage, result.miss_reason)
        kinds = ("cached", "computed", "recomputed", "written")
        return Counter(
            {
                "answered": 1,
                "finished early": self._is_early(result),
                "risen to the end": isinstance(result, GenerateResult) and self._has_risen(result),
                f"missed as {result.miss_reason.value}": 1,
                **{f"{kind} tokens": getattr(result.usage, f"{kind}_tokens") for kind in kinds},
            }
        )

    def _is_early(self, result: PrefillResult | GenerateResult) -> bool:
        """Whether a generation ended between two steps, so that its last token was streamed like all others."""
        return isinstance(result, GenerateResult) and tuple(self.streamed) == result.token_ids

    def _answer_time_s(self, result: PrefillResult | GenerateResult) -> float:
        """Check the times of a result. Returns when the request was answered, by the clock of the engine."""
        timing = result.timing
        phases_us = timing.queue_us, timing.prefill_us, timing.decode_us
        assert min(phases_us) >= 0
        if isinstance(result, PrefillResult):  # the time after the only token belongs to no phase
            assert timing.decode_us == 0
            assert timing.total_us >= sum(phases_us) - 2
        else:
            assert abs(timing.total_us - sum(phases_us)) <= 2
        return self.request.times.received_s + timing.total_us / 1e6

    def _judge_error(self, error: BaseException, now_s: float, is_closed: bool) -> None:
        """Check an error. `EngineOracle` checks whether blocks were really missing, when the engine reports the end."""
        if isinstance(error, DeadlinePassed):
            assert self.ask.deadline_s is not None
            assert self.ask.deadline_s <= now_s
        elif isinstance(error, StepFailed):
            assert self.must_fail
        elif isinstance(error, InvalidRequest):
            assert self.is_refused
            assert tuple(self.streamed) == self.expected
        else:
            assert isinstance(error, CapacityError | Draining), f"unexpected: {error!r}"
            assert is_closed or not isinstance(error, Draining)

    def _judge_prefill(self, result: PrefillResult) -> None:
        expected = logits_of(content_of(self.ask.namespace, self.ask.path))
        assert result.next_token_id == int(expected.argmax())
        if self.ask.tenant != PUBLIC_TENANT:
            assert np.array_equal(result.logits, expected), "the output is not the model's"
            assert result.next_token_id == result.top_logprobs[0][0]
        is_held = result.held_lease is not None
        assert is_held == self.ask.holds or (not is_held and self.written_at_purge is not None)
        self.held = result.held_lease

    def _judge_generation(self, result: GenerateResult) -> None:
        num_tokens, streamed = len(result.token_ids), tuple(self.streamed)
        assert result.token_ids == self.expected[:num_tokens], "the output is not the model's"
        is_early = self._is_early(result)
        if is_early:
            assert self.may_end_early, "a generation ended early without a reason"
        else:
            assert streamed == result.token_ids[:-1]
            assert num_tokens == len(self.expected), "a generation ended early, and its last tokens were streamed late"
            assert not self.is_refused
        max_tokens = num_tokens if self.num_streamed_at_finish is None else self.num_streamed_at_finish + 1
        assert num_tokens <= max_tokens, "a generation continued that was to be stopped"
        is_stopped = is_early or result.token_ids[-1] in self.ask.stop_token_ids or self._has_risen(result)
        assert result.finish_reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
        assert result.usage.generated_tokens == len(result.token_ids)
        assert result.prompt_logprobs == self.expected_prompt_logprobs
        assert not self.streamed or self.streamed_prompt_logprobs == [self.expected_prompt_logprobs]

    def _has_risen(self, result: GenerateResult) -> bool:
        """Whether a generation whose tokens must rise can't continue."""
        return self.ask.rises > 0 and result.token_ids[-1] == VOCAB_SIZE - 1

    def _judge_usage(self, usage: Usage, reason: MissReason) -> None:
        assert self._usage_errors(usage) == []
        num_decoded = max(0, usage.generated_tokens - 1)
        num_computed = usage.computed_tokens + num_decoded + self.num_recomputed - self.num_skipped
        if self.may_end_early and self.upto is not None:  # tokens that a preemption dropped may not be computed again
            num_computed -= usage.prompt_tokens + num_decoded - self.upto
        assert self.num_computed == num_computed, "tokens were computed and not counted, or counted and not computed"
        # Recomputed tokens may be published again.
        max_written_tokens = usage.prompt_tokens + num_decoded + self.num_recomputed
        assert 0 <= usage.written_tokens <= self.ask.writes * max_written_tokens
        assert self.written_at_purge in (None, usage.written_tokens), "a purged request published something"
        assert (reason is MissReason.READ_DISABLED) == (not self.ask.reads)
        assert reason is not MissReason.ADAPTER_CHANGED or self.request.former
        if self.ask.reads:
            assert (reason is MissReason.NONE) == (usage.computed_tokens == 1)

    def _usage_errors(self, usage: Usage) -> list[str]:
        prompt_tokens = len(self.ask.tokens) // 4
        adds_up = usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens == prompt_tokens
        return [
            *_error_unless(adds_up and usage.computed_tokens >= 1, "cached and computed tokens are not the prompt"),
            *_error_unless(usage.cached_tokens == 0 or self.ask.reads, "a request read the cache that must not"),
            *_error_unless(
                (usage.cached_tokens, usage.public_tokens) == self.reused, "reused or public tokens are miscounted"
            ),
            *_error_unless(usage.recomputed_tokens == self.num_recomputed, "recomputed tokens are miscounted"),
        ]


def _error_unless(is_right: bool, message: str) -> list[str]:
    """Return the message of an error, or nothing."""
    return [] if is_right else [message]
