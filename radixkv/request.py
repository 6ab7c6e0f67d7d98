"""What a caller asks, what it gets back, and the life of a request in between."""

from __future__ import annotations

import enum
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.lease import Lease
from radixkv.miss_reason import MissReason
from radixkv.namespace import Namespace
from radixkv.retention import Grant, Retention


@dataclass(frozen=True, slots=True)
class PrefillParams:
    """One prefill as the caller asked for it.

    Attributes:
        tokens: the prompt, token ids as little-endian uint32 bytes.
        tenant, adapter, salt: identity; see `Namespace`.
        request_id: echoed in the answer.
        read_cache: reuse cached tokens.
        write_cache: publish computed tokens.
        retention: keep the prompt longer than others, or less long; None for neither.
        top_logprobs: how many most likely next tokens to report.
        return_logits: return the whole logits row.
        hold_lease: keep the prompt's blocks alive after the answer.
        deadline_s: `time.monotonic()` after which nobody waits for the answer; None for no deadline.
    """

    tokens: bytes
    tenant: str = ""
    adapter: str = ""
    salt: str = ""
    request_id: str = ""
    read_cache: bool = True
    write_cache: bool = True
    retention: Retention | None = None
    top_logprobs: int = 0
    return_logits: bool = False
    hold_lease: bool = False
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. `prompt_tokens == cached_tokens + computed_tokens`; `computed_tokens >= 1`."""

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    written_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time of one request went, in microseconds."""

    queue_us: int
    prefill_us: int
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


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a prefill of the same prompt would reuse now."""

    cached_tokens: int
    prompt_tokens: int
    miss_reason: MissReason


class Outcome(enum.Enum):
    """How a request ended."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class Request:
    """A prefill inside the engine. Owned by the engine thread; only `future` is shared with the caller.

    Attributes:
        arrival: how many requests came before it.
        computed_upto: prompt tokens whose K/V exist, reused ones included.
        written_tokens: tokens that this request made matchable.
        is_revoked: its namespace was purged while it waited; it publishes nothing.
        received_s, scheduled_s: `time.monotonic()` of arrival and of admission.
    """

    params: PrefillParams
    namespace: Namespace
    future: Future[PrefillResult]
    received_s: float
    arrival: int = 0
    lease: Lease | None = None
    miss_reason: MissReason = MissReason.COLD
    computed_upto: int = 0
    written_tokens: int = 0
    is_revoked: bool = False
    scheduled_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Prompt length in tokens."""
        return len(self.params.tokens) // 4
