"""Handles of blocks in shared stores: which blocks exist, and which of them are loaded."""

from __future__ import annotations

from radixkv.engine.transfer.shared_stores import SharedStores
from radixkv.errors import StoreUnavailable
from radixkv.namespace import Namespace
from radixkv.offload.tiers.tier import Absence, LoadedBlock
from tests.fake_runner import tokens
from tests.offload.tiered_bench import BLOCK_SIZE, TieredBench

PROMPT = range(2 * BLOCK_SIZE + 1)


def bench_with_stores() -> tuple[TieredBench, SharedStores]:
    """Return a bench whose shared store has the whole blocks of a prompt, and the stores of the bench."""
    bench = TieredBench(16, redis=100)
    bench.prefill(PROMPT)
    return bench, SharedStores(bench.offload.tiers, bench.offload.purger.is_purging_any)


def test_blocks_that_a_server_published_are_loaded_by_their_keys() -> None:
    bench, stores = bench_with_stores()
    blocks = list(bench.index.key_blocks(Namespace("fake"), tokens(PROMPT)))
    absent_block = blocks[0]._replace(key=bytes(32))
    existing, loaded = stores.exists("redis", [*blocks, absent_block]), stores.load("redis", [*blocks, absent_block])
    bench.stores["redis"].run()
    assert existing.result() == [True, True, False]
    first, second, missing = loaded.result()
    assert missing is Absence.ABSENT
    assert isinstance(first, LoadedBlock)
    block_copy = stores.copy_of(second)
    assert block_copy is not None
    assert block_copy.nbytes == first.payload.nbytes
    assert block_copy != first.payload
    assert stores.copy_of(missing) is None


def test_a_block_with_other_tokens_is_not_a_copy() -> None:
    bench, stores = bench_with_stores()
    block = next(bench.index.key_blocks(Namespace("fake"), tokens(PROMPT)))
    loaded = stores.load("redis", [block._replace(tokens=block.tokens[::-1])])
    bench.stores["redis"].run()
    assert stores.copy_of(loaded.result()[0]) is None


def test_a_store_that_fails_has_nothing() -> None:
    bench, stores = bench_with_stores()
    block = next(bench.index.key_blocks(Namespace("fake"), tokens(PROMPT)))
    bench.stores["redis"].error = StoreUnavailable("redis: it answers neither the call nor health checks")
    existing, loaded = stores.exists("redis", [block]), stores.load("redis", [block])
    bench.stores["redis"].run()
    assert (existing.result(), loaded.result()) == (None, [Absence.UNAVAILABLE])
    assert stores.names() == ["redis"]


def test_a_store_in_which_an_invoked_adapter_is_being_purged_is_left_out_for_blocks_of_the_adapter() -> None:
    bench, stores = bench_with_stores()
    bench.cache.marks.add("law")
    invoking = bench.cache.marks.invocation("law", BLOCK_SIZE).marked(tokens(PROMPT))
    blocks = list(bench.index.key_blocks(Namespace("fake"), invoking))
    bench.offload.purge(None, "law", None)
    assert (stores.names_for(blocks), stores.names_for(blocks[:1])) == ([], ["redis"])
