"""Where spans end that have the same parts in another order."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from radixkv.explain.realignment import Realignment, realign
from radixkv.explain.reordering import end_of_permutation, end_of_reordering


def tokens_of(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.uint32)


def test_permuted_spans_end_after_the_same_number_of_tokens_on_both_sides() -> None:
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
    """The tokens between the parts differ, as if the text at their ends were tokenized differently."""
    parts = [list(range(start, start + 40)) for start in (200, 300, 400)]
    rest = list(range(600, 700))
    prompt = tokens_of([*parts[0], 1, *parts[1], 2, *parts[2], 3, *rest])
    branch = tokens_of([*parts[2], 4, *parts[0], 5, 6, *parts[1], 7, *rest])
    nearest = realign(prompt, branch)
    assert nearest is not None
    assert end_of_reordering(prompt, branch, nearest) == Realignment(123, 124, 100)

    # Without the moved third part, the difference is no reordering.
    branch = tokens_of([*range(800, 840), 4, *parts[0], 5, 6, *parts[1], 7, *rest])
    nearest = realign(prompt, branch)
    assert nearest is not None
    assert end_of_reordering(prompt, branch, nearest) == nearest


def test_spans_are_permuted_if_nine_tenths_of_their_tokens_are_the_same() -> None:
    rng = random.Random(5)
    rest = list(range(400, 500))
    num_permuted = 0
    for _ in range(300):
        first = [rng.randrange(20) for _ in range(rng.randrange(1, 40))]
        shuffled = rng.sample(first, len(first))
        second = [token_id if rng.random() < 0.95 else 50 for token_id in shuffled]
        if first[0] == second[0]:
            continue
        num_common = (Counter(first) & Counter(second)).total()
        nearest = Realignment(0, 0, 0)
        found = end_of_permutation(tokens_of([*first, 98, *rest]), tokens_of([*second, 99, *rest]), nearest)
        num_span_tokens = len(first) + 1  # with 98 or 99, at which both spans end
        is_permuted = num_common >= 0.9 * num_span_tokens and num_span_tokens >= 8
        assert found == (Realignment(num_span_tokens, num_span_tokens, len(rest)) if is_permuted else nearest)
        num_permuted += is_permuted
    assert 50 < num_permuted < 200


def test_spans_of_other_tokens_are_not_permuted() -> None:
    first, rest = list(range(200, 250)), list(range(400, 500))
    prompt, branch = tokens_of([*first, *rest]), tokens_of([*reversed(range(600, 650)), *rest])
    nearest = realign(prompt, branch)
    assert nearest is not None
    assert end_of_permutation(prompt, branch, nearest) is nearest
