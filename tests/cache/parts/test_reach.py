import random

import numpy as np
import pytest

from radixkv.cache.parts.reach import Reach


def longest_by_trial(reach: Reach, has_part: list[bool], num_tokens: int, block_size: int) -> int:
    """Try every length, the longest first."""
    for upto in range(num_tokens, 0, -1):
        needed = {token // block_size for token in range(max(0, upto - reach.num_tokens), upto)}
        if all(has_part[block] for block in needed):
            return upto
    return 0


def test_the_longest_beginning_is_that_of_a_trial_of_all_lengths() -> None:
    rng, found = random.Random(1), set()
    for _ in range(3000):
        block_size, num_tokens = rng.choice((1, 2, 3, 8)), rng.randint(1, 40)
        reach = Reach(rng.choice((1, 2, 5, 8, 20, 100)))
        share = rng.choice((0.3, 0.7, 0.95))
        has_part = [rng.random() < share for _ in range(-(-num_tokens // block_size))]
        expected = longest_by_trial(reach, has_part, num_tokens, block_size)
        assert reach.longest(np.array(has_part), num_tokens, block_size) == expected
        found.add((expected == num_tokens) + (expected == 0) * 2)
    assert found == {0, 1, 2}, "whole, none and something between"


def test_a_window_reaches_back_to_the_first_token_that_a_query_sees() -> None:
    # The query at position 10 sees (10 - 4, 10]: its own, and 7 to 9.
    assert Reach.of_window(4).first_token(10) == 7
    assert Reach.of_window(4).first_token(2) == 0


def test_a_window_of_one_token_still_needs_the_block_that_is_being_written() -> None:
    assert Reach.of_window(1).num_tokens == 1


@pytest.mark.parametrize(("num_tokens", "most"), [(1, 2), (16, 3), (17, 4), (10_000, 12)])
def test_a_short_request_needs_no_more_than_its_blocks_and_a_copy(num_tokens: int, most: int) -> None:
    assert Reach(72).most_blocks(num_tokens, block_size=8) == most
