"""A purge also deletes victims: blocks that the index has chosen for eviction, but that the store still holds."""

from __future__ import annotations

import pytest

from radixkv.errors import StoreUnavailable
from radixkv.offload.block_keys import BlockKeys
from radixkv.offload.purge import Deletion

from .tiered_bench import FORMAT, PAYLOAD_BYTES, SteppedStore, TieredBench


def count_blocks_of(store: SteppedStore, tenant: str) -> int:
    """Count the blocks of a tenant in a store."""
    return len(store._keys_of(BlockKeys(FORMAT).scope(tenant, None, None)))


def with_queued_victims() -> tuple[TieredBench, SteppedStore]:
    """Return a bench whose store is full of blocks of B, three of which are victims for three evicted blocks of A."""
    bench = TieredBench(num_blocks=8, host=4)
    store = bench.stores["host"]
    bench.prefill(range(16), tenant="B")
    bench.evict(4)
    bench.prefill(range(100, 112), tenant="A")
    bench.cache.evict(3)
    assert (count_blocks_of(store, "A"), count_blocks_of(store, "B")) == (0, 4)
    return bench, store


def with_kept_victims() -> tuple[TieredBench, SteppedStore]:
    """Return a bench whose store has received four victims of B, but only one block of A, and so keeps three victims.

    The other copies of A were dropped, since they exceeded the memory limit of copies.
    """
    bench = TieredBench(num_blocks=8, max_bytes=PAYLOAD_BYTES, host=4)
    store = bench.stores["host"]
    bench.prefill(range(16), tenant="B")
    for _ in range(4):
        bench.evict(1)
    bench.prefill(range(100, 116), tenant="A")
    bench.cache.evict(4)
    bench.offload._saver.flush()
    store.run()
    assert (count_blocks_of(store, "A"), count_blocks_of(store, "B")) == (1, 3)
    return bench, store


def purge(bench: TieredBench, store: SteppedStore) -> int | None:
    """Purge B, and let the store run all calls. Returns the number of deleted blocks."""
    (deletion,) = bench.offload.purge("B", None, None)
    assert isinstance(deletion, Deletion)
    store.run()
    return deletion.num_deleted.result(0)


def test_victims_not_yet_passed_to_the_store_are_deleted_with_the_rest() -> None:
    bench, store = with_queued_victims()
    assert purge(bench, store) == 4
    assert count_blocks_of(store, "B") == 0
    bench.run()
    assert count_blocks_of(store, "A") == 3


def test_victims_passed_to_the_store_count_until_they_are_evicted() -> None:
    bench, store = with_queued_victims()
    bench.offload._saver.flush()
    assert purge(bench, store) == 1, "the store evicted the three victims before"
    assert (count_blocks_of(store, "A"), count_blocks_of(store, "B")) == (3, 0)


def test_victims_that_the_store_kept_are_deleted_before_the_purge_ends() -> None:
    bench, store = with_kept_victims()
    assert bench.core.seconds_until_due() == 1.0, "the deletion needs no request"
    assert purge(bench, store) == 3
    assert count_blocks_of(store, "B") == 0
    bench.run()
    assert bench.core.seconds_until_due() is None


@pytest.mark.parametrize("is_late", [False, True])
def test_the_next_purge_reports_deletions_that_failed(is_late: bool) -> None:
    bench, store = with_queued_victims()
    bench.offload._saver.flush()
    store.error = StoreUnavailable("gone")
    store.run()
    bench.offload._saver.flush()  # since the contents of the store are unknown, it requests to delete all blocks
    if not is_late:
        store.run()
    (deletion,) = bench.offload.purge("B", None, None)
    *failing_calls, last_call = store.calls
    store.calls = failing_calls
    store.run()
    store.error = None
    store.calls = [last_call]
    store.run()
    assert deletion.num_deleted.result(0) == 4
    assert count_blocks_of(store, "B") == 0


def test_victims_of_other_tenants_are_not_counted() -> None:
    bench, store = with_kept_victims()
    (deletion,) = bench.offload.purge("C", None, None)
    store.run()
    assert deletion.num_deleted.result(0) == 0
