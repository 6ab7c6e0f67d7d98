"""The independent count is compared with a literal implementation of its definition."""

from __future__ import annotations

import random

import pytest

from tests.cache.walk.reusable_tokens import count_reusable_tokens


def num_common_tokens(a: list[int], b: list[int]) -> int:
    num_tokens = 0
    while num_tokens < min(len(a), len(b)) and a[num_tokens] == b[num_tokens]:
        num_tokens += 1
    return num_tokens


def count_by_definition(prompts: list[list[int]]) -> list[int]:
    return [
        min(
            len(prompt) - 1,
            max((num_common_tokens(prompt, earlier) for earlier in prompts[:i]), default=0),
        )
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([], []),
        ([[7]], [0]),
        ([[7], [7]], [0, 0]),
        ([[1, 2, 3], [1, 2, 3]], [0, 2]),
        ([[1, 2, 3], [1, 2, 4], [1, 2, 4, 5]], [0, 2, 3]),
        ([[1, 2, 3, 4], [1, 2]], [0, 1]),
        ([[1, 2], [1, 2, 3, 4]], [0, 2]),
        ([[256, 1], [1, 256], [256, 2]], [0, 0, 1]),
        ([[0, 0, 0], [0, 0, 0, 0]], [0, 3]),
    ],
)
def test_counts_are_the_longest_earlier_prefix_short_of_the_last_token(
    prompts: list[list[int]], expected: list[int]
) -> None:
    assert count_reusable_tokens(prompts) == expected


def test_tokens_that_share_bytes_but_differ_are_not_shared() -> None:
    assert count_reusable_tokens([[0x01020304, 9], [0x01020305, 9], [0x02020304, 9]]) == [0, 0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_counts_agree_with_the_definition_on_random_prompts(seed: int) -> None:
    rng = random.Random(seed)
    vocab_size = rng.choice([1, 2, 3, 2**32])
    prompts = [[rng.randrange(vocab_size) for _ in range(rng.randint(1, 12))] for _ in range(40)]
    prompts += [[*rng.choice(prompts)[: rng.randint(1, 12)], rng.randrange(vocab_size)] for _ in range(40)]
    assert count_reusable_tokens(prompts) == count_by_definition(prompts)
