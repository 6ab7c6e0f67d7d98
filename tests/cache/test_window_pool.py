import random
from collections import Counter

import numpy as np
import pytest

from radixkv.cache.window_pool import Reach, WindowPool, min_parts
from radixkv.errors import InvariantViolation, OutOfBlocks


def longest_reusable(reach: Reach, has_part: list[bool], num_tokens: int, block_size: int) -> int:
    """Return how many tokens can be reused, found by a trial of every length, the longest first."""
    for upto in range(num_tokens, 0, -1):
        needed = {token // block_size for token in range(max(0, upto - reach.num_tokens), upto)}
        if all(has_part[block] for block in needed):
            return upto
    return 0


def test_the_reusable_tokens_are_those_of_a_trial_of_all_lengths() -> None:
    rng, results = random.Random(1), set()
    for _ in range(3000):
        block_size, num_tokens = rng.choice((1, 2, 3, 8)), rng.randint(1, 40)
        reach = Reach(rng.choice((1, 2, 5, 8, 20, 100)))
        share = rng.choice((0.3, 0.7, 0.95))
        has_part = [rng.random() < share for _ in range(-(-num_tokens // block_size))]
        expected = longest_reusable(reach, has_part, num_tokens, block_size)
        assert reach.num_reusable_tokens(np.array(has_part), num_tokens, block_size) == expected
        results.add("none" if expected == 0 else "all" if expected == num_tokens else "some")
    assert results == {"none", "some", "all"}


def test_a_window_reaches_back_to_the_first_token_that_a_query_sees() -> None:
    # The query at position 10 sees (10 - 4, 10]: its own, and 7 to 9.
    assert Reach.of_window(4).first_token(10) == 7
    assert Reach.of_window(4).first_token(2) == 0


def test_a_window_of_one_token_still_needs_the_block_that_is_being_written() -> None:
    assert Reach.of_window(1).num_tokens == 1


@pytest.mark.parametrize(("num_tokens", "max_parts"), [(1, 2), (16, 3), (17, 4), (10_000, 12)])
def test_a_short_request_needs_no_more_than_its_blocks_and_a_copy(num_tokens: int, max_parts: int) -> None:
    assert Reach(72).max_parts(num_tokens, block_size=8) == max_parts


def pool_of(num_parts: int) -> WindowPool:
    """Return a pool of parts for blocks of two tokens. One part is left to what steps write."""
    return WindowPool(20, num_parts, block_size=2, reach=Reach(2), step_tokens=2)


def ids(*block_ids: int) -> np.ndarray:
    return np.array(block_ids, dtype=np.int32)


def with_part(pool: WindowPool) -> list[int]:
    """Return the ids of the blocks that have a part."""
    return np.flatnonzero(pool.table >= 0).tolist()


def test_passed_parts_are_evicted_before_those_where_a_prompt_ended() -> None:
    pool = pool_of(5)
    pool.pin([1, 2, 3, 4, 5])
    pool.unpin_ends([1])
    pool.unpin_passed({3: 0, 2: 0}, 1)
    pool.pin([6])
    assert with_part(pool) == [1, 2, 4, 5, 6], "the one that was passed first was evicted"
    pool.pin([7, 8])
    assert with_part(pool) == [4, 5, 6, 7, 8], "the end is evicted last"
    assert (pool.num_evicted, pool.num_pinned, pool.num_free) == (3, 5, 0)


def test_a_part_that_is_needed_again_stays_the_same() -> None:
    pool = pool_of(5)
    pool.pin([1, 2])
    part = pool.table[1]
    pool.unpin_passed({1: 0}, 1)
    assert (pool.num_unpinned, pool.num_pinned) == (1, 1)
    pool.pin([1])
    assert (pool.table[1], pool.num_unpinned) == (part, 0)


def test_a_part_stays_needed_until_the_last_request_releases_it() -> None:
    pool = pool_of(5)
    pool.pin([1])
    pool.pin([1])
    pool.unpin_ends([1])
    assert pool.num_pinned == 1
    pool.check(Counter({1: 1}), 0, ids(*range(2, 20)))


def test_the_part_of_a_block_is_freed_with_it() -> None:
    pool = pool_of(5)
    pool.pin([1, 2, 3])
    pool.unpin_passed({1: 0, 2: 1}, 2)
    pool.free_parts(ids(0, 1, 7))
    assert (with_part(pool), pool.num_free, pool.num_unpinned) == ([2, 3], 3, 1)
    with pytest.raises(InvariantViolation, match="whose part is pinned"):
        pool.free_parts(ids(3))


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_block_of_a_tree_takes_over_the_part_of_an_equal_block(is_needed: bool) -> None:
    pool = pool_of(5)
    pool.pin([1])
    part = pool.table[1]
    if not is_needed:
        pool.unpin_passed({1: 0}, 1)
    assert pool.exchange(1, 9) is is_needed
    assert (pool.table[9], with_part(pool)) == (part, [9])
    pool.check(Counter({9: 1} if is_needed else {}), 0, ids(1))


def test_a_block_of_a_tree_keeps_its_own_part() -> None:
    pool = pool_of(5)
    pool.pin([1, 9])
    part = pool.table[9]
    assert pool.exchange(1, 9)
    assert pool.table[9] == part
    pool.check(Counter({9: 2}), 0, ids())
    pool.free_parts(ids(1))
    assert with_part(pool) == [9]


def test_requests_reserve_no_more_parts_than_a_step_leaves() -> None:
    pool = pool_of(6)
    pool.require_room(5)
    pool.reserve(3)
    with pytest.raises(OutOfBlocks, match="expected room for 3 blocks more of 6"):
        pool.require_room(3)


def test_parts_that_outlive_requests_may_be_half_of_those_that_one_request_does_not_need() -> None:
    pool = pool_of(12)
    assert pool.max_lasting == 3
    pool.num_lasting = 2
    assert pool.may_last(1)
    with pytest.raises(
        OutOfBlocks, match="expected at most 3 that outlive their requests, got more with the 2 of this one"
    ):
        pool.require_room(2, lasts=True)


def test_a_pool_that_is_too_small_for_one_request_is_refused() -> None:
    assert min_parts(Reach(2), block_size=2, step_tokens=2) == 5
    with pytest.raises(InvariantViolation, match="expected at least 5, got 4"):
        pool_of(4)


def test_pinning_more_parts_than_there_are_is_a_bug_of_the_caller() -> None:
    pool = pool_of(5)
    with pytest.raises(InvariantViolation, match="expected one that no request needs, got 5 needed ones"):
        pool.pin(range(6))


@pytest.mark.parametrize(
    ("needs", "reserved", "free", "message"),
    [
        ({}, 0, (), "the needed parts"),
        ({1: 1}, 1, (), "the reservations"),
        ({1: 1}, 0, (1,), "a free block has a part"),
    ],
)
def test_a_wrong_count_is_detected(needs: dict[int, int], reserved: int, free: tuple[int, ...], message: str) -> None:
    pool = pool_of(5)
    pool.pin([1])
    with pytest.raises(InvariantViolation, match=message):
        pool.check(Counter(needs), reserved, ids(*free))
