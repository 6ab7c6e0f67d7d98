"""The choice of next tokens, and the end of a generation."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, field

from radixkv.errors import InvalidRequest

DEFAULT_MAX_NEW_TOKENS = 16
MAX_STOP_TOKEN_IDS = 1024


def random_seed() -> int:
    """Draw a seed for a caller who gives none: 0 to 2**64 - 1."""
    return secrets.randbits(64)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Options of a generation.

    The draw of a token depends on the seed, the token's position and its logits alone. So the same seed gives the same
    tokens in every batch, and after every pause.

    Attributes:
        max_new_tokens: most tokens to generate, at least 1.
        temperature: divides the logits; 0 takes the most likely token.
        top_p: tokens are drawn from the smallest set whose probabilities add up to at least this; more than 0, at most
            1.
        seed: 0 to 2**64 - 1; a random one by default.
        stop_token_ids: each of them ends the generation, and is its last token.
        ignore_eos: whether to go on after the model's own end-of-sequence tokens.
    """

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = field(default_factory=random_seed)
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def validate(self, vocab_size: int) -> None:
        """Refuse options out of their range.

        Raises:
            InvalidRequest: the message names the field, what was expected and what came.
        """
        if self.max_new_tokens < 1:
            raise InvalidRequest(f"max_new_tokens: expected at least 1, got {self.max_new_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidRequest(f"temperature: expected a finite number from 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p: expected more than 0 and at most 1, got {self.top_p}")
        if not (isinstance(self.seed, int) and 0 <= self.seed < 2**64):
            raise InvalidRequest(f"seed: expected 0 to 2**64 - 1, got {self.seed!r}")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids: expected at most {MAX_STOP_TOKEN_IDS} of them, got {len(self.stop_token_ids)}"
            )
        if any(not 0 <= token_id < vocab_size for token_id in self.stop_token_ids):
            raise InvalidRequest(f"stop_token_ids: expected ids below the vocabulary size {vocab_size}, got more")
