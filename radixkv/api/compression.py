"""Lossy compression of the K/V that a generation keeps for itself."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from radixkv.errors import InvalidRequest

DEFAULT_SINKS = 4
DEFAULT_SNAPKV_WINDOW = 32
MAX_SNAPKV_WINDOW = 256


class CompressionPolicy(enum.StrEnum):
    """The rule that selects the K/V entries to drop.

    The papers: Xiao et al., Efficient Streaming Language Models with Attention Sinks (2023); Zhang et al., H2O:
    Heavy-Hitter Oracle (2023); Li et al., SnapKV (2024).
    """

    STREAMING_LLM = "streaming_llm"
    H2O = "h2o"
    SNAPKV = "snapkv"


@dataclass(frozen=True, slots=True)
class Compression:
    """A bound on the K/V entries of a generation, and the rule that enforces it. It changes the output.

    The prompt is computed and cached as always. The K/V of generated tokens is computed from the entries that are kept,
    and is never published to other requests.

    Attributes:
        policy: `streaming_llm` keeps the first and the last tokens. `h2o` keeps the last tokens, and of the other
            tokens those that received the most attention. `snapkv` selects tokens of the prompt in the same way, and
            keeps all generated tokens.
        max_tokens: entries kept in each head of each layer, at least 2; with `snapkv`, entries of the prompt only.
        num_sinks: first tokens that `streaming_llm` keeps, below `max_tokens`; None for 4, or `max_tokens - 1` if that
            is less.
        window: last tokens that `h2o` and `snapkv` always keep, below `max_tokens`. None is half of `max_tokens`, with
            `snapkv` at most 32. With `snapkv` it is at most 256, and the attention of these tokens decides which other
            tokens are kept.
    """

    policy: CompressionPolicy
    max_tokens: int
    num_sinks: int | None = None
    window: int | None = None

    @property
    def sinks(self) -> int:
        """First tokens that are never dropped."""
        if self.policy is not CompressionPolicy.STREAMING_LLM:
            return 0
        return min(DEFAULT_SINKS, self.max_tokens - 1) if self.num_sinks is None else self.num_sinks

    @property
    def recent(self) -> int:
        """Last tokens that are never dropped."""
        if self.policy is CompressionPolicy.STREAMING_LLM:
            return self.max_tokens - self.sinks
        if self.window is not None:
            return self.window
        half = self.max_tokens // 2
        return half if self.policy is CompressionPolicy.H2O else min(DEFAULT_SNAPKV_WINDOW, half)

    @property
    def drops_generated(self) -> bool:
        """Whether entries are also dropped while tokens are generated."""
        return self.policy is not CompressionPolicy.SNAPKV

    def max_entries(self, num_prompt_tokens: int, max_new_tokens: int) -> int:
        """Return the maximum number of entries of a generation. The K/V of the last token are never computed.

        >>> Compression(CompressionPolicy.H2O, 8).max_entries(100, 20)
        8
        >>> Compression(CompressionPolicy.SNAPKV, 8).max_entries(100, 20)
        27
        """
        if self.drops_generated:
            return min(self.max_tokens, num_prompt_tokens + max_new_tokens - 1)
        return min(self.max_tokens, num_prompt_tokens) + max_new_tokens - 1

    def validate(self) -> None:
        """Reject fields that are out of range, or that the policy does not have.

        Raises:
            InvalidRequest: the message names the field, the expected range and the value.
        """
        if self.max_tokens < 2:
            raise InvalidRequest(f"compression.max_tokens: expected at least 2, got {self.max_tokens}")
        is_streaming = self.policy is CompressionPolicy.STREAMING_LLM
        for name, is_used in (("num_sinks", is_streaming), ("window", not is_streaming)):
            if (value := getattr(self, name)) is not None and not is_used:
                raise InvalidRequest(f"compression.{name}: expected none with {self.policy}, got {value}")
        limit = self.max_tokens - 1
        if self.num_sinks is not None and not 0 <= self.num_sinks <= limit:
            raise InvalidRequest(
                f"compression.num_sinks: expected 0 to {limit}, below max_tokens, got {self.num_sinks}"
            )
        if self.policy is CompressionPolicy.SNAPKV:
            limit = min(limit, MAX_SNAPKV_WINDOW)
        if self.window is not None and not 1 <= self.window <= limit:
            raise InvalidRequest(f"compression.window: expected 1 to {limit} with {self.policy}, got {self.window}")
