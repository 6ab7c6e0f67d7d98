"""What a caller gets back."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.api.miss_reason import MissReason
from radixkv.api.retention import Grant


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. `prompt_tokens == cached_tokens + computed_tokens`; `computed_tokens >= 1`.

    Attributes:
        written_tokens: made matchable for others.
        generated_tokens: sampled so far; none of them is part of the prompt.
        recomputed_tokens: computed a second time after a pause: what a block that was not full held, or was evicted.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    written_tokens: int
    generated_tokens: int = 0
    recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time of one request went, in microseconds.

    Attributes:
        queue_us: received until it had its blocks.
        prefill_us: from then until the next token was known.
        decode_us: from then until the last token was known; 0 for a prefill.
        total_us: received until answered.
    """

    queue_us: int
    prefill_us: int
    decode_us: int
    total_us: int


@dataclass(frozen=True, slots=True)
class HeldLease:
    """The receipt for blocks that stay alive after the answer.

    Attributes:
        lease_id: what to pass to `Engine.release`.
        expires_at_s: Unix time at which the engine releases it by itself.
        block_table: int32 physical block ids of the prompt.
    """

    lease_id: str
    expires_at_s: float
    block_table: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Retained:
    """The answer to a retention.

    Attributes:
        expires_at_s: Unix time at which the first of it ends; None if none does.
    """

    grant: Grant
    expires_at_s: float | None


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """The answer to one prefill.

    Attributes:
        next_token_id: the most likely next token.
        top_logprobs: `(token_id, logprob)`, most likely first.
        logits: float32 `[vocab_size]`, or None unless asked for.
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
    """Why a generation ended; values are those of the wire."""

    STOP = 1  # a stop token, which is the last one generated
    LENGTH = 2  # as many tokens as were asked for


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """The answer to one generation, after all its tokens.

    Attributes:
        token_ids: everything that was generated, in order; a stop token is the last of them.
        retained: None unless asked for.
    """

    request_id: str
    usage: Usage
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    miss_reason: MissReason
    timing: Timing
    retained: Retained | None


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    """News of a generation that goes on.

    Attributes:
        usage: so far.
    """

    token_ids: tuple[int, ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a prefill of the same prompt would reuse now."""

    cached_tokens: int
    prompt_tokens: int
    miss_reason: MissReason
