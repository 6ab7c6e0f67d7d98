"""Minimum and maximum shares of tenants, and their counters. Blocks have four tokens."""

from __future__ import annotations

import pytest

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.tenants import MAX_IDLE_TENANTS, Quota, RecentTenants, Tenants
from radixkv.errors import OutOfBlocks, QuotaExceeded
from radixkv.namespace import TRIAL_TENANT, Namespace
from tests.fakes import FakeClock, cached, lease_text, publish

ACME, OTHER, THIRD = (Namespace("model", tenant=name) for name in ("acme", "other", "third"))


def make_cache(num_blocks: int, **quotas: Quota) -> PrefixCache:
    return PrefixCache(num_blocks, 4, quotas=quotas, clock=FakeClock())


def test_a_floor_protects_a_tenants_blocks_from_other_tenants() -> None:
    cache = make_cache(8, acme=Quota(floor_blocks=3))
    publish(cache, "aaaabbbbccccddddeeee", ACME)
    publish(cache, "11112222333344445555", OTHER)
    cache.check()
    assert cached(cache, "aaaabbbbccccddddeeee", ACME) == 12, "five blocks were needed, three were free"
    with pytest.raises(
        OutOfBlocks, match=r"expected enough of the pool's 8 .*, got too few; .* floors have the others"
    ):
        lease_text(cache, "111122223333444455556666", THIRD)


def test_a_floor_does_not_protect_a_tenant_from_itself() -> None:
    cache = make_cache(4, acme=Quota(floor_blocks=4))
    publish(cache, "aaaabbbbccccdddd", ACME)
    publish(cache, "1111222233334444", ACME)
    assert cached(cache, "1111222233334444", ACME) == 16


def test_without_quotas_the_oldest_leaf_is_evicted_whatever_its_tenant() -> None:
    cache = make_cache(4)
    publish(cache, "aaaabbbb", ACME)
    publish(cache, "11112222", OTHER)
    publish(cache, "xxxxyyyy", THIRD)
    assert [cached(cache, "aaaabbbb", ACME), cached(cache, "11112222", OTHER)] == [0, 8]


def test_a_tenant_at_its_ceiling_evicts_its_own_blocks_first() -> None:
    cache = make_cache(16, acme=Quota(ceiling_blocks=3))
    publish(cache, "11112222", OTHER)
    publish(cache, "aaaabbbb", ACME)
    publish(cache, "ccccdddd", ACME)
    cache.check()
    assert cached(cache, "11112222", OTHER) == 8, "older, but another tenant's"
    assert cached(cache, "aaaabbbb", ACME) == 4
    assert cached(cache, "ccccdddd", ACME) == 8


def test_beyond_its_ceiling_a_tenant_is_refused_and_nothing_changes() -> None:
    cache = make_cache(16, acme=Quota(ceiling_blocks=3))
    publish(cache, "aaaabbbb", ACME)
    with pytest.raises(QuotaExceeded, match="ceiling of 3"):
        lease_text(cache, "1111222233334444", ACME)
    assert cached(cache, "aaaabbbb", ACME) == 8
    held = lease_text(cache, "xxxxyyyy", ACME)
    with pytest.raises(QuotaExceeded):
        lease_text(cache, "11112222", ACME)
    held.close()
    lease_text(cache, "11112222", ACME).close()
    cache.check()


def test_a_ceiling_does_not_affect_other_tenants() -> None:
    cache = make_cache(8, acme=Quota(ceiling_blocks=1))
    publish(cache, "aaaa", ACME)
    publish(cache, "11112222333344445555666677778888", OTHER)
    assert cached(cache, "11112222333344445555666677778888", OTHER) == 32


def test_usage_is_counted_for_each_tenant() -> None:
    cache = make_cache(8)
    publish(cache, "aaaabbbb", ACME)
    with lease_text(cache, "aaaabbbbcc", ACME) as lease:
        lease.commit(10)
        usage = cache.tenants["acme"]
        assert (usage.num_cached_blocks, usage.num_pinned_blocks, usage.num_leased_blocks) == (3, 3, 0)
        assert (usage.num_hit_tokens, usage.num_miss_tokens) == (8, 8 + 2)
    publish(cache, "1111222233334444555566667777", OTHER)
    usage = cache.tenants["acme"]
    assert (usage.num_cached_blocks, usage.num_evicted_blocks) == (1, 2)
    assert cache.tenants["other"].num_cached_blocks == 7


