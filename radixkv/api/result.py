"""Answers of the engine."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.api.miss_reason import MissReason
from radixkv.api.retention import Grant


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. `prompt_tokens == cached_tokens + computed_tokens`; `computed_tokens >= 1`.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: prompt tokens that were reused.
        computed_tokens: prompt tokens that were computed.
        written_tokens: tokens made matchable for others.
        generated_tokens: tokens sampled so far; none of them is part of the prompt.
        recomputed_tokens: tokens computed again after a pause, because their block was not full or was evicted.
        public_tokens: tokens of `cached_tokens` that came from a public prefix.
        host_tokens, disk_tokens, remote_tokens: tokens of `cached_tokens` that were loaded from the store of that tier.
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
    """The time that the phases of one request took, in microseconds.

    Attributes:
        queue_us: from its arrival until it had its blocks.
        prefill_us: from then until its first token.
        decode_us: from its first token until its last one; 0 for a prefill.
        total_us: from its arrival until its answer.
    """

    queue_us: int
    prefill_us: int
    decode_us: int
    total_us: int


@dataclass(frozen=True, slots=True)
class HeldLease:
    """The receipt for blocks that are kept after the answer.

    Attributes:
        lease_id: names the lease in `Engine.release`.
        expires_at_s: Unix time at which the engine releases the lease.
        block_table: physical block ids of the prompt, int32 `[num_blocks]`.
    """

    lease_id: str
    expires_at_s: float
    block_table: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Retained:
    """The answer to a retention.

    Attributes:
        grant: tokens that were granted, refused and not cached.
        expires_at_s: Unix time at which the first part of it ends; None if no part does.
    """

    grant: Grant
    expires_at_s: float | None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities where a token stands, by the model's own logits: without penalties or temperature.

    Attributes:
        logprob: of the token, generated or of the prompt.
        top: `(token_id, logprob)` of the most likely tokens, most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """The answer to one prefill.

    Attributes:
        request_id: the caller's, or a random one.
        usage: its tokens.
        next_token_id: the most likely next token.
        top_logprobs: `(token_id, logprob)`, most likely first.
        logits: float32 `[vocab_size]`; None unless asked for.
        miss_reason: why it did not reuse more.
        timing: its phases.
        held_lease: None unless asked for.
        retained: None unless asked for.
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


class FinishReason(enum.Enum):
    """Why a generation ended. Values are those of the wire."""

    STOP = 1  # at a stop token, which is the last token, or because the caller had it finished
    LENGTH = 2  # after `max_new_tokens`


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """The answer to one generation, after all its tokens.

    Attributes:
        request_id: the caller's, or a random one.
        usage: its tokens.
        token_ids: all generated tokens, in order; a stop token is the last of them.
        finish_reason: why it ended.
        miss_reason: why its prompt did not reuse more.
        timing: its phases.
        retained: None unless asked for.
        logprobs: one for each token that was not told before it; empty unless asked for.
        prompt_logprobs: one for each token of the prompt but the first; empty unless asked for.
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


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    """New tokens of a generation that goes on.

    Attributes:
        token_ids: the new tokens, in order.
        usage: all its tokens so far.
        logprobs: one for each new token; empty unless asked for.
        prompt_logprobs: with the first token, one for each token of the prompt but the first; empty unless asked for.
    """

    token_ids: tuple[int, ...]
    usage: Usage
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()


OnTokens = Callable[[GeneratedTokens], None]


class GenerationFuture(Future[GenerateResult]):
    """The answer to a generation. Cancelling it throws the answer away; `finish` ends it early and keeps the answer."""

    def __init__(self) -> None:
        super().__init__()
        self._on_finish: Callable[[], None] | None = None

    def finish(self) -> None:
        """Let the generation end with the tokens that it has, with `FinishReason.STOP`, after the step under way.

        From any thread, once it has told a token; before that, and when it is over, it does nothing.
        """
        if self._on_finish is not None:
            self._on_finish()

    def watch_finish(self, on_finish: Callable[[], None]) -> None:
        """Have `on_finish` called at each `finish`, on the thread of its caller. For the engine."""
        self._on_finish = on_finish


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Says what a prefill of the same prompt would reuse now, and why not more.

    Attributes:
        cached_tokens: those on the device.
        prompt_tokens: all.
        miss_reason: of what is not on the device.
        stored_tokens: those after them that stores below the device are known to have. Shared stores are not asked.
    """

    cached_tokens: int
    prompt_tokens: int
    miss_reason: MissReason
    stored_tokens: int = 0
