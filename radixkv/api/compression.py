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
    """A bound on the K/V entries of a generation, and the rule that enforces it. Results differ from those with all
    K/V.

    The prompt is computed and cached as always. The K/V of generated tokens is computed from the entries that are kept,
    and is never published to other requests.

    Attributes:
        policy: `streaming_llm` keeps the first tokens and the last ones; `h2o` the last ones, and of the others those
            that got most attention; `snapkv` chooses so among the prompt's tokens, and keeps all that are generated.
        max_tokens: entries kept in each head of each layer, at least 2; `snapkv` counts those of the prompt alone.
        num_sinks: first tokens that `streaming_llm` keeps, below `max_tokens`; None for 4, or fewer if `max_tokens`
            is that small.
        window: last tokens that are always kept, below `max_tokens`: by `h2o`, None for half of `max_tokens`; by
            `snapkv`, at most 256, whose queries choose, None for 32 or half of `max_tokens`, whichever is less.
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
        """Whether entries are dropped while tokens are generated, too."""
        return self.policy is not CompressionPolicy.SNAPKV

    def most_entries(self, num_prompt_tokens: int, max_new_tokens: int) -> int:
        """Return the maximum number of entries of a generation. The K/V of the last token are never computed.

        >>> Compression(CompressionPolicy.H2O, 8).most_entries(100, 20)
        8
        >>> Compression(CompressionPolicy.SNAPKV, 8).most_entries(100, 20)
        27
        """
        if self.drops_generated:
            return min(self.max_tokens, num_prompt_tokens + max_new_tokens - 1)
        return min(self.max_tokens, num_prompt_tokens) + max_new_tokens - 1

    def validate(self) -> None:
        """Reject fields that are out of range, or that the policy does not have.

        Raises:
            InvalidRequest: the message names the field, what was expected and what came.
        """
        if self.max_tokens < 2:
            raise InvalidRequest(f"compression.max_tokens: expected at least 2, got {self.max_tokens}")
        is_streaming = self.policy is CompressionPolicy.STREAMING_LLM
        for name, is_used in (("num_sinks", is_streaming), ("window", not is_streaming)):
            if (given := getattr(self, name)) is not None and not is_used:
                raise InvalidRequest(f"compression.{name}: expected none with {self.policy}, got {given}")
        most = self.max_tokens - 1
        if self.num_sinks is not None and not 0 <= self.num_sinks <= most:
            raise InvalidRequest(f"compression.num_sinks: expected 0 to {most}, below max_tokens, got {self.num_sinks}")
        if self.policy is CompressionPolicy.SNAPKV:
            most = min(most, MAX_SNAPKV_WINDOW)
        if self.window is not None and not 1 <= self.window <= most:
            raise InvalidRequest(f"compression.window: expected 1 to {most} with {self.policy}, got {self.window}")
