"""Results of the engine."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.api.hints import HintOutcome
from radixkv.api.miss_reason import MissReason
from radixkv.api.retention import Grant


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. `prompt_tokens == cached_tokens + computed_tokens`; `computed_tokens >= 1`.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: prompt tokens that were reused.
        computed_tokens: prompt tokens that were computed.
        written_tokens: tokens that this request published, and that were not cached before.
        generated_tokens: tokens sampled so far; none of them is part of the prompt.
        recomputed_tokens: tokens computed again after a preemption, because their block was not full or was evicted.
        public_tokens: tokens of `cached_tokens` that came from a public prefix.
        host_tokens, disk_tokens: tokens of `cached_tokens` that were loaded from that tier.
        remote_tokens: tokens of `cached_tokens` that were loaded from shared stores, or fetched from another server.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    written_tokens: int
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    public_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    remote_tokens: int = 0

    @property
    def device_tokens(self) -> int:
        """Tokens of `cached_tokens` that were on the device."""
        return self.cached_tokens - self.host_tokens - self.disk_tokens - self.remote_tokens


@dataclass(frozen=True, slots=True)
class Timing:
    """The durations of the phases of a request, in microseconds.

    Attributes:
        queue_us: from its arrival until its blocks were allocated.
        prefill_us: from then until its first token.
        decode_us: from its first token until its last one; 0 for a prefill.
        total_us: from its arrival until its response.
    """

    queue_us: int
    prefill_us: int
    decode_us: int
    total_us: int


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease that outlives its request.

    Attributes:
        lease_id: identifies the lease in `Engine.release`.
        expires_at_s: Unix time at which the lease expires.
        block_table: physical block ids of the prompt, int32 `[num_blocks]`.
    """

    lease_id: str
    expires_at_s: float
    block_table: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Retained:
    """The result of a retention.

    Attributes:
        grant: how many tokens were granted, refused, and not cached.
        expires_at_s: the earliest Unix time at which a granted token expires; None if none expires.
    """

    grant: Grant
    expires_at_s: float | None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at the position of a token, from the model's raw logits: without penalties or temperature.

    Attributes:
        logprob: log probability of the token, generated or of the prompt.
        top: `(token_id, logprob)` of the most likely tokens, most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """The result of a prefill.

    Attributes:
        request_id: id that the caller has chosen, or a random one.
        usage: token counts of the request.
        next_token_id: the most likely next token.
        top_logprobs: `(token_id, logprob)`, most likely first.
        logits: float32 `[vocab_size]`; None unless requested.
        miss_reason: why no more tokens were reused.
        timing: durations of its phases.
        held_lease: the held lease; None unless requested.
        retained: the result of the retention; None unless requested.
        hints: what was done with each hint.
    """

    request_id: str
    usage: Usage
    next_token_id: int
    top_logprobs: tuple[tuple[int, float], ...]
    logits: npt.NDArray[np.float32] | None
    miss_reason: MissReason
    timing: Timing
    held_lease: HeldLease | None
    retained: Retained | None
    hints: tuple[HintOutcome, ...] = ()


class FinishReason(enum.Enum):
    """Why a generation ended. Values are those of the protocol."""

    STOP = 1  # the last token is a stop token, the constraint allows no more text, or the caller finished it
    LENGTH = 2  # after `max_new_tokens`


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """The result of a generation, with all its tokens.

    Attributes:
        request_id: id that the caller has chosen, or a random one.
        usage: token counts of the request.
        token_ids: all generated tokens, in order; a stop token is the last of them.
        finish_reason: why it ended.
        miss_reason: why no more tokens of its prompt were reused.
        timing: durations of its phases.
        retained: the result of the retention; None unless requested.
        logprobs: one for each token that was not reported in a `GeneratedTokens` before; empty unless requested.
        prompt_logprobs: one for each token of the prompt but the first; empty unless requested.
        hints: what was done with each hint.
    """

    request_id: str
    usage: Usage
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    miss_reason: MissReason
    timing: Timing
    retained: Retained | None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    hints: tuple[HintOutcome, ...] = ()


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    """New tokens of an unfinished generation.

    Attributes:
        token_ids: the new tokens, in order.
        usage: token counts of the request so far.
        logprobs: one for each new token; empty unless requested.
        prompt_logprobs: with the first token, one for each token of the prompt but the first; empty unless requested.
    """

    token_ids: tuple[int, ...]
    usage: Usage
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()


OnTokens = Callable[[GeneratedTokens], None]


class GenerationFuture(Future[GenerateResult]):
    """The future of a generation. `cancel` discards the result; `finish` ends the generation early and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self._on_finish: Callable[[], None] | None = None

    def finish(self) -> None:
        """End the generation after the current step, with the tokens that it has, as `FinishReason.STOP`.

        Can be called from any thread. Does nothing before the first token was reported, or after the end.
        """
        if self._on_finish is not None:
            self._on_finish()

    def watch_finish(self, on_finish: Callable[[], None]) -> None:
        """Register a function that each `finish` calls, on the thread of its caller. For the engine."""
        self._on_finish = on_finish


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a prefill of the same prompt would reuse now, and why not more.

    Attributes:
        cached_tokens: tokens on the device that would be reused.
        prompt_tokens: tokens of the prompt.
        miss_reason: why the other tokens are not on the device.
        stored_tokens: tokens after the cached ones that tiers are known to have. Shared stores are not queried.
    """

    cached_tokens: int
    prompt_tokens: int
    miss_reason: MissReason
    stored_tokens: int = 0
