"""Compares a prompt with the cached branches from which it diverges, and explains the difference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixkv.api.explanation import CachedBranch, Difference, Explanation, LookUp, PromptSegment, segment_at
from radixkv.explain.comparison import NUM_SHOWN_BEFORE, Decode, Decoder, compare, excerpt_of, plain_ids
from radixkv.explain.realignment import MAX_SPAN_TOKENS, Realignment, Tokens, realign
from radixkv.explain.reordering import end_of_reordering
from radixkv.tokens import TOKEN_BYTES

_MAX_COMPARED_TOKENS = 262_144  # of each branch


def explain(
    look_up: LookUp,
    *,
    segments: Sequence[PromptSegment] = (),
    decode: Decode | None = None,
    vocab_size: int = 2**32,
) -> Explanation:
    """Explain why a prompt is not reused further than it is.

    Of several branches, the explanation shows the one with the most equal tokens after the difference. Among branches
    with the same number, or if none has equal tokens again, it shows the one that was used last.

    Args:
        look_up: the cached prefix of the prompt, and the branches from which it diverges.
        segments: parts of the prompt that the caller has named; see `require_segments`.
        decode: returns the text of token ids; None without a tokenizer: then only token ids are compared.
        vocab_size: number of token ids of the model; ids that are not below it carry the mark of an invoked adapter.

    Complexity: that of `realign` for each of at most four branches.
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
    tokens = np.frombuffer(look_up.tokens, "<u4")
    prompt = tokens[left_at:]
    branch, realignment, idle_s = _closest_branch(prompt, look_up.divergence.branches)
    decoder = None if decode is None else Decoder(decode, tokens, left_at, vocab_size)
    if realignment is not None:
        text_of = None if decoder is None else decoder.decode_with_context
        realignment = end_of_reordering(prompt, branch, realignment, text_of)
    comparison = compare(prompt, branch, realignment, is_first=left_at == 0, decoder=decoder)
    prompt_span = branch_span = None
    lost_tokens = 0
    if realignment is not None:
        prompt_span, branch_span, lost_tokens = realignment
    before_ids = plain_ids(tokens[max(0, left_at - NUM_SHOWN_BEFORE) : left_at], vocab_size)
    return Difference(
        kind=comparison.kind,
        before_ids=tuple(before_ids),
        before_text="" if decode is None else decode(before_ids),
        prompt=excerpt_of(prompt, prompt_span, decoder, vocab_size),
        branch=excerpt_of(branch, branch_span, decoder, vocab_size),
        prompt_span_tokens=prompt_span,
        branch_span_tokens=branch_span,
        lost_tokens=lost_tokens,
        lost_s=None if look_up.token_s is None else lost_tokens * look_up.token_s,
        idle_s=idle_s,
    )


def _closest_branch(prompt: Tokens, branches: Sequence[CachedBranch]) -> tuple[Tokens, Realignment | None, float]:
    """Return the tokens of the branch that resembles the prompt most, where both are equal again, and its idle time."""
    best: tuple[Tokens, Realignment | None, float] | None = None
    max_equal_tokens = 0
    for branch in branches:
        tokens = np.frombuffer(branch.tokens(min(_MAX_COMPARED_TOKENS, prompt.size + MAX_SPAN_TOKENS)), "<u4")
        realignment = realign(prompt, tokens)
        equal_tokens = 0 if realignment is None else realignment.equal_tokens
        if best is None or equal_tokens > max_equal_tokens:
            best = tokens, realignment, branch.idle_s
            max_equal_tokens = equal_tokens
    assert best is not None, "there is at least one branch"
    return best
