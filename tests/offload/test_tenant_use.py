"""The ledger counts what each tenant uses of the tiers below the device."""

from __future__ import annotations

from radixkv.api.statement import Use
from radixkv.cache.tenant_ledger import TenantLedger
from radixkv.namespace import Namespace
from radixkv.offload.index.tier_index import SharedTierIndex, TierIndex, TierShares
from tests.fake_runner import tokens
from tests.fakes import FakeClock
from tests.offload.test_offload import NAMESPACE
from tests.offload.tiered_bench import TieredBench

A, B = Namespace("m", "a"), Namespace("m", "b")


def make_index(ledger: TenantLedger, name: str = "host", **ceilings: float) -> TierIndex:
    """Return the index of a tier of three blocks; `ceilings` are shares of the tier, by tenant."""
    return TierIndex(name, 3, shares_of=lambda tenant: TierShares(ceiling=ceilings.get(tenant)), ledger=ledger)


def test_blocks_use_a_tier_from_their_addition_to_their_removal() -> None:
    clock = FakeClock()
    ledger = TenantLedger(4, clock=clock)
    index = make_index(ledger)
    index.add(b"1", A)
    clock.now_s = 2.0
    index.add(b"2", A)
    index.add(b"3", B)
    clock.now_s = 3.0
    index.note_loaded(b"1")
    index.remove(b"1")
    index.remove(b"1")
    clock.now_s = 10.0
    assert ledger.use_of("a") == Use(host_token_s=4 * (3.0 + 8.0)), "blocks of four tokens, for 3 s and for 8 s"
    assert index.remove_all(B) == [b"3"]
    clock.now_s = 20.0
    assert ledger.use_of("b") == Use(host_token_s=4 * 8.0)


def test_evictions_of_a_tier_are_attributed_to_the_tenant_itself_or_to_others() -> None:
    ledger = TenantLedger(4, clock=FakeClock())
    index = make_index(ledger, a=2 / 3)  # two of the three blocks
    for key, namespace in (b"1", A), (b"2", A), (b"3", A), (b"4", B), (b"5", B):
        index.add(key, namespace)
        index.note_stored(key)
    use = ledger.use_of("a")
    assert (use.host_evicted_by_self_tokens, use.host_evicted_by_others_tokens) == (4, 4)
    assert ledger.use_of("b") == Use()


def test_evictions_of_a_plug_in_store_are_not_counted() -> None:
    clock = FakeClock()
    ledger = TenantLedger(4, clock=clock)
    index = make_index(ledger, "shelf")
    for number in range(5):
        index.add(b"%d" % number, A)
        index.note_stored(b"%d" % number)
    clock.now_s = 1.0
    assert ledger.use_of("a") == Use(remote_token_s=3 * 4 * 1.0), "the three blocks that are left"


def test_the_index_of_a_shared_store_counts_no_evictions() -> None:
    clock = FakeClock()
    ledger = TenantLedger(4, clock=clock)
    index = SharedTierIndex("redis", 2, ledger=ledger)
    for key in (b"1", b"2", b"3"):
        index.add(key, A)
    clock.now_s = 1.0
    assert ledger.use_of("a") == Use(remote_token_s=2 * 4 * 1.0), "the two blocks that the index knows"


def test_loaded_tokens_are_hits_of_their_tier() -> None:
    bench = TieredBench(num_blocks=8, host=100)
    bench.prefill(range(13))
    bench.evict(4)
    bench.prefill(range(13))
    use = bench.ledger.use_of(NAMESPACE.tenant)
    assert (use.computed_tokens, use.host_hit_tokens, use.host_loaded_tokens, use.device_hit_tokens) == (14, 12, 12, 0)


def test_prefetched_tokens_are_loaded_from_a_tier_and_hit_on_the_device() -> None:
    bench = TieredBench(num_blocks=8, redis=100)
    bench.prefill(range(13))
    bench.evict(4)
    assert bench.core._prefetcher is not None
    bench.core._prefetcher.begin(NAMESPACE, tokens(range(12)))
    bench.run()
    bench.prefill(range(13))
    use = bench.ledger.use_of(NAMESPACE.tenant)
    assert (use.remote_loaded_tokens, use.device_hit_tokens, use.remote_hit_tokens) == (12, 12, 0)
