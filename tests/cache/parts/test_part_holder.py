import numpy as np
import pytest

from radixkv.blocks import BlockCopy
from radixkv.cache.parts.part_holder import PartHolder
from radixkv.cache.parts.part_pool import PartPool
from radixkv.cache.parts.reach import Reach
from radixkv.errors import InvariantViolation

BLOCKS = np.arange(10, 26, dtype=np.int32)  # of two tokens


def pool_of(num_parts: int = 12) -> PartPool:
    return PartPool(30, num_parts, block_size=2, reach=Reach(3), step_tokens=4)


def with_part(pool: PartPool) -> list[int]:
    return np.flatnonzero(pool.table >= 0).tolist()


def test_a_long_request_needs_no_more_than_its_reach_and_its_step() -> None:
    pool = pool_of()
    holder = PartHolder(pool, 0)
    most = 0
    for start in range(0, 32, 4):
        holder.cover(BLOCKS, start, start + 4)
        most = max(most, pool.num_needed)
        holder.settle(start + 4)
        assert pool.num_needed == 2  # three tokens before an even position lie in two blocks
    assert most == 4
    assert pool.num_given_up == 4  # sixteen blocks were written, and there are twelve parts


def test_the_table_holds_what_is_within_reach() -> None:
    pool = pool_of()
    holder = PartHolder(pool, 0)
    holder.cover(BLOCKS, 0, 8)
    holder.settle(8)
    cover = holder.cover(BLOCKS, 8, 9)
    assert cover.copy is None
    assert cover.part_ids.tolist() == [0, 0, *pool.table[[12, 13, 14]]]


def test_a_step_that_is_not_all_computed_is_settled_where_it_ended() -> None:
    pool = pool_of()
    holder = PartHolder(pool, 0)
    holder.cover(BLOCKS, 0, 8)
    holder.settle(3)
    assert sorted(holder.needed) == [10, 11]
    assert pool.num_waiting == 2


def test_a_copied_block_is_kept_until_the_copy_is_made() -> None:
    pool = pool_of()
    first = PartHolder(pool, 0)
    first.cover(BLOCKS, 0, 6)
    first.settle(6)
    first.close()
    found = BLOCKS[:3]
    second = PartHolder(pool, 0)
    second.find(found, 5)
    blocks, copy = np.array([10, 11, 27, 28], dtype=np.int32), BlockCopy(12, 27)
    cover = second.cover(blocks, 5, 7, copy)
    assert cover.copy == BlockCopy(int(pool.table[12]), int(pool.table[27]))
    second.settle(5, copy)  # the step had no room, and is tried again
    assert sorted(second.needed) == [11, 12, 27]
    assert second.cover(blocks, 5, 6, copy).copy == cover.copy
    second.settle(6)
    assert sorted(second.needed) == [11, 27]


def test_what_was_found_waits_with_the_ends() -> None:
    pool = pool_of(8)
    first = PartHolder(pool, 0)
    first.cover(BLOCKS, 0, 6)
    first.close()
    second = PartHolder(pool, 0)
    second.find(BLOCKS, 4)
    for start in range(4, 32, 4):
        second.cover(BLOCKS, start, start + 4)
        second.settle(start + 4)
    assert {10, 11} <= set(with_part(pool)), "where a prompt was found another may be found"
    assert 14 not in with_part(pool)


def test_a_part_that_should_be_there_is_missed() -> None:
    pool = pool_of()
    holder = PartHolder(pool, 0)
    with pytest.raises(InvariantViolation, match="within reach"):
        holder.cover(BLOCKS, 4, 6)
    with pytest.raises(InvariantViolation, match="within reach"):
        holder.find(BLOCKS, 3)


def test_one_that_keeps_all_passes_nothing() -> None:
    pool = pool_of(16)
    holder = PartHolder(pool, 0, keeps_all=True)
    for start in range(0, 20, 4):
        holder.cover(BLOCKS, start, start + 4)
        holder.settle(start + 4)
    assert sorted(holder.needed) == BLOCKS[:10].tolist()


def test_an_exchanged_block_is_let_go_in_the_place_of_the_old_one() -> None:
    pool = pool_of()
    holder = PartHolder(pool, 0)
    holder.cover(BLOCKS, 0, 4)
    holder.exchange(11, 28)
    assert sorted(holder.needed) == [10, 28]
    holder.settle(8)
    assert holder.needed == []


def test_closing_gives_back_what_was_reserved_once() -> None:
    pool = pool_of()
    pool.reserve(4)
    holder = PartHolder(pool, 4)
    holder.cover(BLOCKS, 0, 4)
    holder.close()
    holder.close()
    assert (pool.num_reserved, pool.num_needed, pool.num_waiting) == (0, 0, 2)


def received(pool: PartPool) -> tuple[PartHolder, list[int]]:
    """A request that has three blocks of a tree, two of which have their parts, and three more that are loaded."""
    other = PartHolder(pool, 0)
    other.cover(BLOCKS, 0, 6)
    other.close()
    pool.freed(BLOCKS[:1])
    holder = PartHolder(pool, 0)
    return holder, holder.receive(BLOCKS, 6)


def test_loaded_blocks_get_parts_where_the_next_token_reaches() -> None:
    pool = pool_of()
    holder, given = received(pool)
    assert given == [4, 5]
    assert sorted(holder.needed) == [14, 15]
    assert holder.part_of(14) == pool.table[14]
    holder.settle(12)
    assert holder.cover(BLOCKS, 12, 14).part_ids.tolist() == [0, 0, 0, 0, *pool.table[[14, 15, 16]]]


def test_parts_that_are_there_do_not_go_for_loaded_ones() -> None:
    pool = pool_of(num_parts=7)
    pool.need([14, 15, 25, 26, 27, 28, 29])
    pool.let_go([14, 15, 25, 26, 27, 28, 29], are_ends=True)
    before = pool.table[[14, 15]].tolist()
    holder = PartHolder(pool, 0, keeps_all=True)
    assert holder.receive(BLOCKS, 6) == [0, 1, 2, 3]
    assert pool.table[[14, 15]].tolist() == before, "they were used longest ago"
    assert with_part(pool) == [10, 11, 12, 13, 14, 15, 29]


def test_what_others_may_go_on_from_outlasts_what_is_only_passed() -> None:
    pool = pool_of(num_parts=8)
    holder = PartHolder(pool, 0)
    holder.expect_others(8)  # needs five to eight, in the third and fourth block
    for start in range(0, 32, 4):
        holder.cover(BLOCKS, start, start + 4)
        holder.settle(start + 4)
    holder.close()
    assert pool.num_given_up == 8
    assert with_part(pool)[:2] == [12, 13]


def test_what_computes_the_last_token_again_is_kept() -> None:
    pool = pool_of()
    holder = PartHolder(pool, 0)
    holder.cover(BLOCKS, 0, 9)
    holder.settle(9)
    assert sorted(holder.needed) == [12, 13, 14], "five to seven, before the last token, begin in the third block"
