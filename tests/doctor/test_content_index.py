"""The index finds prompts by their content, at whatever position they contain it."""

from __future__ import annotations

import random

import numpy as np

from radixkv.doctor.content_index import MAX_CANDIDATES, ContentIndex

SEED = 7  # of a namespace


def passage(seed: int, length: int = 400) -> np.ndarray:
    rng = random.Random(seed)
    return np.array([rng.randrange(50_000) for _ in range(length)], np.uint32)


def joined(*passages: np.ndarray) -> np.ndarray:
    return np.concatenate(passages)


def test_the_prompt_with_the_most_of_the_content_comes_first() -> None:
    index = ContentIndex()
    index.add(0, SEED, joined(passage(1), passage(2)))
    index.add(1, SEED, passage(3))
    assert index.candidates(SEED, joined(passage(9, 5), passage(3, 200), passage(2), passage(1)), 0) == [0, 1]


def test_only_content_after_the_start_counts() -> None:
    index = ContentIndex()
    index.add(0, SEED, passage(1))
    assert index.candidates(SEED, joined(passage(1), passage(2)), 400) == []


def test_of_prompts_with_the_same_content_the_last_and_the_first_one_are_found() -> None:
    index = ContentIndex()
    index.add(0, SEED, joined(passage(1), passage(2)))
    index.add(1, SEED, passage(1))
    index.add(2, SEED, passage(1))
    assert index.candidates(SEED, passage(1), 0) == [2, 0]


def test_namespaces_do_not_see_each_other() -> None:
    index = ContentIndex()
    index.add(0, SEED, passage(1))
    assert index.candidates(SEED + 1, passage(1), 0) == []


def test_the_number_of_candidates_is_bounded() -> None:
    index = ContentIndex()
    passages = [passage(number) for number in range(MAX_CANDIDATES + 3)]
    for number, each in enumerate(passages):
        index.add(number, SEED, each)
        index.add(100 + number, SEED, each)
    found = index.candidates(SEED, joined(*passages), 0)
    assert len(found) == MAX_CANDIDATES
    assert {number >= 100 for number in found} == {True, False}


def test_short_prompts_are_not_indexed() -> None:
    index = ContentIndex()
    index.add(0, SEED, passage(1, 31))
    assert index.candidates(SEED, passage(1, 31), 0) == []


def test_a_smaller_share_of_windows_is_indexed_for_a_large_log() -> None:
    small_log, large_log = ContentIndex(), ContentIndex(2**40)  # one of 16 and one of 1,024 windows
    for index in (small_log, large_log):
        index.add(0, SEED, passage(1, 50_000))
    assert len(large_log._last) < 200 < 2000 < len(small_log._last)
    assert large_log.candidates(SEED, passage(1, 50_000), 0) == [0]
