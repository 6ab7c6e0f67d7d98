from radixkv.engine.offload.store_stats import stats_of, stats_of_closed
from radixkv.errors import StoreUnavailable
from radixkv.storage.tiers.tier import Tier
from tests.patience import PATIENCE_S

from .tiered_bench import PAYLOAD_BYTES, SteppedStore, TieredBench


def test_what_a_store_did_not_take_is_refused_whatever_the_reason() -> None:
    bench = TieredBench(num_blocks=12, host=2)
    bench.prefill(range(13))
    (store,) = bench.stores.values()
    store.error = StoreUnavailable("gone")
    bench.evict(12)
    told = stats_of(bench.offload.tiers["host"], 5, 7)
    assert (told.saved_blocks, told.refused_blocks) == (0, 3)
    assert (told.computed_blocks, told.dropped_blocks) == (5, 7)


def test_a_store_that_did_nothing_has_room() -> None:
    store = SteppedStore(3)
    tier = Tier("host", store, PAYLOAD_BYTES)
    told = stats_of(tier, 0, 0)
    assert (told.tier, told.is_working, told.blocks, told.missed_blocks) == ("host", True, 0, 0)
    looking = tier.exists([bytes(32)])
    store.run()
    assert looking.result(PATIENCE_S) == [False]


def test_a_store_that_could_not_be_opened_does_not_work_and_holds_nothing() -> None:
    told = stats_of_closed("disk")
    assert (told.tier, told.is_working, told.blocks, told.capacity_bytes, told.saved_blocks) == ("disk", False, 0, 0, 0)
