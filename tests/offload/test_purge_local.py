"""A purge reaches what a store was told to give up, and has not."""

from __future__ import annotations

import pytest

from radixkv.errors import StoreUnavailable
from radixkv.offload.block_keys import BlockKeys
from radixkv.offload.purge import Deletion

from .tiered_bench import FORMAT, PAYLOAD_BYTES, SteppedStore, TieredBench


def num_of(store: SteppedStore, tenant: str) -> int:
    """Count a tenant's blocks in a store."""
    return len(store._keys_of(BlockKeys(FORMAT).scope(tenant, None, None)))


def keeping_its_victim() -> tuple[TieredBench, SteppedStore]:
    """A bench whose store is full of B's blocks, three of which are to go for three of A's that have left."""
    bench = TieredBench(num_blocks=8, host=4)
    store = bench.stores["host"]
    bench.prefill(range(16), tenant="B")
    bench.evict(4)
    bench.prefill(range(100, 112), tenant="A")
    bench.cache.evict(3)
    assert (num_of(store, "A"), num_of(store, "B")) == (0, 4)
    return bench, store


def keeping() -> tuple[TieredBench, SteppedStore]:
    """A bench whose store was told to give up four of B's blocks for A's, of which one was copied: three are left."""
    bench = TieredBench(num_blocks=8, max_bytes=PAYLOAD_BYTES, host=4)
    store = bench.stores["host"]
    bench.prefill(range(16), tenant="B")
    for _ in range(4):
        bench.evict(1)
    bench.prefill(range(100, 116), tenant="A")
    bench.cache.evict(4)
    bench.offload._saver.flush()
    store.run()
    assert (num_of(store, "A"), num_of(store, "B")) == (1, 3)
    return bench, store


def purge(bench: TieredBench, store: SteppedStore) -> int | None:
    """Purge B; returns what the store had, once it has done all that it was told."""
    (deletion,) = bench.offload.purge("B", None, None)
    assert isinstance(deletion, Deletion)
    store.run()
    return deletion.num_deleted.result(0)


def test_a_store_that_was_not_told_yet_deletes_all_at_once() -> None:
    bench, store = keeping_its_victim()
    assert purge(bench, store) == 4
    assert num_of(store, "B") == 0
    bench.run()
    assert num_of(store, "A") == 3


def test_what_a_store_was_told_to_victims_counts_until_it_has() -> None:
    bench, store = keeping_its_victim()
    bench.offload._saver.flush()
    assert purge(bench, store) == 1, "the others had gone before"
    assert (num_of(store, "A"), num_of(store, "B")) == (3, 0)


def test_what_a_store_had_no_reason_to_victims_is_deleted_before_the_purge_is_answered() -> None:
    bench, store = keeping()
    assert bench.core.seconds_to_rest() == 1.0, "also if no request comes"
    assert purge(bench, store) == 3
    assert num_of(store, "B") == 0
    bench.run()
    assert bench.core.seconds_to_rest() is None


@pytest.mark.parametrize("is_late", [False, True])
def test_what_a_store_failed_to_delete_is_told_by_the_next_purge(is_late: bool) -> None:
    bench, store = keeping_its_victim()
    bench.offload._saver.flush()
    store.error = StoreUnavailable("gone")
    store.run()
    bench.offload._saver.flush()  # nobody knows what it has: all of it is to be deleted
    if not is_late:
        store.run()
    (deletion,) = bench.offload.purge("B", None, None)
    told, store.calls = store.calls, store.calls[:-1]
    store.run()
    store.error = None
    store.calls = told[-1:]
    store.run()
    assert deletion.num_deleted.result(0) == 4
    assert num_of(store, "B") == 0


def test_blocks_of_others_that_are_victims_are_none_of_its_own() -> None:
    bench, store = keeping()
    (deletion,) = bench.offload.purge("C", None, None)
    store.run()
    assert deletion.num_deleted.result(0) == 0