def test_idle_tenants_are_forgotten_but_not_those_that_have_blocks() -> None:
    tenants = Tenants({"quota": Quota(floor_blocks=1)})
    holder = tenants["holder"]
    holder.num_cached_blocks = 1
    for number in range(MAX_IDLE_TENANTS + 100):
        tenants[f"passer-by {number}"]
    assert len(tenants.items()) <= MAX_IDLE_TENANTS + 2
    assert tenants["holder"] is holder
    assert "quota" in dict(tenants.items())


def test_the_oldest_idle_tenants_are_forgotten_first() -> None:
    recent = RecentTenants[int](is_idle=lambda value: value == 0)
    recent.add("busy", 1)
    for number in range(MAX_IDLE_TENANTS + 10):
        recent.add(str(number), 0)
    assert len(recent) == MAX_IDLE_TENANTS
    assert recent.get("busy") == 1
    assert recent.get("0") is None
    assert recent.pop(str(MAX_IDLE_TENANTS + 9)) == 0


def test_the_number_of_known_tenants_falls_when_they_have_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.cache.tenants.MAX_IDLE_TENANTS", 10)
    tenants = Tenants({})
    crowd = []
    for number in range(100):
        crowd.append(tenants[f"crowd {number}"])
        crowd[-1].num_cached_blocks = 1
    for number in range(200):
        tenants[f"first {number}"]
    assert [tenants.get(f"crowd {number}") for number in range(100)] == crowd
    assert 100 < len(tenants) < 200
    for usage in crowd[1:]:
        usage.num_cached_blocks = 0
    for number in range(300):
        tenants[f"second {number}"]
    assert len(tenants) == 10
    assert tenants.get("crowd 0") is crowd[0]


def test_the_number_of_known_tenants_falls_without_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = Tenants({})
    for number in range(100):
        tenants[str(number)]
    monkeypatch.setattr("radixkv.cache.tenants.MAX_IDLE_TENANTS", 10)
    for _ in range(50):
        tenants["99"]
    assert len(tenants) < 12
    assert tenants.get("99") is not None


def test_a_tenant_that_is_used_again_is_forgotten_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.cache.tenants.MAX_IDLE_TENANTS", 10)
    tenants = Tenants({})
    for number in range(10):
        tenants[str(number)]
    again = tenants["0"]
    tenants["new"]
    assert tenants.get("0") is again
    assert tenants.get("1") is None


def test_a_lookup_does_not_make_a_tenant_known() -> None:
    tenants = Tenants({"quota": Quota(floor_blocks=1)})
    assert tenants.get("acme") is None
    assert len(tenants) == 1
    assert tenants.get("quota") is tenants["quota"]


def test_the_largest_tenants_are_those_with_a_quota_and_those_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.cache.tenants._MAX_COMPARED", 3)
    tenants = Tenants({"quota": Quota()})
    tenants["quota"].num_cached_blocks = 1
    for number in range(6):
        tenants[str(number)].num_cached_blocks = 9 - number
    tenants["0"]
    assert [tenant for tenant, _ in tenants.largest(3)] == ["0", "4", "5"]
    assert [tenant for tenant, _ in tenants.largest(9)] == ["0", "4", "5", "quota"]
    monkeypatch.setattr("radixkv.cache.tenants._MAX_LISTED", 1)
    assert len(tenants.largest(9)) == 1


def test_the_default_quota_does_not_bound_the_trials_of_the_engine() -> None:
    tenants = Tenants({}, Quota(ceiling_blocks=1))
    assert tenants["acme"].quota.ceiling_blocks == 1
    assert tenants[TRIAL_TENANT].quota == tenants.quota_of(TRIAL_TENANT) == Quota()
