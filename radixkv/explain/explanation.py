"""Compares a prompt with the cached branches that it leaves, and explains the difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from radixkv.api.explanation import (
    CachedBranch,
    Difference,
    Excerpt,
    Explanation,
    LookUp,
    PromptSegment,
    segment_at,
)
from radixkv.explain.kinds import TextPair, kind_of, permuted
from radixkv.explain.realignment import MAX_SPAN_TOKENS, Realignment, Tokens, realign
from radixkv.invocation import MAX_INVOKED_VOCAB
from radixkv.tokens import TOKEN_BYTES

NUM_SHOWN_TOKENS = 16
NUM_SHOWN_BEFORE = 8
_NUM_CONTEXT_TOKENS = 32  # decoded on both sides of the differing spans to recognize what they are a part of
_MAX_DECODED_TOKENS = 4096  # of each differing span; longer spans are judged by their tokens alone
_MAX_TEXT_CHARS = 32_768  # around each differing span; longer texts likewise
_MAX_COMPARED_TOKENS = 262_144  # of each branch

Decode = Callable[[Sequence[int]], str]


def explain(
    look_up: LookUp,
    *,
    segments: Sequence[PromptSegment] = (),
    decode: Decode | None = None,
    vocab_size: int = 2**32,
) -> Explanation:
    """Explain why a prompt is not reused further than it is.

    Of several branches, the one with the most tokens that are equal again after a difference is shown, and of equal
    ones, or if none is, the one that was used last.

    Args:
        look_up: what the engine knows of the prompt.
        segments: parts of the prompt that the caller has named; see `require_segments`.
        decode: returns the text of token ids; None without a tokenizer, when only token ids are compared.
        vocab_size: number of token ids of the model; greater ids carry the mark of an invoked adapter.

    Complexity: that of `realign` for each branch, of which there are at most four.
    """
    divergence = look_up.divergence
    num_tokens = len(look_up.tokens) // TOKEN_BYTES
    num_computed = max(1, num_tokens - min(look_up.cached_tokens, divergence.left_at))
    difference = _difference(look_up, decode, vocab_size) if divergence.branches else None
    return Explanation(
        prompt_tokens=num_tokens,
        cached_tokens=look_up.cached_tokens,
        miss_reason=look_up.miss_reason,
        left_at=divergence.left_at,
        segment=segment_at(segments, divergence.left_at) if divergence.left_at < num_tokens else "",
        computed_tokens=num_computed,
        computed_s=None if look_up.token_s is None else num_computed * look_up.token_s,
        difference=difference,
    )


def _difference(look_up: LookUp, decode: Decode | None, vocab_size: int) -> Difference:
    left_at = look_up.divergence.left_at
    whole = np.frombuffer(look_up.tokens, "<u4")
    prompt = whole[left_at:]
    branch, place, idle_s = _closest(prompt, look_up.divergence.branches)
    text_of = None
    if place is not None:
        place = permuted(prompt, branch, place)
    before = _ids(whole[max(0, left_at - _NUM_CONTEXT_TOKENS) : left_at], vocab_size)
    if decode is not None:
        text_of = _Decoder(decode, before)
    texts = None if text_of is None else _text_pair(text_of, prompt, branch, place, vocab_size)
    kind = kind_of(prompt, branch, place, is_first=left_at == 0, texts=texts)
    lost_tokens = 0 if place is None else place.equal_tokens
    prompt_span, branch_span = (None, None) if place is None else (place.prompt_span, place.branch_span)
    shown_before = before[-NUM_SHOWN_BEFORE:]
    return Difference(
        kind=kind,
        before_ids=tuple(shown_before),
        before_text="" if decode is None else decode(shown_before),
        prompt=_excerpt(prompt, prompt_span, text_of, vocab_size),
        branch=_excerpt(branch, branch_span, text_of, vocab_size),
        prompt_span_tokens=prompt_span,
        branch_span_tokens=branch_span,
        lost_tokens=lost_tokens,
        lost_s=None if look_up.token_s is None else lost_tokens * look_up.token_s,
        idle_s=idle_s,
    )


def _closest(prompt: Tokens, branches: Sequence[CachedBranch]) -> tuple[Tokens, Realignment | None, float]:
    """Return the tokens of the branch that resembles the prompt most, where they are equal again, and its idle time."""
    best: tuple[Tokens, Realignment | None, float] | None = None
    for each in branches:
        tokens = np.frombuffer(each.tokens(min(_MAX_COMPARED_TOKENS, prompt.size + MAX_SPAN_TOKENS)), "<u4")
        place = realign(prompt, tokens)
        num_equal = -1 if best is None or best[1] is None else best[1].equal_tokens
        if best is None or (place is not None and place.equal_tokens > num_equal):
            best = tokens, place, each.idle_s
    assert best is not None, "there is at least one branch"
    return best


class _Decoder:
    """Decodes tokens after the tokens before them, since some tokenizers change the beginning of a text."""

    def __init__(self, decode: Decode, before: Sequence[int]) -> None:
        self._decode = decode
        self._before = list(before)
        self._text_before = decode(self._before) if self._before else ""

    def after(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without that of the tokens before them."""
        text = self.whole(token_ids)
        return text.removeprefix(self._text_before)

    def whole(self, token_ids: Sequence[int]) -> str:
        """Return the text of the tokens before, and of these."""
        return self._decode([*self._before, *token_ids])


def _text_pair(
    text_of: _Decoder, prompt: Tokens, branch: Tokens, place: Realignment | None, vocab_size: int
) -> TextPair | None:
    """Return the text around the difference on both sides; None if a differing span is too long to examine its text."""
    prompt_span, branch_span = (0, 0) if place is None else (place.prompt_span, place.branch_span)
    if max(prompt_span, branch_span) > _MAX_DECODED_TOKENS:
        return None
    sides = [
        text_of.whole(_ids(tokens[: span + _NUM_CONTEXT_TOKENS], vocab_size))
        for tokens, span in ((prompt, prompt_span), (branch, branch_span))
    ]
    if max(map(len, sides)) > _MAX_TEXT_CHARS:
        return None
    return TextPair.of(*sides, has_same_end=place is not None)


def _excerpt(tokens: Tokens, span: int | None, text_of: _Decoder | None, vocab_size: int) -> Excerpt:
    ids = _ids(tokens[:NUM_SHOWN_TOKENS], vocab_size)
    num_different = len(ids) if span is None else min(span, len(ids))
    if text_of is None:
        return Excerpt(tuple(ids), num_different)
    different, text = text_of.after(ids[:num_different]), text_of.after(ids)
    return Excerpt(tuple(ids), num_different, different, text.removeprefix(different))


def _ids(tokens: Tokens, vocab_size: int) -> list[int]:
    """Return token ids without the marks of invoked adapters, which make ids greater than the vocabulary."""
    if tokens.size and int(tokens.max()) >= vocab_size:
        tokens = tokens & np.uint32(MAX_INVOKED_VOCAB - 1)
    return [int(each) for each in tokens]
