"""Realignment agrees with a comparison of every pair of positions."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from radixkv.explain import realignment
from radixkv.explain.kinds import end_of_permutation, end_of_reordering
from radixkv.explain.realignment import MAX_SPAN_TOKENS, MIN_EQUAL_TOKENS, Realignment, realign


def tokens_of(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.uint32)


def first_windows(ids: list[int]) -> dict[tuple[int, ...], int]:
    """Return the first position of each window."""
    found: dict[tuple[int, ...], int] = {}
    for start in range(len(ids) - MIN_EQUAL_TOKENS + 1):
        found.setdefault(tuple(ids[start : start + MIN_EQUAL_TOKENS]), start)
    return found


def oracle(prompt: list[int], branch: list[int]) -> Realignment | None:
    ours, theirs = first_windows(prompt), first_windows(branch)
    pairs = [(ours[window], theirs[window]) for window in ours.keys() & theirs.keys()]
    if not pairs:
        return None
    limit = 2 * min(one + other for one, other in pairs) + MIN_EQUAL_TOKENS
    runs = set()
    for one, other in pairs:
        if one + other <= limit:
            start, end = (one, other), (one, other)
            while min(start) > 0 and prompt[start[0] - 1] == branch[start[1] - 1]:
                start = start[0] - 1, start[1] - 1
            while end[0] < len(prompt) and end[1] < len(branch) and prompt[end[0]] == branch[end[1]]:
                end = end[0] + 1, end[1] + 1
            runs.add(Realignment(*start, end[0] - start[0]))
    return min(runs, key=lambda run: (-run[2], run[0] + run[1], run[0]))


def random_sides(rng: random.Random) -> tuple[list[int], list[int]]:
    """Return two runs that begin differently, made of the same few passages and of random tokens."""
    passages = [[rng.randrange(50) for _ in range(rng.randrange(1, 80))] for _ in range(5)]

    def side(first: int) -> list[int]:
        ids = [first]
        for _ in range(rng.randrange(6)):
            ids += rng.choice(passages) if rng.random() < 0.8 else [rng.randrange(50) for _ in range(rng.randrange(20))]
        return ids

    return side(100), side(101)


def test_a_realignment_agrees_with_a_comparison_of_all_positions() -> None:
    rng = random.Random(7)
    outcomes = []
    for _ in range(600):
        prompt, branch = random_sides(rng)
        found = realign(tokens_of(prompt), tokens_of(branch))
        assert found == oracle(prompt, branch)
        outcomes.append(found)
    assert 100 < sum(found is not None for found in outcomes) < 500
    assert sum(found is not None and found.prompt_span != found.branch_span for found in outcomes) > 50


def test_a_passage_that_recurs_does_not_hide_the_longer_run() -> None:
    reminder, turn, rest = list(range(200, 260)), list(range(300, 354)), list(range(400, 900))
    found = realign(tokens_of([*reminder, *turn, *reminder, *rest]), tokens_of([*turn, *reminder, *rest]))
    assert found == Realignment(60, 0, 54 + 60 + 500)


def test_a_second_difference_ends_what_would_have_matched() -> None:
    first, second = list(range(200, 250)), list(range(300, 1300))
    found = realign(tokens_of([1, *first, 2, *second]), tokens_of([3, *first, 4, *second]))
    assert found == Realignment(1, 1, 50)


@pytest.mark.parametrize(("num_between", "nearest"), [(1, Realignment(1, 42, 40)), (3, Realignment(42, 1, 40))])
@pytest.mark.parametrize("starts", [(200, 300), (300, 200)])  # so that the order of the hashes cannot decide
def test_of_equally_long_runs_the_nearest_is_chosen(
    num_between: int, nearest: Realignment, starts: tuple[int, int]
) -> None:
    """Of equally near ones, it is the one that skips fewer tokens of the prompt."""
    first, second = (list(range(start, start + 40)) for start in starts)
    prompt, branch = [1, *first, 2, *second], [3, *second, *[4] * num_between, *first]
    assert realign(tokens_of(prompt), tokens_of(branch)) == nearest


@pytest.mark.parametrize("num_equal", [MIN_EQUAL_TOKENS - 1, MIN_EQUAL_TOKENS])
def test_fewer_equal_tokens_are_a_coincidence(num_equal: int) -> None:
    tail = list(range(200, 200 + num_equal))
    found = realign(tokens_of([1, *tail]), tokens_of([2, 3, *tail]))
    assert found == (Realignment(1, 2, num_equal) if num_equal == MIN_EQUAL_TOKENS else None)


@pytest.mark.parametrize("side", ["prompt", "branch"])
def test_an_empty_side_is_not_realigned(side: str) -> None:
    sides = {"prompt": tokens_of(list(range(99))), "branch": tokens_of(list(range(99))), side: tokens_of([])}
    assert realign(sides["prompt"], sides["branch"]) is None


def test_equal_hashes_of_different_tokens_are_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(realignment, "window_hashes", lambda tokens: np.zeros(max(0, tokens.size - 31), np.uint64))
    assert realign(tokens_of(list(range(99))), tokens_of(list(range(500, 599)))) is None


@pytest.mark.parametrize("span", [MAX_SPAN_TOKENS - 1, MAX_SPAN_TOKENS])
def test_the_search_is_bounded(span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    num_hashed = []
    hash_windows = realignment.window_hashes

    def counting(tokens):
        num_hashed.append(tokens.size)
        return hash_windows(tokens)

    monkeypatch.setattr(realignment, "window_hashes", counting)
    tail = np.arange(300_000, dtype=np.uint32)
    ours = np.arange(1_000_000, 1_000_000 + span, dtype=np.uint32)
    found = realign(np.append(ours, tail), np.append(np.uint32(7), tail))
    assert found == (Realignment(span, 1, 300_000) if span < MAX_SPAN_TOKENS else None)
    assert max(num_hashed) < MAX_SPAN_TOKENS + MIN_EQUAL_TOKENS


def test_runs_are_compared_at_most_64_times(monkeypatch: pytest.MonkeyPatch) -> None:
    num_runs = []
    run_at = realignment._run_at
    monkeypatch.setattr(realignment, "_run_at", lambda *side: num_runs.append(1) or run_at(*side))
    rng = random.Random(3)
    passages = [[rng.randrange(10**6) for _ in range(MIN_EQUAL_TOKENS)] for _ in range(300)]
    both = [passages, sorted(passages)]
    realign(*(tokens_of([index, *(each for passage in side for each in passage)]) for index, side in enumerate(both)))
    assert 1 < len(num_runs) <= 64


def test_permuted_spans_end_where_both_sides_are_as_long_again() -> None:
    first, second, rest = list(range(200, 250)), list(range(300, 360)), list(range(400, 500))
    prompt, branch = tokens_of([*first, *second, *rest]), tokens_of([*second, *first, *rest])
    nearest = realign(prompt, branch)
    assert nearest == Realignment(50, 0, 60)
    assert end_of_permutation(prompt, branch, nearest) == Realignment(110, 110, 100)


def test_another_id_before_moved_parts_is_not_a_part_of_them() -> None:
    rules, first, second, rest = (list(range(start, start + 60)) for start in (200, 300, 400, 500))
    prompt = tokens_of([*range(1000, 1009), *rules, *first, *second, *rest])
    branch = tokens_of([*range(2000, 2008), *rules, *second, *first, *rest])
    nearest = realign(prompt, branch)
    assert nearest == Realignment(9, 8, 60)
    assert end_of_reordering(prompt, branch, nearest) == nearest


def test_moved_parts_end_where_both_sides_have_the_same_tokens() -> None:
    """At the ends of the parts, a few tokens differ, because they are split in another way there."""
    parts = [list(range(start, start + 40)) for start in (200, 300, 400)]
    rest = list(range(600, 700))
    prompt = tokens_of([*parts[0], 1, *parts[1], 2, *parts[2], 3, *rest])
    branch = tokens_of([*parts[2], 4, *parts[0], 5, 6, *parts[1], 7, *rest])
    nearest = realign(prompt, branch)
    assert nearest is not None
    assert end_of_reordering(prompt, branch, nearest) == Realignment(123, 124, 100)
    other = tokens_of([*range(800, 840), 4, *parts[0], 5, 6, *parts[1], 7, *rest])
    nearest = realign(prompt, other)
    assert nearest is not None
    assert end_of_reordering(prompt, other, nearest) == nearest


def test_spans_are_permuted_if_nine_tenths_of_their_tokens_are_the_same() -> None:
    rng = random.Random(5)
    rest = list(range(400, 500))
    num_permuted = 0
    for _ in range(300):
        first = [rng.randrange(20) for _ in range(rng.randrange(1, 40))]
        second = [each if rng.random() < 0.95 else 50 for each in rng.sample(first, len(first))]
        if first[0] == second[0]:
            continue
        num_common = (Counter(first) & Counter(second)).total()
        nearest = Realignment(0, 0, 0)
        found = end_of_permutation(tokens_of([*first, 98, *rest]), tokens_of([*second, 99, *rest]), nearest)
        is_permuted = num_common >= 0.9 * (len(first) + 1) and len(first) + 1 >= 8
        assert found == (Realignment(len(first) + 1, len(first) + 1, 100) if is_permuted else nearest)
        num_permuted += is_permuted
    assert 50 < num_permuted < 200


def test_spans_of_other_tokens_are_not_permuted() -> None:
    first, rest = list(range(200, 250)), list(range(400, 500))
    prompt, branch = tokens_of([*first, *rest]), tokens_of([*reversed(range(600, 650)), *rest])
    nearest = realign(prompt, branch)
    assert nearest is not None
    assert end_of_permutation(prompt, branch, nearest) is nearest
