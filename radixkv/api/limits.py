"""The limits of an engine, and the validation of requests against them."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from radixkv.api.compression import Compression
from radixkv.api.params import MAX_URGENCY, PrefillParams
from radixkv.api.retention import Retention
from radixkv.api.sampling import Sampling
from radixkv.errors import BeyondCeiling, InvalidRequest, PromptTooLong, SwitchedOff
from radixkv.tokens import TOKEN_BYTES


def longest_sequence(pool_tokens: int, max_model_tokens: int | None) -> int:
    """Return the length of the longest sequence that fits into `pool_tokens` and that the model supports.

    >>> longest_sequence(1024, None), longest_sequence(1024, 512)
    (1024, 512)
    """
    return min(pool_tokens, max_model_tokens or pool_tokens)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an engine, which do not change while it runs. Validates requests against them.

    Attributes:
        model: name of the model.
        device: where it runs.
        vocab_size: token ids are below it.
        max_prompt_tokens: maximum length of the prompt of a prefill.
        max_sequence_tokens: maximum length of a prompt and its completion together.
        block_size: tokens per block.
        epoch: random number of this block pool. Block ids are valid only together with the epoch of their pool.
        ceiling_tokens: maximum number of tokens of a tenant, by tenant; None for no bound.
        default_ceiling_tokens: maximum number of tokens of any other tenant; None for no bound.
        pool_tokens: tokens that fit into the block pool.
        model_fingerprint: digest of everything that K/V depend on besides tokens and the adapter.
        max_model_tokens: the longest sequence that the model supports; None for any length.
        compression_refusal: why generations cannot drop K/V; empty if they can.
        model_limit_reason: why the model supports no longer sequences; empty if its configuration states the limit.
    """

    model: str
    device: str
    vocab_size: int
    max_prompt_tokens: int
    max_sequence_tokens: int
    block_size: int
    epoch: int
    ceiling_tokens: Mapping[str, int | None]
    default_ceiling_tokens: int | None
    pool_tokens: int
    model_fingerprint: str = ""
    max_model_tokens: int | None = None
    compression_refusal: str = ""
    model_limit_reason: str = ""

    @classmethod
    def of_pool(
        cls,
        *,
        model: str,
        device: str,
        vocab_size: int,
        max_model_tokens: int | None,
        num_blocks: int,
        block_size: int,
        ceiling_blocks: Mapping[str, int | None],
        default_ceiling_blocks: int | None = None,
        model_fingerprint: str = "",
        compression_refusal: str = "",
        model_limit_reason: str = "",
    ) -> Limits:
        """Return the limits of a model with a new block pool.

        Args:
            model, device, vocab_size: see the attributes.
            max_model_tokens: the longest sequence that the model supports; None for any length.
            num_blocks: blocks of the pool.
            block_size: tokens per block.
            ceiling_blocks: maximum number of blocks of a tenant, by tenant; None for no bound.
            default_ceiling_blocks: maximum number of blocks of any other tenant; None for no bound.
            model_fingerprint, compression_refusal, model_limit_reason: see the attributes.
        """
        # A generation needs one block in addition to those of its tokens: it continues in a copy of the block in which
        # its prompt ends.
        return cls(
            model=model,
            device=device,
            vocab_size=vocab_size,
            max_prompt_tokens=longest_sequence(num_blocks * block_size, max_model_tokens),
            max_sequence_tokens=longest_sequence((num_blocks - 1) * block_size, max_model_tokens),
            block_size=block_size,
            epoch=secrets.randbits(63),
            ceiling_tokens={
                tenant: None if ceiling is None else ceiling * block_size for tenant, ceiling in ceiling_blocks.items()
            },
            default_ceiling_tokens=None if default_ceiling_blocks is None else default_ceiling_blocks * block_size,
            pool_tokens=num_blocks * block_size,
            model_fingerprint=model_fingerprint,
            max_model_tokens=max_model_tokens,
            compression_refusal=compression_refusal,
            model_limit_reason=model_limit_reason,
        )

    def require_retention(self, tokens: bytes, retention: Retention) -> None:
        """Reject a prompt that `require_tokens` rejects, and a retention that is invalid or not within the prompt.

        Raises:
            InvalidRequest, PromptTooLong: the message names the field.
        """
        self.require_tokens(tokens)
        retention.range_in(len(tokens) // TOKEN_BYTES)

    def require_tokens(self, tokens: bytes, field: str = "token_ids") -> None:
        """Reject a prompt that cannot be computed.

        Args:
            tokens: little-endian uint32 ids.
            field: the name of the field, for messages.

        Raises:
            InvalidRequest: there are no tokens, or ids beyond the vocabulary.
            PromptTooLong: the prompt exceeds the model or the pool.
        """
        if len(tokens) % TOKEN_BYTES:
            raise InvalidRequest(f"{field}: expected little-endian uint32 ids, got {len(tokens)} bytes")
        ids = np.frombuffer(tokens, dtype="<u4")
        if ids.size == 0:
            raise InvalidRequest(f"{field}: expected at least 1 token, got 0")
        if ids.size > self.max_prompt_tokens:
            raise PromptTooLong(
                f"{field}: expected at most {self.max_prompt_tokens} tokens, got {ids.size}"
                f"{self._reason_of(self.max_prompt_tokens)}"
            )
        if ids.max() >= self.vocab_size:
            index = int(np.argmax(ids >= self.vocab_size))
            raise InvalidRequest(
                f"{field}[{index}]: expected an id below the vocabulary size {self.vocab_size}, got a larger one"
            )

    def max_new_tokens(self, num_tokens: int, tenant: str) -> int:
        """Return the maximum number of new tokens after a prompt of `num_tokens` tokens; less than 1 if none fits."""
        max_tokens, ceiling = self.max_sequence_tokens, self._ceiling_tokens(tenant)
        if ceiling is not None:
            max_tokens = min(max_tokens, ceiling + 1)  # the last token needs no block, since its K/V is never computed
        return max_tokens - num_tokens

    def require_prefill(self, params: PrefillParams) -> None:
        """Reject a prefill that is invalid or could never be served.

        Raises:
            InvalidRequest, PromptTooLong, BeyondCeiling: the message names the field.
        """
        self._require_params(params)
        ceiling = self._ceiling_tokens(params.caller.tenant)
        if ceiling is not None and params.num_tokens > ceiling:
            raise BeyondCeiling(
                f"token_ids: expected at most {ceiling} tokens, this tenant's ceiling, got {params.num_tokens}"
            )

    def require_generation(self, params: PrefillParams, sampling: Sampling) -> None:
        """Reject a generation that is invalid or could never be served.

        Raises:
            InvalidRequest, PromptTooLong, BeyondCeiling, SwitchedOff: the message names the field.
        """
        sampling.validate(self.vocab_size)
        params.require_generable()
        self._require_params(params, "prefill.token_ids")
        num_tokens, max_new_tokens = params.num_tokens, sampling.max_new_tokens
        if sampling.compression is not None:
            self._require_compressed(params, max_new_tokens, sampling.compression)
            return
        if num_tokens + max_new_tokens > self.max_sequence_tokens:
            raise PromptTooLong(
                f"prefill.token_ids, max_new_tokens: expected at most {self.max_sequence_tokens} tokens together, got "
                f"{num_tokens} and {max_new_tokens}{self._reason_of(self.max_sequence_tokens)}"
            )
        ceiling = self._ceiling_tokens(params.caller.tenant)
        if ceiling is not None and num_tokens + max_new_tokens - 1 > ceiling:  # the last token needs no block
            raise BeyondCeiling(
                f"prefill.token_ids, max_new_tokens: expected at most {ceiling + 1} tokens together, by this tenant's "
                f"ceiling, got {num_tokens} and {max_new_tokens}"
            )

    def _require_compressed(self, params: PrefillParams, max_new_tokens: int, compression: Compression) -> None:
        """Reject a generation whose prompt and private blocks never fit together, or that is too long for the model."""
        if self.compression_refusal:
            raise SwitchedOff(f"compression: expected a model that allows it, got {self.compression_refusal}")
        num_tokens, max_tokens = params.num_tokens, self.max_model_tokens
        if max_tokens is not None and num_tokens + max_new_tokens > max_tokens:
            raise PromptTooLong(
                f"prefill.token_ids, max_new_tokens: expected at most {max_tokens} tokens together, got {num_tokens} "
                f"and {max_new_tokens}{self._reason_of(max_tokens)}"
            )
        num_entries = compression.max_entries(num_tokens, max_new_tokens)
        needed_tokens = sum(-(-count // self.block_size) * self.block_size for count in (num_tokens, num_entries))
        if needed_tokens > self.pool_tokens:
            raise PromptTooLong(
                f"prefill.token_ids, compression.max_tokens: expected at most {self.pool_tokens} tokens of K/V "
                f"together, each in whole blocks, got {num_tokens} and {num_entries}"
            )
        ceiling = self._ceiling_tokens(params.caller.tenant)
        if ceiling is not None and needed_tokens > ceiling:
            raise BeyondCeiling(
                f"prefill.token_ids, compression.max_tokens: expected at most {ceiling} tokens of K/V together, "
                f"each in whole blocks, by this tenant's ceiling, got {num_tokens} and {num_entries}"
            )

    def _require_params(self, params: PrefillParams, field: str = "token_ids") -> None:
        """Reject an invalid prompt or invalid options; `field` is the name of the prompt in messages."""
        self.require_tokens(params.tokens, field)
        if params.retention is not None:
            params.retention.range_in(params.num_tokens)
        if not 0 <= params.top_logprobs <= self.vocab_size:
            raise InvalidRequest(f"top_logprobs: expected 0 to {self.vocab_size}, got {params.top_logprobs}")
        if not 0 <= params.urgency <= MAX_URGENCY:
            raise InvalidRequest(f"priority: expected an urgency of 0 to {MAX_URGENCY}, got {params.urgency}")
        if params.deadline_s is not None and not math.isfinite(params.deadline_s):
            raise InvalidRequest(f"deadline_s: expected a finite time, got {params.deadline_s}")

    def _reason_of(self, max_tokens: int) -> str:
        """Return why sequences have at most `max_tokens` tokens, as the end of an error message."""
        if max_tokens != self.max_model_tokens:
            return f"; the pool has room for {self.pool_tokens} tokens (cache.capacity_tokens)"
        return f"; {self.model_limit_reason or 'the limit of the model (max_position_embeddings in config.json)'}"

    def _ceiling_tokens(self, tenant: str) -> int | None:
        return self.ceiling_tokens.get(tenant, self.default_ceiling_tokens)
