from __future__ import annotations

from radixkv.service.fleet.stats_sum import summed
from radixkv.v1.cache_pb2 import (
    BlockStats,
    RequestStats,
    StatsResponse,
    TenantStats,
    TierStats,
    TimeStats,
    TokenStats,
)


def answer(scale: int, **fields) -> StatsResponse:
    return StatsResponse(
        model="m",
        device="cpu",
        epoch=scale,
        uptime_s=10.0 * scale,
        block_size=64,
        blocks=BlockStats(total=100, free=100 - scale, published=scale),
        requests=RequestStats(running=scale),
        tokens=TokenStats(prompt=10 * scale, cached=scale),
        block_bytes=4096,
        known_tenants=scale,
        model_fingerprint="f",
        **fields,
    )


def test_counts_add_up_and_what_is_alike_stays() -> None:
    told = summed([answer(1), answer(2)], 100)
    assert (told.model, told.device, told.block_size, told.block_bytes, told.model_fingerprint) == (
        "m", "cpu", 64, 4096, "f",
    )  # fmt: skip
    assert told.blocks == BlockStats(total=200, free=197, published=3)
    assert (told.requests, told.tokens) == (RequestStats(running=3), TokenStats(prompt=30, cached=3))
    assert (told.epoch, told.uptime_s, told.known_tenants) == (0, 20.0, 2)
    assert not told.HasField("first_tokens")


def test_one_replica_is_its_own_sum_but_for_the_epoch() -> None:
    expected = answer(3, tenants=[TenantStats(tenant="a", cached_blocks=1)], tiers=[TierStats(tier="host", blocks=1)])
    told = summed([expected], 100)
    expected.ClearField("epoch")
    assert told == expected


def test_tenants_and_stores_add_up_by_their_names() -> None:
    first = answer(
        1,
        tenants=[
            TenantStats(tenant="a", cached_blocks=5, ceiling_blocks=9, stored_blocks={"host": 1}),
            TenantStats(tenant="b", cached_blocks=1),
        ],
        tiers=[TierStats(tier="host", is_working=True, blocks=4), TierStats(tier="redis", is_working=True, blocks=1)],
    )
    second = answer(
        2,
        tenants=[
            TenantStats(tenant="b", cached_blocks=7),
            TenantStats(tenant="a", stored_blocks={"host": 2, "disk": 3}),
        ],
        tiers=[TierStats(tier="host", is_working=True, blocks=6), TierStats(tier="redis", loaded_blocks=2)],
    )
    told = summed([first, second], 100)
    by_name = {each.tenant: each for each in told.tenants}
    assert [each.tenant for each in told.tenants] == ["b", "a"]
    assert (by_name["a"].cached_blocks, by_name["a"].HasField("ceiling_blocks")) == (5, False)
    assert dict(by_name["a"].stored_blocks) == {"host": 3, "disk": 3}
    host, redis = told.tiers
    assert (host.tier, host.blocks, host.is_working) == ("host", 10, True)
    assert (redis.is_working, redis.HasField("blocks"), redis.loaded_blocks) == (False, False, 2)
    assert [each.tenant for each in summed([first, second], 1).tenants] == ["b"]


def test_times_add_up_by_their_buckets() -> None:
    times = TimeStats(bounds_s=[1.0, 2.0], counts=[1, 2, 3], sum_s=4.0)
    told = summed([answer(1, first_tokens=times), answer(1, first_tokens=times), answer(1)], 100)
    assert told.first_tokens == TimeStats(bounds_s=[1.0, 2.0], counts=[2, 4, 6], sum_s=8.0)
