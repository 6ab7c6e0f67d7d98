"""Copies of what leaves the device, and what stores make of them."""

from __future__ import annotations

from .tiered_bench import TieredBench

FIRST, SECOND = range(13), range(100, 113)  # three whole blocks and a token each


def compute(bench: TieredBench, ids: range) -> None:
    """Compute a prompt while the store does nothing, and let it leave the device."""
    bench.submit(ids)
    while bench.core.has_work:
        bench.core.step()
    bench.cache.evict(4)
    bench.offload._saver.flush()


def test_a_block_that_leaves_again_before_the_store_gave_it_up_is_there_in_the_end() -> None:
    bench = TieredBench(host=3)
    bench.prefill(FIRST)
    bench.evict(4)
    compute(bench, SECOND)  # is to take the place of the first
    compute(bench, FIRST)  # and goes for it
    bench.run()
    assert bench.stores["host"].memory.size().num_objects == len(bench.elsewhere.shelves["host"]) == 3
    assert bench.prefill(FIRST).usage.host_tokens == 12
