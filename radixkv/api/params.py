"""Parameters of a request: the prompt, its caller, and the use of the cache."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.api.awaits import Awaits
from radixkv.api.caller import ANONYMOUS, Caller
from radixkv.api.hints import HintAction
from radixkv.api.retention import Retention
from radixkv.errors import InvalidRequest
from radixkv.tokens import TOKEN_BYTES

DEFAULT_URGENCY = 50
MAX_URGENCY = 100


@dataclass(frozen=True, slots=True)
class PrefillParams:
    """A prompt and its options.

    Attributes:
        tokens: the prompt, token ids as little-endian uint32 bytes.
        caller: the tenant, adapter and salt of the request.
        request_id: returned in the response.
        read_cache: whether to reuse cached tokens.
        write_cache: whether to publish computed tokens.
        retention: keeps the prompt longer than other prompts, or evicts it earlier; None for the default.
        urgency: 0 to 100. A point of urgency counts as a second of waiting: a request with 60 is scheduled before those
            of the same tenant with 50 that arrived up to 10 s earlier. The protocol calls it `priority`.
        top_logprobs: number of most likely next tokens to report.
        return_logits: whether to return the logits of the next token, float32 `[vocab_size]`.
        hold_lease: whether the lease on the prompt's blocks is held after the response.
        traceparent: the caller's span as a W3C Trace Context header; empty for none.
        session_id: the session that the request belongs to, a name chosen by the tenant; empty for none.
        awaits: what the session waits for when the request has ended, if the caller knows it.
        hints: applied when the request has ended.
        deadline_s: `time.monotonic()` after which the caller no longer waits; None for no deadline.
    """

    tokens: bytes
    caller: Caller = ANONYMOUS
    request_id: str = ""
    read_cache: bool = True
    write_cache: bool = True
    retention: Retention | None = None
    urgency: int = DEFAULT_URGENCY
    top_logprobs: int = 0
    return_logits: bool = False
    hold_lease: bool = False
    traceparent: str = ""
    session_id: str = ""
    awaits: Awaits = Awaits.UNKNOWN
    hints: tuple[HintAction, ...] = ()
    deadline_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.tokens) // TOKEN_BYTES

    def require_generable(self) -> None:
        """Reject options that only a prefill may have.

        Raises:
            InvalidRequest: the message names the field.
        """
        for name in ("top_logprobs", "return_logits", "hold_lease"):
            if value := getattr(self, name):
                raise InvalidRequest(f"prefill.{name}: expected none in a generation, got {value}")
