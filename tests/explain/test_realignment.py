"""Realignment agrees with a comparison of every pair of positions."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from radixkv.explain import realignment
from radixkv.explain.realignment import MAX_SPAN_TOKENS, MIN_EQUAL_TOKENS, Realignment, realign


def tokens_of(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.uint32)


def first_windows(ids: list[int]) -> dict[tuple[int, ...], int]:
    """Return the first position of each window of `MIN_EQUAL_TOKENS` tokens."""
    first_positions: dict[tuple[int, ...], int] = {}
    for start in range(len(ids) - MIN_EQUAL_TOKENS + 1):
        first_positions.setdefault(tuple(ids[start : start + MIN_EQUAL_TOKENS]), start)
    return first_positions


def realign_by_brute_force(prompt: list[int], branch: list[int]) -> Realignment | None:
    """Return the same as `realign`: the oracle of these tests."""
    prompt_starts, branch_starts = first_windows(prompt), first_windows(branch)
    common_windows = prompt_starts.keys() & branch_starts.keys()
    pairs = [(prompt_starts[window], branch_starts[window]) for window in common_windows]
    if not pairs:
        return None
    max_skipped = 2 * min(map(sum, pairs)) + MIN_EQUAL_TOKENS
    runs = set()
    for prompt_start, branch_start in pairs:
        if prompt_start + branch_start > max_skipped:
            continue
        num_before = 0
        while (
            num_before < min(prompt_start, branch_start)
            and prompt[prompt_start - num_before - 1] == branch[branch_start - num_before - 1]
        ):
            num_before += 1
        num_after = 0
        while (
            num_after < min(len(prompt) - prompt_start, len(branch) - branch_start)
            and prompt[prompt_start + num_after] == branch[branch_start + num_after]
        ):
            num_after += 1
        runs.add(Realignment(prompt_start - num_before, branch_start - num_before, num_before + num_after))
    return min(runs, key=lambda run: (-run.equal_tokens, run.prompt_span + run.branch_span, run.prompt_span))


def draw_sides(rng: random.Random) -> tuple[list[int], list[int]]:
    """Return two runs that begin differently, made of the same few passages and of random tokens."""
    passages = [[rng.randrange(50) for _ in range(rng.randrange(1, 80))] for _ in range(5)]

    def draw_side(first: int) -> list[int]:
        ids = [first]
        for _ in range(rng.randrange(6)):
            if rng.random() < 0.8:
                ids += rng.choice(passages)
            else:
                ids += [rng.randrange(50) for _ in range(rng.randrange(20))]
        return ids

    return draw_side(100), draw_side(101)


def test_a_realignment_agrees_with_a_comparison_of_all_positions() -> None:
    rng = random.Random(7)
    found = []
    for _ in range(600):
        prompt, branch = draw_sides(rng)
        realignment_or_none = realign(tokens_of(prompt), tokens_of(branch))
        assert realignment_or_none == realign_by_brute_force(prompt, branch)
        if realignment_or_none is not None:
            found.append(realignment_or_none)
    assert 100 < len(found) < 500
    assert sum(each.prompt_span != each.branch_span for each in found) > 50


def test_a_passage_that_recurs_does_not_hide_the_longer_run() -> None:
    reminder, turn, rest = list(range(200, 260)), list(range(300, 354)), list(range(400, 900))
    found = realign(tokens_of([*reminder, *turn, *reminder, *rest]), tokens_of([*turn, *reminder, *rest]))
    assert found == Realignment(60, 0, 54 + 60 + 500)


def test_a_realignment_ends_at_a_second_difference() -> None:
    first, second = list(range(200, 250)), list(range(300, 1300))
    found = realign(tokens_of([1, *first, 2, *second]), tokens_of([3, *first, 4, *second]))
    assert found == Realignment(1, 1, 50)


@pytest.mark.parametrize(("num_between", "nearest"), [(1, Realignment(1, 42, 40)), (3, Realignment(42, 1, 40))])
@pytest.mark.parametrize(
    "starts", [(200, 300), (300, 200)]
)  # in both orders, since the order of the hashes must not matter
def test_of_equally_long_runs_the_nearest_is_chosen(
    num_between: int, nearest: Realignment, starts: tuple[int, int]
) -> None:
    """Of equally long and equally near runs, the one that skips fewer tokens of the prompt is chosen."""
    first, second = (list(range(start, start + 40)) for start in starts)
    prompt, branch = [1, *first, 2, *second], [3, *second, *[4] * num_between, *first]
    assert realign(tokens_of(prompt), tokens_of(branch)) == nearest


@pytest.mark.parametrize("num_equal", [MIN_EQUAL_TOKENS - 1, MIN_EQUAL_TOKENS])
def test_a_run_of_fewer_equal_tokens_is_no_realignment(num_equal: int) -> None:
    tail = list(range(200, 200 + num_equal))
    found = realign(tokens_of([1, *tail]), tokens_of([2, 3, *tail]))
    assert found == (Realignment(1, 2, num_equal) if num_equal == MIN_EQUAL_TOKENS else None)


@pytest.mark.parametrize("side", ["prompt", "branch"])
def test_an_empty_side_is_not_realigned(side: str) -> None:
    sides = {"prompt": tokens_of(list(range(99))), "branch": tokens_of(list(range(99))), side: tokens_of([])}
    assert realign(sides["prompt"], sides["branch"]) is None


def test_equal_hashes_of_different_tokens_are_no_realignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        realignment, "window_hashes", lambda tokens: np.zeros(max(0, tokens.size - MIN_EQUAL_TOKENS + 1), np.uint64)
    )
    assert realign(tokens_of(list(range(99))), tokens_of(list(range(500, 599)))) is None


@pytest.mark.parametrize("span", [MAX_SPAN_TOKENS - 1, MAX_SPAN_TOKENS])
def test_only_the_first_tokens_of_each_side_are_searched(span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed_sizes = []
    window_hashes = realignment.window_hashes

    def count_and_hash(tokens):
        hashed_sizes.append(tokens.size)
        return window_hashes(tokens)

    monkeypatch.setattr(realignment, "window_hashes", count_and_hash)
    tail = np.arange(300_000, dtype=np.uint32)
    prompt_span = np.arange(1_000_000, 1_000_000 + span, dtype=np.uint32)
    found = realign(np.append(prompt_span, tail), np.append(np.uint32(7), tail))
    assert found == (Realignment(span, 1, 300_000) if span < MAX_SPAN_TOKENS else None)
    assert max(hashed_sizes) < MAX_SPAN_TOKENS + MIN_EQUAL_TOKENS


def test_runs_are_compared_at_most_64_times(monkeypatch: pytest.MonkeyPatch) -> None:
    num_runs = 0
    run_at = realignment._run_at

    def count_and_compare(*arguments):
        nonlocal num_runs
        num_runs += 1
        return run_at(*arguments)

    monkeypatch.setattr(realignment, "_run_at", count_and_compare)
    rng = random.Random(3)
    passages = [[rng.randrange(10**6) for _ in range(MIN_EQUAL_TOKENS)] for _ in range(300)]
    prompt = [0, *itertools.chain(*passages)]
    branch = [1, *itertools.chain(*sorted(passages))]  # the same passages in another order
    realign(tokens_of(prompt), tokens_of(branch))
    assert 1 < num_runs <= 64
