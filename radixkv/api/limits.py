"""What the engine serves and accepts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from radixkv.api.params import MAX_REQUEST_PRIORITY, PrefillParams
from radixkv.api.sampling import Sampling
from radixkv.errors import InvalidRequest, PromptTooLong, QuotaExceeded
from radixkv.tokens import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Limits:
    """What never changes while an engine lives. Refuses what it could never serve.

    Attributes:
        max_prompt_tokens: what both the model and the whole block pool can hold.
        max_sequence_tokens: prompt and generated tokens together; a block less of the pool, because a generation goes
            on in a copy of the block in which its prompt ends.
        epoch: identifies this life of the block pool; block ids of another epoch mean nothing.
        ceiling_tokens: by tenant; without a bound for the others.
    """

    model: str
    device: str
    vocab_size: int
    max_prompt_tokens: int
    max_sequence_tokens: int
    block_size: int
    epoch: int
    ceiling_tokens: Mapping[str, int]

    def require_tokens(self, tokens: bytes) -> None:
        """Refuse a prompt that can't be computed.

        Raises:
            InvalidRequest: no prompt, or not of this vocabulary.
            PromptTooLong: model or pool could never hold it.
        """
        if len(tokens) % TOKEN_BYTES:
            raise InvalidRequest(f"token_ids: expected little-endian uint32 ids, got {len(tokens)} bytes")
        ids = np.frombuffer(tokens, dtype="<u4")
        if ids.size == 0:
            raise InvalidRequest("token_ids: expected at least 1 token, got 0")
        if ids.size > self.max_prompt_tokens:
            raise PromptTooLong(f"token_ids: expected at most {self.max_prompt_tokens} tokens, got {ids.size}")
        if ids.max() >= self.vocab_size:
            index = int(np.argmax(ids >= self.vocab_size))
            raise InvalidRequest(
                f"token_ids[{index}]: expected an id below the vocabulary size {self.vocab_size}, got more"
            )

    def require_prefill(self, params: PrefillParams) -> None:
        """Refuse a prefill that is wrong, or could never be served.

        Raises:
            InvalidRequest, PromptTooLong, QuotaExceeded: the message names the field.
        """
        self._require_params(params, params.num_tokens)

    def require_generation(self, params: PrefillParams, sampling: Sampling) -> None:
        """Refuse a generation that is wrong, or could never be served.

        Raises:
            InvalidRequest, PromptTooLong, QuotaExceeded: the message names the field.
        """
        sampling.validate(self.vocab_size)
        params.require_generable()
        self._require_params(params, params.num_tokens + sampling.max_new_tokens - 1)
        if params.num_tokens + sampling.max_new_tokens > self.max_sequence_tokens:
            raise PromptTooLong(
                f"token_ids, max_new_tokens: expected at most {self.max_sequence_tokens} tokens together, got "
                f"{params.num_tokens} and {sampling.max_new_tokens}"
            )

    def _require_params(self, params: PrefillParams, num_tokens: int) -> None:
        """Refuse a prompt whose `num_tokens`, generated ones included, could never be held."""
        self.require_tokens(params.tokens)
        if params.retention is not None:
            params.retention.range_in(params.num_tokens)
        if not 0 <= params.top_logprobs <= self.vocab_size:
            raise InvalidRequest(f"top_logprobs: expected 0 to {self.vocab_size}, got {params.top_logprobs}")
        if not 0 <= params.priority <= MAX_REQUEST_PRIORITY:
            raise InvalidRequest(f"priority: expected 0 to {MAX_REQUEST_PRIORITY}, got {params.priority}")
        if params.deadline_s is not None and not math.isfinite(params.deadline_s):
            raise InvalidRequest(f"deadline_s: expected a finite time, got {params.deadline_s}")
        ceiling_tokens = self.ceiling_tokens.get(params.tenant)
        if ceiling_tokens is not None and num_tokens > ceiling_tokens:
            raise QuotaExceeded(
                f"token_ids: expected at most this tenant's ceiling of {ceiling_tokens} tokens, got {num_tokens}"
            )
