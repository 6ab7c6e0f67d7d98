"""Evicted blocks are saved, and stores never hold a block that the index does not know."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from radixkv.errors import StoreLate, StorePaused, StoreUnavailable
from radixkv.offload.saver import Saver
from tests.core_bench import purge_at_once

from .tiered_bench import PAYLOAD_BYTES, PROMPT, TieredBench

OTHER = range(100, 113)


def compute_and_evict(bench: TieredBench, ids: range) -> None:
    """Compute a prompt while the store does nothing, and evict it."""
    bench.submit(ids)
    while bench.core.has_work:
        bench.core.step()
    bench.cache.evict(4)
    bench.offload._saver.flush()


def test_a_block_that_is_evicted_again_while_it_is_a_victim_is_stored() -> None:
    bench = TieredBench(host=3)
    bench.prefill(PROMPT)
    bench.evict(4)
    compute_and_evict(bench, OTHER)  # its blocks are to replace those of the first prompt
    compute_and_evict(bench, PROMPT)  # evicted again, so now its blocks are to replace those of the other prompt
    bench.run()
    assert bench.stores["host"].memory.size().num_objects == len(bench.index.tiers["host"]) == 3
    assert bench.prefill(PROMPT).usage.host_tokens == 12


def bench_with_partless_blocks(room_blocks: int = 100) -> TieredBench:
    """Return a bench whose store has a prompt's blocks without parts, and whose device has them with their parts.

    The device has a block of another prompt as well, which is evicted first.
    """
    bench = TieredBench(12, num_parts=8, host=room_blocks)
    bench.prefill(PROMPT)
    bench.evict(4)
    bench.index.note_partless("host", list(bench.index.tiers["host"]))
    for ids in (range(100, 104), PROMPT):
        bench.clock.now_s += 1.0
        bench.prefill(ids, read_cache=False)
    return bench


def count_stored_blocks(bench: TieredBench) -> int:
    """Count the blocks in the stores, and assert that the index knows each, since a purge finds no others."""
    for name, store in bench.stores.items():
        assert set(store.memory._table._entries) == set(bench.index.tiers[name])
    return sum(map(len, bench.index.tiers.values()))


def test_a_block_is_stored_again_with_its_part() -> None:
    bench = bench_with_partless_blocks()
    bench.evict(5)
    assert count_stored_blocks(bench) == 4
    assert bench.index.tiers["host"].partless == set()


def raise_memory_error(*_: object) -> None:
    raise MemoryError


def leave_no_room_for_copies(saver: Saver, set_attribute: Callable[..., None]) -> None:
    set_attribute(saver, "_num_free_blocks", 0)


def fail_to_allocate(saver: Saver, set_attribute: Callable[..., None]) -> None:
    set_attribute(saver._mover, "read", raise_memory_error)


@pytest.mark.parametrize("obstruct", [leave_no_room_for_copies, fail_to_allocate])
def test_a_store_keeps_nothing_of_a_block_whose_copy_was_dropped(
    obstruct: Callable[[Saver, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_with_partless_blocks()
    with monkeypatch.context() as patched:
        obstruct(bench.offload._saver, patched.setattr)
        bench.cache.evict(5)
        bench.offload._saver.flush()
    bench.run()
    assert bench.offload.stats()[0].dropped_blocks == 4
    assert count_stored_blocks(bench) == 0


def test_a_store_keeps_nothing_of_a_block_whose_call_never_reached_it() -> None:
    bench = bench_with_partless_blocks()
    (store,) = bench.stores.values()
    store.error = StorePaused("paused")
    bench.evict(5)
    store.error = None
    bench.run()
    assert bench.offload.stats()[0].refused_blocks == 4
    assert count_stored_blocks(bench) == 0


def test_a_store_keeps_nothing_of_a_victim_that_was_evicted_again_and_dropped() -> None:
    bench = bench_with_partless_blocks(room_blocks=3)
    (store,) = bench.stores.values()
    bench.cache.evict(1)
    assert bench.index._victims["host"]
    store.error = StorePaused("paused")
    bench.evict(4)
    store.error = None
    bench.run()
    assert count_stored_blocks(bench) == 0


def test_blocks_that_a_store_never_got_are_not_deleted() -> None:
    bench = TieredBench()
    (store,) = bench.stores.values()
    bench.prefill(PROMPT)
    bench.offload._saver._num_free_blocks = 0
    bench.cache.evict(4)
    bench.offload._saver.flush()
    assert bench.offload.stats()[0].dropped_blocks == 3
    assert store.calls == []


@pytest.mark.parametrize("seed", range(20))
def test_the_index_agrees_with_the_stores_whatever_fails(seed: int) -> None:
    rng = random.Random(seed)
    num_parts = rng.choice([0, rng.randint(7, 12)])
    num_blocks = rng.choice([12, 16, 24])
    max_bytes = rng.choice([2, 8, 256]) * PAYLOAD_BYTES
    bench = TieredBench(num_blocks, max_bytes, num_parts, host=rng.choice([3, 8, 40]), disk=rng.choice([6, 60]))
    bench.runner.is_asynchronous = False
    prompts = [[rng.randrange(200) for _ in range(30)] for _ in range(3)]
    for _ in range(120):
        bench.clock.now_s += rng.choice([0.0, 0.1, 3.0])
        choice = rng.random()
        if choice < 0.6:
            ids = [*rng.choice(prompts)[: rng.randint(1, 30)], *range(rng.choice([0, 0, 3]))]
            bench.submit(ids, tenant=rng.choice("ab"), read_cache=rng.random() < 0.8)
        elif choice < 0.7:
            purge_at_once(bench.core, tenant=rng.choice(["a", "b", None]))
        elif choice < 0.8:
            bench.cache.evict(rng.randrange(12))
        for store in bench.stores.values():
            if rng.random() < 0.05:
                store.error = rng.choice([None, StoreUnavailable("gone"), StoreLate("late"), StorePaused("paused")])
            if rng.random() < 0.6:
                store.run()
        bench.core.step()
    for store in bench.stores.values():
        store.error = None
    bench.run()
    count_stored_blocks(bench)
    purge_at_once(bench.core, tenant=None)
    bench.run()
    assert count_stored_blocks(bench) == 0
