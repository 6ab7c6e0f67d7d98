"""Compares a prompt with one branch, from the position at which they diverge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from radixkv.api.explanation import DifferenceKind
from radixkv.explain.kinds import TextPair, kind_of
from radixkv.explain.realignment import Realignment, Tokens
from radixkv.invocation import MAX_INVOKED_VOCAB

NUM_CONTEXT_TOKENS = 32
"""Equal tokens before and after a differing span that are decoded with it, to show what the span is a part of."""

# Longer spans, and longer texts around a differing span, are not examined as text; only their tokens are compared.
_MAX_DECODED_TOKENS = 4096
_MAX_TEXT_CHARS = 32_768

Decode = Callable[[Sequence[int]], str]


class Comparison(NamedTuple):
    """What differs between a prompt and a branch.

    Attributes:
        kind: what kind of span differs.
        place: where both sides are equal again; None if no such place was found.
        texts: the text around the differing spans; None without a tokenizer, or if a span or its text is too long.
    """

    kind: DifferenceKind
    place: Realignment | None
    texts: TextPair | None


class Decoder:
    """Decodes tokens together with the tokens before them, since some tokenizers change the beginning of a text.

    Args:
        decode: returns the text of token ids.
        context: the tokens before the difference.
    """

    def __init__(self, decode: Decode, context: Sequence[int]) -> None:
        self._decode = decode
        self._context = list(context)
        self._context_text = decode(self._context) if self._context else ""

    def decode_with_context(self, token_ids: Sequence[int]) -> str:
        """Return the text of the context and of the tokens after it."""
        return self._decode([*self._context, *token_ids])

    def decode_without_context(self, token_ids: Sequence[int]) -> str:
        """Return the text of the tokens after the context."""
        return self.decode_with_context(token_ids).removeprefix(self._context_text)


def compare(
    prompt: Tokens,
    branch: Tokens,
    place: Realignment | None,
    *,
    is_first: bool,
    decoder: Decoder | None,
    vocab_size: int = 2**32,
) -> Comparison:
    """Return what differs between two runs of tokens that begin differently.

    Args:
        prompt, branch: tokens from the difference on, uint32.
        place: where they are equal again, as `realign` or `end_of_reordering` returns it.
        is_first: whether the difference is at the beginning of the prompt.
        decoder: decodes tokens at the difference; None without a tokenizer.
        vocab_size: number of token ids of the model; ids that are not below it carry the mark of an invoked adapter.
    """
    texts = None if decoder is None else _text_pair(decoder, prompt, branch, place, vocab_size)
    return Comparison(kind_of(prompt, branch, place, is_first=is_first, texts=texts), place, texts)


def _text_pair(
    decoder: Decoder, prompt: Tokens, branch: Tokens, place: Realignment | None, vocab_size: int
) -> TextPair | None:
    """Return the text around the difference on both sides; None if a differing span is too long to examine its text."""
    prompt_span, branch_span = (0, 0) if place is None else (place.prompt_span, place.branch_span)
    if max(prompt_span, branch_span) > _MAX_DECODED_TOKENS:
        return None
    side_texts = [
        decoder.decode_with_context(plain_ids(tokens[: span + NUM_CONTEXT_TOKENS], vocab_size))
        for tokens, span in ((prompt, prompt_span), (branch, branch_span))
    ]
    if max(map(len, side_texts)) > _MAX_TEXT_CHARS:
        return None
    return TextPair.of(*side_texts, has_same_end=place is not None)


def plain_ids(tokens: Tokens, vocab_size: int) -> list[int]:
    """Return token ids without the marks of invoked adapters, which make ids greater than the vocabulary."""
    if tokens.size and int(tokens.max()) >= vocab_size:
        tokens = tokens & np.uint32(MAX_INVOKED_VOCAB - 1)  # a mark is in the upper bits
    return [int(each) for each in tokens]
