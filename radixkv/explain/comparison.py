"""Compares a prompt with one branch, from the position at which they diverge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from radixkv.api.explanation import DifferenceKind, Excerpt
from radixkv.explain.kinds import TextPair, kind_of
from radixkv.explain.realignment import Realignment, Tokens
from radixkv.invocation import MAX_INVOKED_VOCAB

_NUM_SHOWN_TOKENS = 16  # of each side, from the difference on
NUM_SHOWN_BEFORE = 8  # tokens before the difference
_NUM_CONTEXT_TOKENS = 32  # equal tokens before and after a span that are decoded with it, to show what it is a part of
# Longer spans, and longer texts around a differing span, are not examined as text; only their tokens are compared.
_MAX_DECODED_TOKENS = 4096
_MAX_TEXT_CHARS = 32_768

Decode = Callable[[Sequence[int]], str]


class Comparison(NamedTuple):
    """What differs between a prompt and a branch.

    Attributes:
        kind: what kind of span differs.
        realignment: where both sides are equal again; None if they are not.
        texts: the text around the differing spans; None without a tokenizer, or if a span or its text is too long.
    """

    kind: DifferenceKind
    realignment: Realignment | None
    texts: TextPair | None


class Decoder:
    """Decodes tokens after a difference, for which it needs the tokens before them.

    Some tokenizers change the beginning of a text, such as a space, so tokens are decoded with a context.

    Args:
        decode: returns the text of token ids.
        tokens: a prompt.
        start: position of the difference in the prompt.
        vocab_size: number of token ids of the model; see `plain_ids`.
    """

    def __init__(self, decode: Decode, tokens: Tokens, start: int, vocab_size: int = 2**32) -> None:
        self._decode = decode
        self._vocab_size = vocab_size
        self._context = plain_ids(tokens[max(0, start - _NUM_CONTEXT_TOKENS) : start], vocab_size)
        self._context_text = decode(self._context) if self._context else ""

    def decode_with_context(self, tokens: Tokens) -> str:
        """Return the text of the context and of the tokens after it."""
        return self._decode([*self._context, *plain_ids(tokens, self._vocab_size)])

    def decode_without_context(self, tokens: Tokens) -> str:
        """Return the text of the tokens after the context."""
        return self.decode_with_context(tokens).removeprefix(self._context_text)


def compare(
    prompt: Tokens, branch: Tokens, realignment: Realignment | None, *, is_first: bool, decoder: Decoder | None
) -> Comparison:
    """Return what differs between two runs of tokens that begin differently.

    Args:
        prompt, branch: tokens from the difference on, uint32.
        realignment: where they are equal again, as `realign` or `end_of_reordering` returns it.
        is_first: whether the difference is at the beginning of the prompt.
        decoder: decodes tokens at the difference; None without a tokenizer.
    """
    texts = None if decoder is None else _text_pair(decoder, prompt, branch, realignment)
    return Comparison(kind_of(prompt, branch, realignment, is_first=is_first, texts=texts), realignment, texts)


def _text_pair(decoder: Decoder, prompt: Tokens, branch: Tokens, realignment: Realignment | None) -> TextPair | None:
    """Return the text around the difference on both sides; None if a span or its text is too long."""
    prompt_span, branch_span = (0, 0) if realignment is None else (realignment.prompt_span, realignment.branch_span)
    if max(prompt_span, branch_span) > _MAX_DECODED_TOKENS:
        return None
    side_texts = [
        decoder.decode_with_context(tokens[: span + _NUM_CONTEXT_TOKENS])
        for tokens, span in ((prompt, prompt_span), (branch, branch_span))
    ]
    if max(map(len, side_texts)) > _MAX_TEXT_CHARS:
        return None
    return TextPair.of(*side_texts, has_same_end=realignment is not None)


def excerpt_of(tokens: Tokens, span: int | None, decoder: Decoder | None, vocab_size: int = 2**32) -> Excerpt:
    """Return the first tokens of one side, as they are shown to users.

    Args:
        tokens: tokens from the difference on.
        span: number of tokens that differ; None for all.
        decoder: decodes tokens at the difference; None to return no text.
        vocab_size: number of token ids of the model; see `plain_ids`.
    """
    shown = tokens[:_NUM_SHOWN_TOKENS]
    ids = tuple(plain_ids(shown, vocab_size))
    num_different = len(ids) if span is None else min(span, len(ids))
    if decoder is None:
        return Excerpt(ids, num_different)
    different = decoder.decode_without_context(shown[:num_different])
    return Excerpt(ids, num_different, different, decoder.decode_without_context(shown).removeprefix(different))


def plain_ids(tokens: Tokens, vocab_size: int) -> list[int]:
    """Return token ids without the marks of invoked adapters, which make ids greater than the vocabulary."""
    if tokens.size and int(tokens.max()) >= vocab_size:
        tokens = tokens & np.uint32(MAX_INVOKED_VOCAB - 1)  # a mark is in the upper bits
    ids: list[int] = tokens.tolist()
    return ids
