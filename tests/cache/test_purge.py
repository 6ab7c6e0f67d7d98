"""Forgetting whole namespaces, also while requests use them. Blocks are four tokens."""

from __future__ import annotations

import pytest

from radixkv.api.retention import Retention
from radixkv.cache.prefix_cache import PrefixCache, Purged
from radixkv.namespace import Namespace
from tests.fakes import FakeClock, cached, lease_text, publish, spell

PLAIN = Namespace("model")
TENANT = Namespace("model", "acme")
ADAPTER = Namespace("model", "acme", "lora")
SALT = Namespace("model", "acme", "lora", "salt")
ALL = (PLAIN, TENANT, ADAPTER, SALT)


def make_cache() -> PrefixCache:
    cache = PrefixCache(64, 4, clock=FakeClock())
    for namespace in ALL:
        publish(cache, "aaaabbbbcc", namespace)
        publish(cache, "aaaaXXXX", namespace)
    return cache


def left(cache: PrefixCache) -> set[Namespace]:
    cache.check()
    return {namespace for namespace in ALL if cached(cache, "aaaabbbbcc", namespace)}


@pytest.mark.parametrize(
    ("wanted", "gone"),
    [
        ({}, set(ALL)),
        ({"tenant": "acme"}, {TENANT, ADAPTER, SALT}),
        ({"tenant": "acme", "adapter": ""}, {TENANT}),
        ({"adapter": "lora"}, {ADAPTER, SALT}),
        ({"salt": ""}, {PLAIN, TENANT, ADAPTER}),
        ({"tenant": "acme", "adapter": "lora", "salt": "salt"}, {SALT}),
        ({"tenant": "nobody"}, set()),
    ],
)
def test_what_is_named_is_gone_and_nothing_else(wanted: dict[str, str], gone: set[Namespace]) -> None:
    cache = make_cache()
    assert cache.purge(**wanted) == Purged(4 * len(gone), 0)
    assert left(cache) == set(ALL) - gone
    assert cache.pool.num_free == 64 - 4 * (len(ALL) - len(gone))
    assert cache.tenants["acme"].num_cached_blocks == 4 * len({TENANT, ADAPTER, SALT} - gone)


def test_a_request_in_flight_keeps_its_blocks_and_publishes_nothing_more() -> None:
    cache = make_cache()
    lease = lease_text(cache, "aaaabbbbccDD", TENANT)
    reused = lease.block_ids[:2].tolist()
    assert cache.purge(tenant="acme", adapter="") == Purged(1, 3)
    assert left(cache) == set(ALL) - {TENANT}
    assert lease.commit(12) == 0
    assert left(cache) == set(ALL) - {TENANT}
    taken = cache.pool.acquire(cache.pool.num_free)
    assert set(reused).isdisjoint(taken.tolist())
    cache.pool.release(taken)
    lease.close()
    cache.check()
    assert cache.pool.num_leased == cache.num_pinned_blocks == 0


def test_a_request_that_had_found_nothing_publishes_nothing_either() -> None:
    cache = make_cache()
    with lease_text(cache, "ZZZZ", TENANT) as lease:
        cache.purge(tenant="acme")
        assert lease.commit(4) == 0
    cache.check()
    assert cached(cache, "ZZZZ", TENANT) == 0


def test_a_purged_namespace_can_be_filled_again_while_old_requests_run() -> None:
    cache = make_cache()
    with lease_text(cache, "aaaabbbbccD", TENANT) as old, lease_text(cache, "aaaaXXXXY", TENANT):
        cache.purge(tenant="acme")
        blocks = publish(cache, "aaaabbbbcc", TENANT)
        assert set(blocks).isdisjoint(old.block_ids.tolist())
        cache.check()
        assert cached(cache, "aaaabbbbcc", TENANT) == 10
    cache.check()
    assert cached(cache, "aaaabbbbcc", TENANT) == 10


def test_a_block_replaced_under_a_lease_is_freed_once() -> None:
    cache = make_cache()
    with lease_text(cache, "aaaabbbbccY", TENANT):
        with lease_text(cache, "aaaabbbbccdd", TENANT) as grown:
            grown.commit(12)
        cache.purge(tenant="acme")
        cache.check()
    cache.check()
    assert cache.pool.num_leased == 0


def test_retained_blocks_go_as_well_and_give_their_budget_back() -> None:
    cache = make_cache()
    cache.retain(TENANT, spell("aaaabbbbcc"), Retention(90, ttl_s=60))
    cache.retain(PLAIN, spell("aaaa"), Retention(90))
    assert cache.num_retained_blocks == 4
    cache.purge(tenant="acme")
    cache.check()
    assert cache.num_retained_blocks == 1
