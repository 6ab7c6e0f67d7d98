"""What a caller asks to be computed."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.api.retention import Retention
from radixkv.errors import InvalidRequest
from radixkv.tokens import TOKEN_BYTES

DEFAULT_REQUEST_PRIORITY = 50


MAX_REQUEST_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class PrefillParams:
    """One prompt as the caller asked for it to be computed.

    Attributes:
        tokens: the prompt, token ids as little-endian uint32 bytes.
        tenant, adapter, salt: identity; see `Namespace`.
        request_id: echoed in the answer.
        read_cache: reuse cached tokens.
        write_cache: publish computed tokens.
        retention: keep the prompt longer than others, or less long; None for neither.
        priority: 0 to 100; goes before its tenant's other requests that came up to so many seconds earlier, counted
            from theirs.
        top_logprobs: how many most likely next tokens to report.
        return_logits: return the whole logits row.
        hold_lease: keep the prompt's blocks alive after the answer.
        traceparent: the caller's span as W3C Trace Context writes it; empty for none.
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
    priority: int = DEFAULT_REQUEST_PRIORITY
    top_logprobs: int = 0
    return_logits: bool = False
    hold_lease: bool = False
    traceparent: str = ""
    deadline_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt length in tokens."""
        return len(self.tokens) // TOKEN_BYTES

    def require_generable(self) -> None:
        """Refuse what only the answer to a prefill has.

        Raises:
            InvalidRequest: the message names the field.
        """
        for name in ("top_logprobs", "return_logits", "hold_lease"):
            if given := getattr(self, name):
                raise InvalidRequest(f"prefill.{name}: expected none in a generation, got {given}")
