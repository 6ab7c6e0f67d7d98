from __future__ import annotations

import numpy as np
import pytest

from radixkv.block_pool import BlockIds, BlockPool
from radixkv.errors import DoubleRelease, InvariantViolation, OutOfBlocks


def ids(*block_ids: int) -> BlockIds:
    return np.array(block_ids, dtype=np.int32)


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_leased, pool.num_published


def state(pool: BlockPool) -> tuple[object, ...]:
    return (*counts(pool), [pool.reference_count(block_id) for block_id in range(pool.num_blocks)])


def test_a_new_pool_is_free() -> None:
    pool = BlockPool(5)
    assert counts(pool) == (5, 0, 0)
    pool.check(np.zeros(5, dtype=np.int32), ids())


def test_acquired_blocks_are_distinct_and_have_one_owner() -> None:
    pool = BlockPool(5)
    block_ids = np.concatenate((pool.acquire(2), pool.acquire(0), pool.acquire(3)))
    assert sorted(block_ids.tolist()) == [0, 1, 2, 3, 4]
    assert block_ids.dtype == np.int32
    assert counts(pool) == (0, 5, 0)
    assert state(pool)[3] == [1] * 5


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


def test_a_block_is_free_when_its_last_lease_lets_go() -> None:
    pool = BlockPool(3)
    block_ids = pool.acquire(2)
    pool.retain(block_ids[:1])
    pool.release(block_ids)
    assert counts(pool) == (2, 1, 0)
    pool.release(block_ids[:1])
    assert counts(pool) == (3, 0, 0)
    assert sorted(pool.acquire(3).tolist()) == [0, 1, 2]


@pytest.mark.parametrize("tree_goes_first", [True, False])
def test_a_block_is_free_when_tree_and_lease_let_go(tree_goes_first: bool) -> None:
    pool = BlockPool(3)
    block_ids = pool.acquire(2)
    pool.publish(block_ids)
    assert counts(pool) == (1, 0, 2)
    if tree_goes_first:
        pool.unpublish(block_ids)
        assert counts(pool) == (1, 2, 0)
        pool.release(block_ids)
    else:
        pool.release(block_ids)
        assert counts(pool) == (1, 0, 2)
        pool.unpublish(block_ids)
    assert counts(pool) == (3, 0, 0)


@pytest.mark.parametrize("wrong", [(0,), (1, 0), (2,)], ids=["free", "one of two is free", "only the tree holds it"])
def test_a_double_release_is_refused_and_changes_nothing(wrong: tuple[int, ...]) -> None:
    pool = BlockPool(3)
    block_ids = pool.acquire(3)
    pool.publish(ids(2))
    pool.release(ids(0, 2))
    before = state(pool)
    with pytest.raises(DoubleRelease):
        pool.release(ids(*wrong))
    assert state(pool) == before
    assert block_ids.size == 3


def test_a_free_block_is_neither_retained_nor_published() -> None:
    pool = BlockPool(3)
    owned = pool.acquire(1)
    free = ids(*{0, 1, 2} - set(owned.tolist()))
    before = state(pool)
    with pytest.raises(InvariantViolation):
        pool.retain(np.concatenate((owned, free)))
    with pytest.raises(InvariantViolation):
        pool.publish(np.concatenate((owned, free)))
    assert state(pool) == before


def test_publishing_twice_is_refused_and_changes_nothing() -> None:
    pool = BlockPool(3)
    block_ids = pool.acquire(2)
    pool.publish(block_ids[:1])
    before = state(pool)
    with pytest.raises(InvariantViolation):
        pool.publish(block_ids)
    assert state(pool) == before


def test_unpublishing_a_leased_block_is_refused_and_changes_nothing() -> None:
    pool = BlockPool(3)
    block_ids = pool.acquire(2)
    pool.publish(block_ids[:1])
    before = state(pool)
    with pytest.raises(InvariantViolation):
        pool.unpublish(block_ids)
    assert state(pool) == before


def test_no_blocks_are_a_fine_number_of_blocks() -> None:
    pool = BlockPool(2)
    for change in pool.retain, pool.release, pool.publish, pool.unpublish:
        change(ids())
    assert counts(pool) == (2, 0, 0)


@pytest.mark.parametrize(
    ("reference_counts", "published", "message"),
    [
        ([1, 1, 0], [0], "reference counts of 1 blocks are wrong, first 0"),
        ([2, 1, 0], [], "published blocks are not"),
        ([2, 1, 0], [1], "published blocks are not"),
        ([2, 1, 0], [0, 0], "published blocks are not"),
    ],
)
def test_check_names_the_drift(reference_counts: list[int], published: list[int], message: str) -> None:
    pool = BlockPool(3)
    pool.publish(pool.acquire(2)[:1])
    pool.check(ids(2, 1, 0), ids(0))
    with pytest.raises(InvariantViolation, match=message):
        pool.check(ids(*reference_counts), ids(*published))


def test_check_recounts_the_published_blocks() -> None:
    pool = BlockPool(3)
    pool.publish(pool.acquire(1))
    pool.num_published = 2
    with pytest.raises(InvariantViolation, match="num_published 2, counted 1"):
        pool.check(ids(2, 0, 0), ids(0))


def test_check_notices_a_block_lost_from_the_free_list() -> None:
    pool = BlockPool(3)
    pool.num_free -= 1
    with pytest.raises(InvariantViolation, match="free list"):
        pool.check(ids(0, 0, 0), ids())
