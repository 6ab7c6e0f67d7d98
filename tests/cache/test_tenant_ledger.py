"""The ledger of what tenants use, compared with a recount after random events, and who evicted blocks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

from radixkv.api.statement import DAY_S, DayUse, Use
from radixkv.cache import tenant_ledger
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.tenant_ledger import DEVICE, DISK, HOST, REMOTE, TenantLedger, tier_of
from radixkv.cache.tenants import Quota
from radixkv.namespace import OTHER_TENANTS, PUBLIC_TENANT, Namespace
from tests.fakes import FakeClock, publish, spell

BLOCK_SIZE = 4
TOKEN_SECOND_FIELDS = ("device_token_s", "host_token_s", "disk_token_s", "remote_token_s")


def result_of(slices: Generator[None, None, Any]) -> Any:
    """Run all slices, and return the result of the generator."""
    try:
        while True:
            next(slices)
    except StopIteration as stop:
        return stop.value


def make_ledger(clock: FakeClock, day: float = 10.0, **options: Any) -> TenantLedger:
    return TenantLedger(BLOCK_SIZE, clock=clock, unix_time=lambda: day * DAY_S, **options)


def all_uses(ledger: TenantLedger) -> Counter[tuple[int, str]]:
    """Return the token-seconds of all tiers by day and tenant."""
    return Counter(
        {
            (day, tenant): sum(getattr(use, name) for name in TOKEN_SECOND_FIELDS)
            for day, day_use in result_of(ledger.days()).items()
            for tenant, use in day_use.tenants.items()
        }
    )


@pytest.mark.parametrize("seed", range(5))
def test_token_seconds_are_those_of_a_recount_on_each_day(seed: int) -> None:
    dice, clock = random.Random(seed), FakeClock()
    first_day = 10.25
    ledger = make_ledger(clock, first_day)
    blocks: Counter[tuple[str, int]] = Counter()
    expected: dict[tuple[int, str, int], float] = Counter()  # token-seconds by day, tenant and tier
    for _ in range(400):
        passed_s = dice.choice((0.0, 1.5, 3600.0, 1.3 * DAY_S)) * dice.random()
        start_s = clock.now_s + first_day * DAY_S
        end_s = start_s + passed_s
        for day in range(int(start_s // DAY_S), int(end_s // DAY_S) + 1):
            passed_on_day_s = min(end_s, (day + 1) * DAY_S) - max(start_s, day * DAY_S)
            for (tenant, tier), num_blocks in blocks.items():
                expected[day, tenant, tier] += num_blocks * BLOCK_SIZE * passed_on_day_s
        clock.now_s += passed_s
        tenant, tier = dice.choice("abc"), dice.choice((DEVICE, HOST, DISK, REMOTE))
        num_more = dice.randint(-blocks[tenant, tier], 5)
        blocks[tenant, tier] += num_more
        ledger.resize(tenant, tier, num_more)
        if dice.random() < 0.1:
            ledger.use_of(dice.choice("abcd"))  # reading changes nothing
        while len(ledger._closed_days) > 20:
            ledger.forget([min(ledger._closed_days)])
    days = result_of(ledger.days())
    assert len(days) > 15
    for day, day_use in days.items():
        for tenant in "abc":
            use = day_use.tenants.get(tenant, Use())
            for tier, name in enumerate(TOKEN_SECOND_FIELDS):
                assert getattr(use, name) == pytest.approx(expected[day, tenant, tier], rel=1e-9, abs=1e-6)


def test_a_change_updates_one_account_however_many_tenants_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    resized = []
    monkeypatch.setattr(tenant_ledger._Meter, "resize", lambda *arguments: resized.append(arguments))
    ledger = make_ledger(FakeClock())
    for number in range(500):
        ledger.resize(str(number), DEVICE, 1)
    assert len(resized) == 500


def test_tenants_after_the_first_ones_of_a_day_are_accounted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_ledger, "MAX_LISTED_TENANTS", 2)
    clock = FakeClock()
    ledger = make_ledger(clock, tenants=["configured"])
    for tenant in ("a", "b", "c", "d", "configured"):
        ledger.resize(tenant, DEVICE, 1)
    clock.now_s = 10.0
    for tenant in ("a", "c"):
        ledger.resize(tenant, DEVICE, -1)
    ledger.count("c", {"computed_tokens": 7})
    clock.now_s = 15.0
    # A block of four tokens for 10 s or 15 s. The others are `c`, with 40 token-seconds, and `d`, with 60.
    token_s_of_first_day = {"a": 40.0, "b": 60.0, OTHER_TENANTS: 100.0, "configured": 60.0}
    assert {tenant: token_s for (_, tenant), token_s in all_uses(ledger).items()} == token_s_of_first_day
    assert ledger.use_of(OTHER_TENANTS).computed_tokens == 7
    assert ledger.use_of("c") == Use()  # the share of `c` in the sum is not reported either
    clock.now_s = DAY_S + 5.0  # `a` has no blocks, so there is room for an account of `d`
    ledger.resize("d", DEVICE, -1)
    uses = all_uses(ledger)
    assert (uses[11, "d"], uses[11, OTHER_TENANTS], uses[11, "b"]) == (20.0, 0.0, 20.0)
    # Two blocks for the first 10 s, and three for a day and another 5 s; `a` and `c` released theirs after 10 s.
    assert sum(uses.values()) == 4 * (2 * 10 + 3 * DAY_S + 3 * 5)
    assert not ledger._unlisted


def test_a_tenant_that_is_accounted_with_others_stays_there_until_it_has_no_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tenant_ledger, "MAX_LISTED_TENANTS", 1)
    clock = FakeClock()
    ledger = make_ledger(clock)
    ledger.resize("a", DEVICE, 1)
    ledger.resize("b", HOST, 1)
    monkeypatch.setattr(tenant_ledger, "MAX_LISTED_TENANTS", 2)
    ledger.resize("b", HOST, 1)
    clock.now_s = 1.0
    assert ledger.use_of(OTHER_TENANTS).host_token_s == 8.0
    ledger.resize("b", HOST, -2)
    ledger.resize("b", HOST, 3)
    clock.now_s = 2.0
    assert (ledger.use_of(OTHER_TENANTS).host_token_s, ledger.use_of("b").host_token_s) == (8.0, 12.0)


def test_the_number_of_accounts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_ledger, "MAX_LISTED_TENANTS", 3)
    ledger = make_ledger(FakeClock())
    for number in range(100):
        ledger.resize(str(number), DEVICE, 1)
        ledger.resize(str(number), DEVICE, -1)
    assert (len(ledger._meters), len(ledger._unlisted)) == (5, 0)


def test_a_day_that_an_earlier_process_recorded_is_continued() -> None:
    clock = FakeClock(100.0)
    recorded = {"a": Use(requests=3, device_token_s=5.0)}
    ledger = make_ledger(clock, 10.5, read_day=lambda day: DayUse(500.0, recorded) if day == 10 else None)
    ledger.resize("a", DEVICE, 2)
    ledger.count("a", {"requests": 1})
    clock.now_s += 10.0
    assert result_of(ledger.days()) == {10: DayUse(510.0, {"a": Use(requests=4, device_token_s=85.0)})}
    clock.now_s += DAY_S
    assert result_of(ledger.days())[11].tenants["a"].requests == 0


def test_a_reader_gets_only_its_own_tenant() -> None:
    clock = FakeClock()
    ledger = make_ledger(clock)
    ledger.count("a", {"requests": 1})
    ledger.count("b", {"requests": 1})
    clock.now_s = DAY_S
    ledger.count("b", {"requests": 2})
    days = result_of(ledger.days("a"))
    assert {day: dict(use.tenants) for day, use in days.items()} == {10: {"a": Use(requests=1)}, 11: {}}


def test_a_day_that_ends_while_it_is_read_is_not_returned_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_ledger, "_TENANTS_IN_SLICE", 1)
    clock = FakeClock()
    ledger = make_ledger(clock)
    ledger.count("a", {"requests": 1})
    reading = ledger.days()
    next(reading)
    clock.now_s = DAY_S
    assert {day: dict(use.tenants) for day, use in result_of(reading).items()} == {10: {"a": Use(requests=1)}}


def test_the_tenants_of_a_slice_are_read_at_one_time() -> None:
    clock = FakeClock()
    ledger = make_ledger(clock)
    for tenant in "abc":
        ledger.resize(tenant, DEVICE, 1)
    times_s = iter(number * DAY_S / 4 for number in range(1, 100))  # each look at the clock takes a quarter of a day
    ledger._clock = lambda: next(times_s)
    (day_use,) = result_of(ledger.days()).values()
    assert day_use.covered_s == DAY_S / 4
    assert [use.device_token_s for use in day_use.tenants.values()] == 3 * [BLOCK_SIZE * DAY_S / 4]


def test_at_most_31_closed_days_are_kept_until_they_are_saved() -> None:
    clock = FakeClock()
    ledger = make_ledger(clock)
    ledger.resize("a", DEVICE, 1)
    clock.now_s = 40 * DAY_S
    assert min(result_of(ledger.days())) == 10 + 40 - 31
    ledger.forget(range(50))
    assert set(result_of(ledger.days())) == {50}


def test_stores_count_as_host_disk_or_remote() -> None:
    assert [tier_of(name) for name in ("host", "disk", "redis", "mooncake", "shelf")] == [HOST, DISK, *[REMOTE] * 3]


class TestCauses:
    """Whether a tenant itself or others evicted its blocks."""

    def make_cache(self, clock: FakeClock, **quotas: Quota) -> PrefixCache:
        return PrefixCache(8, BLOCK_SIZE, clock=clock, quotas=quotas, ledger=make_ledger(clock))

    def evicted_tokens(self, cache: PrefixCache, tenant: str) -> tuple[int, int]:
        """Return how many tokens of a tenant were evicted by itself, and how many by others."""
        assert cache.ledger is not None
        use = cache.ledger.use_of(tenant)
        return use.device_evicted_by_self_tokens, use.device_evicted_by_others_tokens

    def test_blocks_that_make_room_for_another_tenant_are_evicted_by_others(self) -> None:
        cache = self.make_cache(FakeClock())
        publish(cache, "aaaabbbbcccc", Namespace("m", "a"))
        publish(cache, "x" * 24, Namespace("m", "b"))
        assert (self.evicted_tokens(cache, "a"), self.evicted_tokens(cache, "b")) == ((0, 4), (0, 0))

    def test_blocks_of_a_tenant_at_its_ceiling_are_evicted_by_itself(self) -> None:
        cache = self.make_cache(FakeClock(), a=Quota(ceiling_blocks=3))
        publish(cache, "aaaabbbbcccc", Namespace("m", "a"))
        publish(cache, "ddddeeee", Namespace("m", "a"))
        assert self.evicted_tokens(cache, "a") == (8, 0)

    def test_blocks_that_the_server_evicts_without_a_request_are_evicted_by_others(self) -> None:
        cache = self.make_cache(FakeClock())
        publish(cache, "aaaabbbb", Namespace("m", "a"))
        cache.evict(1)
        assert self.evicted_tokens(cache, "a") == (0, 4)

    def test_blocks_that_a_tenant_drops_are_evicted_by_itself(self) -> None:
        cache = self.make_cache(FakeClock())
        publish(cache, "aaaabbbb", Namespace("m", "a"))
        cache.drop(Namespace("m", "a"), spell("aaaabbbb"), evicts=True)
        assert self.evicted_tokens(cache, "a") == (8, 0)


@pytest.mark.parametrize("evicts", [True, False])
def test_blocks_count_until_they_are_evicted_or_purged(*, evicts: bool) -> None:
    clock = FakeClock()
    ledger = make_ledger(clock)
    cache = PrefixCache(8, BLOCK_SIZE, clock=clock, ledger=ledger)
    publish(cache, "aaaabbbbcc", Namespace("m", "a"))
    clock.now_s = 2.0
    if evicts:
        cache.evict(2)
    else:
        cache.purge(tenant="a")
    clock.now_s = 3.0
    # Three blocks of four tokens for two seconds, although the last one is filled in part. An eviction of two blocks
    # leaves one for another second.
    assert ledger.use_of("a").device_token_s == 2 * 12 + 1 * 4 * evicts


def test_blocks_of_a_purged_prompt_count_while_a_request_uses_them() -> None:
    clock = FakeClock()
    ledger = make_ledger(clock)
    cache = PrefixCache(8, BLOCK_SIZE, clock=clock, ledger=ledger)
    with cache.lease(Namespace("m", "a"), spell("aaaabbbb")) as lease:
        lease.commit(8)
        cache.purge(tenant="a")
        clock.now_s = 1.0
    clock.now_s = 2.0
    assert ledger.use_of("a").device_token_s == 8


def test_blocks_of_public_prefixes_count_for_no_tenant() -> None:
    clock = FakeClock()
    ledger = make_ledger(clock)
    cache = PrefixCache(16, BLOCK_SIZE, clock=clock, ledger=ledger)
    prefix = cache.public.register("head", "m", "", spell("aaaabbbb"))
    with cache.lease(prefix.namespace, spell("aaaabbbb")) as lease:
        lease.commit(8)
    cache.public.activate(prefix)
    with cache.lease(Namespace("m", "a"), spell("aaaabbbbcccc")):
        clock.now_s = 1.0
    assert (ledger.use_of(PUBLIC_TENANT).device_token_s, ledger.use_of("a").device_token_s) == (8.0, 4.0)
