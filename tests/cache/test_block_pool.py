from __future__ import annotations

import numpy as np
import pytest

from radixkv.blocks import BlockIds
from radixkv.cache.block_pool import BlockPool, BlockState
from radixkv.errors import DoubleRelease, InvariantViolation, OutOfBlocks


def ids(*block_ids: int) -> BlockIds:
    return np.array(block_ids, dtype=np.int32)


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_leased, pool.num_published


def state(pool: BlockPool) -> tuple[object, ...]:
    return (*counts(pool), [pool.state(block_id) for block_id in range(pool.num_blocks)])


def test_a_new_pool_is_free() -> None:
    pool = BlockPool(5)
    assert counts(pool) == (5, 0, 0)
    pool.check(ids(), ids())


def test_acquired_blocks_are_distinct_and_leased() -> None:
    pool = BlockPool(5)
    block_ids = np.concatenate((pool.acquire(2), pool.acquire(0), pool.acquire(3)))
    assert sorted(block_ids.tolist()) == [0, 1, 2, 3, 4]
    assert block_ids.dtype == np.int32
    assert counts(pool) == (0, 5, 0)
    assert state(pool)[3] == [BlockState.LEASED] * 5


def test_a_failed_acquire_takes_nothing_and_keeps_the_order() -> None:
    pool, untouched = BlockPool(4), BlockPool(4)
    for each in pool, untouched:
        each.acquire(1)
    with pytest.raises(OutOfBlocks, match="expected 4 free blocks, got 3"):
        pool.acquire(4)
    assert state(pool) == state(untouched)
    assert pool.acquire(3).tolist() == untouched.acquire(3).tolist()


def test_acquired_ids_stay_when_the_free_list_changes() -> None:
    pool = BlockPool(4)
    first, second = pool.acquire(2), pool.acquire(2)
    kept = second.tolist()
    pool.release(first)
    assert second.tolist() == kept


def test_a_released_block_is_free_and_can_be_acquired_again() -> None:
    pool = BlockPool(3)
    block_ids = pool.acquire(2)
    pool.release(block_ids[:1])
    assert counts(pool) == (2, 1, 0)
    pool.release(block_ids[1:])
    assert counts(pool) == (3, 0, 0)
    assert sorted(pool.acquire(3).tolist()) == [0, 1, 2]


def test_blocks_go_to_the_tree_and_back() -> None:
    pool = BlockPool(3)
    block_ids = pool.acquire(2)
    pool.publish(block_ids)
    assert counts(pool) == (1, 0, 2)
    pool.unpublish(block_ids[:1])
    assert counts(pool) == (1, 1, 1)
    pool.release(block_ids[:1])
    assert counts(pool) == (2, 0, 1)


def test_every_second_id_of_an_array_is_released() -> None:
    pool = BlockPool(4)
    pool.release(pool.acquire(4)[::2])
    pool.check(np.setdiff1d(np.arange(4, dtype=np.int32), np.frombuffer(pool._free, dtype=np.int32)), ids())
    assert counts(pool) == (2, 2, 0)


@pytest.mark.parametrize("wrong", [(0,), (1, 0), (2,)], ids=["free", "one is free", "the tree's"])
def test_a_double_release_is_refused_and_changes_nothing(wrong: tuple[int, ...]) -> None:
    pool = BlockPool(3)
    pool.acquire(3)
    pool.publish(ids(2))
    pool.release(ids(0))
    before = state(pool)
    with pytest.raises(DoubleRelease):
        pool.release(ids(*wrong))
    assert state(pool) == before


@pytest.mark.parametrize("wrong", [(0,), (1, 0), (1, 2)], ids=["free", "one is free", "one is the tree's"])
def test_only_leased_blocks_are_published(wrong: tuple[int, ...]) -> None:
    pool = BlockPool(3)
    pool.acquire(3)
    pool.publish(ids(2))
    pool.release(ids(0))
    before = state(pool)
    with pytest.raises(InvariantViolation):
        pool.publish(ids(*wrong))
    assert state(pool) == before


def test_only_published_blocks_are_unpublished() -> None:
    pool = BlockPool(3)
    block_ids = pool.acquire(2)
    pool.publish(block_ids[:1])
    before = state(pool)
    with pytest.raises(InvariantViolation):
        pool.unpublish(block_ids)
    assert state(pool) == before


def test_no_blocks_are_a_fine_number_of_blocks() -> None:
    pool = BlockPool(2)
    for change in pool.release, pool.publish, pool.unpublish:
        change(ids())
    assert counts(pool) == (2, 0, 0)


@pytest.mark.parametrize(
    ("leased", "published", "message"),
    [
        ([], [0], "LEASED blocks are not"),
        ([1, 2], [0], "LEASED blocks are not"),
        ([1], [], "PUBLISHED blocks are not"),
        ([1], [0, 0], "PUBLISHED blocks are not"),
    ],
)
def test_check_names_the_drift(leased: list[int], published: list[int], message: str) -> None:
    pool = BlockPool(3)
    pool.publish(pool.acquire(2)[1:])
    pool.check(ids(1), ids(0))
    with pytest.raises(InvariantViolation, match=message):
        pool.check(ids(*leased), ids(*published))


def test_check_recounts_the_published_blocks() -> None:
    pool = BlockPool(3)
    pool.publish(pool.acquire(1))
    pool.num_published = 2
    with pytest.raises(InvariantViolation, match="num_published is 2, counted 1"):
        pool.check(ids(), ids(0))


def test_check_notices_a_block_lost_from_the_free_list() -> None:
    pool = BlockPool(3)
    pool._free.pop()
    with pytest.raises(InvariantViolation, match="FREE blocks"):
        pool.check(ids(), ids())
