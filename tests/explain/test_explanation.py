"""Explanations of look-ups: which branch they show, and what their numbers count."""

from __future__ import annotations

import numpy as np

from radixkv.api.explanation import (
    CachedBranch,
    DifferenceKind,
    Divergence,
    Excerpt,
    Explanation,
    LookUp,
    PromptSegment,
)
from radixkv.api.miss_reason import MissReason
from radixkv.explain.explanation import explain
from radixkv.invocation import MAX_INVOKED_VOCAB
from radixkv.tokens import TOKEN_BYTES

SHARED = list(range(100, 120))
TAIL = list(range(200, 300))
LETTERS = str.maketrans("0123456789", "abcdefghij")


def packed(ids: list[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()


def explained(
    prompt: list[int],
    *branches: list[int],
    left_at: int = len(SHARED),
    cached_tokens: int = len(SHARED),
    token_s: float | None = None,
    segments: tuple[PromptSegment, ...] = (),
    vocab_size: int = 1000,
) -> Explanation:
    """Explain a prompt. A request last used the branch with the index `i` `i` seconds ago."""
    divergence = Divergence(
        left_at, tuple(CachedBranch((packed(ids),), 0, float(index)) for index, ids in enumerate(branches))
    )
    look_up = LookUp(packed(prompt), cached_tokens, MissReason.DIVERGED, divergence, token_s)
    return explain(look_up, segments=segments, vocab_size=vocab_size)


def test_the_branch_with_the_most_lost_tokens_is_shown() -> None:
    difference = explained([*SHARED, 1, *TAIL], [2, *TAIL[:40]], [3, *TAIL], [4, *TAIL[:60]]).difference
    assert difference is not None
    assert (difference.branch.token_ids[0], difference.idle_s, difference.lost_tokens) == (3, 1.0, len(TAIL))


def test_of_equal_branches_the_one_that_was_used_last_is_shown() -> None:
    for branches in ([[2, *TAIL], [3, *TAIL]], [[2, 7], [3, 7]]):
        difference = explained([*SHARED, 1, *TAIL], *branches).difference
        assert difference is not None
        assert (difference.branch.token_ids[0], difference.idle_s) == (2, 0.0)


def test_both_sides_and_the_tokens_before_them_are_shown() -> None:
    difference = explained([*SHARED, 1, *TAIL], [2, 3, *TAIL]).difference
    assert difference is not None
    assert difference.before_ids == tuple(SHARED[-8:])
    assert difference.prompt == Excerpt((1, *TAIL[:15]), 1)
    assert difference.branch == Excerpt((2, 3, *TAIL[:14]), 2)
    assert (difference.prompt_span_tokens, difference.branch_span_tokens) == (1, 2)


def test_if_the_two_sides_are_never_equal_again_all_shown_tokens_differ() -> None:
    difference = explained([*SHARED, *range(400, 450)], [*range(500, 550)]).difference
    assert difference is not None
    assert difference.kind is DifferenceKind.UNCLASSIFIED
    assert (difference.prompt.num_different, difference.branch.num_different) == (16, 16)
    assert (difference.prompt_span_tokens, difference.branch_span_tokens, difference.lost_tokens) == (None, None, 0)


def test_the_reported_seconds_are_the_tokens_times_the_time_per_token() -> None:
    explanation = explained([*SHARED, 1, *TAIL], [2, *TAIL], token_s=0.5)
    assert explanation.difference is not None
    assert (explanation.computed_tokens, explanation.computed_s) == (101, 50.5)
    assert (explanation.difference.lost_tokens, explanation.difference.lost_s) == (100, 50.0)


def test_tokens_after_the_divergence_count_as_computed_even_if_they_are_cached() -> None:
    assert explained([*SHARED, 1, *TAIL], [2, *TAIL], cached_tokens=120).computed_tokens == 101
    assert explained([*SHARED, 1, *TAIL], left_at=121, cached_tokens=120).computed_tokens == 1


def test_tokens_that_are_found_but_cannot_be_reused_count_as_computed() -> None:
    assert explained([*SHARED, 1, *TAIL], [2, *TAIL], cached_tokens=5).computed_tokens == 116


def test_the_reported_segment_contains_the_divergence() -> None:
    segments = (PromptSegment("system", 20), PromptSegment("tools", 21), PromptSegment("rest", 121))
    prompt = [*SHARED, 1, *TAIL]
    assert explained(prompt, [2], segments=segments).segment == "tools"
    assert explained(prompt, [2], left_at=19, segments=segments).segment == "system"
    assert explained(prompt, left_at=121, segments=segments).segment == ""
    assert explained(prompt, [2], segments=segments[:1]).segment == ""


def test_marks_of_invoked_adapters_are_not_shown() -> None:
    mark = 3 * MAX_INVOKED_VOCAB  # of the third adapter
    prompt = [*SHARED, *(token_id + mark for token_id in (1, *TAIL))]
    branch = [token_id + mark for token_id in (2, *TAIL)]
    difference = explained(prompt, branch).difference
    assert difference is not None
    assert (difference.prompt.token_ids[:2], difference.branch.token_ids[:2]) == ((1, 200), (2, 200))
    assert difference.lost_tokens == len(TAIL)


def test_marks_of_invoked_adapters_are_not_decoded() -> None:
    """The reordered parts differ in some tokens, so that their text decides whether they are the same."""
    mark = 3 * MAX_INVOKED_VOCAB
    short, long = list(range(300, 340)), list(range(400, 700))
    other_short = [*range(800, 812), *short[12:]]  # the same words, of which some are split into other tokens
    prompt = [*SHARED, *(token_id + mark for token_id in (*short, *long, *TAIL))]
    branch = [token_id + mark for token_id in (*long, *other_short, *TAIL)]
    words = {token_id: " " + str(token_id).translate(LETTERS) for token_id in (*SHARED, *short, *long, *TAIL)}
    words |= {800 + index: words[300 + index] for index in range(12)}
    divergence = Divergence(len(SHARED), (CachedBranch((packed(branch),), 0, 0.0),))
    look_up = LookUp(packed(prompt), len(SHARED), MissReason.DIVERGED, divergence, None)
    explanation = explain(look_up, decode=lambda ids: "".join(words[each] for each in ids), vocab_size=1000)
    assert explanation.difference is not None
    assert explanation.difference.kind is DifferenceKind.REORDERED
    assert explanation.difference.prompt_span_tokens == len(short) + len(long)
    assert explanation.difference.lost_tokens == len(TAIL)


def test_a_branch_of_several_nodes_is_one_run_of_tokens() -> None:
    runs = (packed([9, 9, 2, *TAIL[:5]]), packed(TAIL[5:50]), packed(TAIL[50:]))
    branch = CachedBranch(runs, start_byte=2 * TOKEN_BYTES, idle_s=0.0)  # after the two tokens 9
    divergence = Divergence(len(SHARED), (branch,))
    look_up = LookUp(packed([*SHARED, 1, *TAIL]), len(SHARED), MissReason.DIVERGED, divergence, None)
    difference = explain(look_up).difference
    assert difference is not None
    assert difference.lost_tokens == len(TAIL)
