"""A model's vocabulary for llguidance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLTokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokens, followed by one that marks the end of a completion.

    Attributes:
        tokens: the tokens as llguidance reads them.
        vocab_size: number of the model's tokens, and the id of the token that marks the end.
        without_text: tokens without text: special tokens, and the model's own end-of-sequence tokens.
    """

    tokens: LLTokenizer
    vocab_size: int
    without_text: frozenset[int]

    @classmethod
    def of(cls, definition: str, vocab_size: int, eos_token_ids: Iterable[int]) -> Vocabulary:
        """Read a tokenizer. Takes 0.4 s for 128,000 tokens.

        Args:
            definition: JSON in the form of the package tokenizers.
            vocab_size: number of the model's tokens. A tokenizer may have fewer or more.
            eos_token_ids: the model's own end-of-sequence tokens.

        Raises:
            ValueError: llguidance cannot read the definition.
        """
        tokenizer = LLTokenizer(definition)
        token_ids = range(min(vocab_size, tokenizer.vocab_size))
        # The token of the byte 0xFF counts as special, too: llguidance marks special tokens with this byte, which does
        # not occur in UTF-8.
        special = frozenset(token_id for token_id in token_ids if tokenizer.is_special_token(token_id))
        without_text = special.union(eos_token_ids)
        token_bytes = [tokenizer.decode_bytes([token_id]) for token_id in token_ids]
        return cls.of_names([*token_bytes, *[b""] * (vocab_size - len(token_bytes))], without_text)

    @classmethod
    def of_names(cls, token_bytes: Sequence[bytes], without_text: frozenset[int]) -> Vocabulary:
        """Make a vocabulary from the bytes of each token."""
        wrapper: Any = _TokenizerWrapper(token_bytes, without_text)  # llguidance's annotations require another type
        return cls(LLTokenizer(wrapper), len(token_bytes), without_text)


@dataclass(slots=True)
class _TokenizerWrapper:
    """The attributes of a tokenizer that llguidance reads. It never tokenizes, because no tokens are forced."""

    token_bytes: Sequence[bytes]
    special: Iterable[int]
    is_tokenizer_wrapper: bool = True
    bos_token_id: int | None = None
    tokens: Sequence[bytes] = field(init=False)
    eos_token_id: int = field(init=False)
    special_token_ids: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        self.eos_token_id = len(self.token_bytes)
        self.tokens = [*self.token_bytes, b""]
        self.special_token_ids = [*self.special, self.eos_token_id]

    def __call__(self, text: str) -> list[int]:
        """Return no tokens, so that llguidance uses byte tokens."""
        return []
