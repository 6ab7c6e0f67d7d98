from __future__ import annotations

import math
import random

import pytest

from radixkv.api.retention import DEFAULT_PRIORITY
from radixkv.namespace import Namespace
from radixkv.offload.index.tier_index import SharedTierIndex, TierIndex, TierShares

ACME = Namespace("model", "acme")
OTHER = Namespace("model", "other")


def index_of(*keys: bytes, num_blocks: int = 3) -> TierIndex:
    tier_index = TierIndex("host", num_blocks)
    for key in keys:
        assert tier_index.add(key, ACME) is None
    return tier_index


def test_the_block_that_left_the_device_first_is_evicted_first() -> None:
    tier_index = index_of(b"a", b"b", b"c")
    assert tier_index.add(b"d", ACME) == b"a"
    assert list(tier_index) == [b"b", b"c", b"d"]
    assert b"a" not in tier_index


def test_a_block_that_leaves_the_device_again_is_evicted_last() -> None:
    tier_index = index_of(b"a", b"b", b"c")
    tier_index.note_evicted(b"a")
    assert tier_index.add(b"d", ACME) == b"b"


def test_blocks_that_are_also_on_the_device_are_evicted_first() -> None:
    tier_index = index_of(b"a", b"b", b"c")
    tier_index.note_loaded(b"c")
    tier_index.note_loaded(b"b")
    assert list(tier_index) == [b"c", b"b", b"a"]
    assert tier_index.add(b"d", ACME) == b"c"


def test_a_block_that_left_the_device_again_is_not_evicted_first() -> None:
    tier_index = index_of(b"a", b"b", b"c")
    tier_index.note_loaded(b"c")
    tier_index.note_evicted(b"c")
    assert list(tier_index) == [b"a", b"b", b"c"]


def test_blocks_of_an_earlier_process_are_evicted_before_those_of_this_one() -> None:
    tier_index = index_of(b"new", num_blocks=4)
    assert tier_index.add_found([(b"old", OTHER), (b"new", OTHER)]) == []
    assert tier_index.add_found([(b"older", OTHER), (b"oldest", OTHER)]) == []
    assert list(tier_index) == [b"oldest", b"older", b"old", b"new"]
    assert tier_index.remove_all(ACME) == [b"new"]


def test_of_too_many_found_blocks_the_most_recent_are_kept() -> None:
    tier_index = index_of(b"new", num_blocks=2)
    assert tier_index.add_found([(b"old", OTHER), (b"older", OTHER)]) == [b"older"]
    assert list(tier_index) == [b"old", b"new"]


def test_a_namespace_is_forgotten_as_a_whole() -> None:
    tier_index = index_of(b"a", b"b")
    tier_index.add(b"c", OTHER)
    assert sorted(tier_index.remove_all(ACME)) == [b"a", b"b"]
    assert list(tier_index.owned) == [OTHER]
    assert tier_index.remove_all(ACME) == []
    assert list(tier_index) == [b"c"]


def test_a_store_may_hold_an_earlier_object_of_a_block_that_is_written_again() -> None:
    tier_index = TierIndex("host", 4)
    tier_index.add(b"a", ACME)
    assert not tier_index.may_have(b"a"), "it is being saved"
    tier_index.note_stored(b"a")
    assert tier_index.may_have(b"a")
    tier_index.begin_rewrite(b"a")
    assert (tier_index.holds(b"a"), tier_index.may_have(b"a")) == (False, True)
    tier_index.remove(b"a")
    tier_index.add(b"a", ACME)
    assert not tier_index.may_have(b"a")


def test_forgetting_an_absent_block_has_no_effect() -> None:
    tier_index = index_of(b"a")
    tier_index.remove(b"b")
    tier_index.remove(b"a")
    assert len(tier_index) == 0
    assert list(tier_index.owned) == []


def test_a_tenant_at_its_ceiling_evicts_its_own_blocks() -> None:
    tier_index = TierIndex("host", 6, shares_of=lambda tenant: TierShares(ceiling=0.5 if tenant == "acme" else None))
    for key in (b"o", b"p"):
        tier_index.add(key, OTHER)
    assert [tier_index.add(key, ACME) for key in (b"a", b"b", b"c")] == [None] * 3
    tier_index.note_loaded(b"b")
    assert tier_index.add(b"d", ACME) == b"b", "the block that is on the device as well"
    assert tier_index.add(b"e", ACME) == b"a"
    assert tier_index.owned.num_by_tenant == {"acme": 3, "other": 2}
    assert tier_index.add(b"q", OTHER) is None
    assert tier_index.add(b"r", OTHER) == b"o", "a tenant without a ceiling evicts the oldest block of all"
    tier_index.remove_all(ACME)
    assert tier_index.owned.num_by_tenant == {"other": 3}


def test_a_tenant_gets_no_more_blocks_of_an_earlier_process_than_its_ceiling() -> None:
    tier_index = TierIndex("disk", 4, shares_of=lambda tenant: TierShares(ceiling=0.5))
    assert tier_index.add_found([(b"o", OTHER), (b"c", ACME), (b"b", ACME), (b"a", ACME)]) == [b"a"]
    assert list(tier_index) == [b"b", b"c", b"o"]
    assert tier_index.add(b"d", ACME) == b"b"


def test_a_share_of_less_than_a_block_is_a_block() -> None:
    tier_index = TierIndex("host", 4, shares_of=lambda tenant: TierShares(ceiling=0.1))
    assert [tier_index.add(key, ACME) for key in (b"a", b"b")] == [None, b"a"]


def test_high_priorities_are_evicted_last_and_low_ones_first() -> None:
    tier_index = TierIndex("host", 4)
    for key, priority in ((b"kept", 90), (b"low", 20), (b"a", 50), (b"b", 50)):
        tier_index.add(key, ACME, priority)
    assert list(tier_index) == [b"low", b"a", b"b", b"kept"]
    assert [tier_index.add(key, ACME) for key in (b"c", b"d", b"e", b"f")] == [b"low", b"a", b"b", b"c"]
    assert b"kept" in tier_index


def test_no_block_is_evicted_for_one_of_lower_priority() -> None:
    tier_index = TierIndex("host", 1)
    tier_index.add(b"a", ACME)
    assert not tier_index.has_room_for("acme", 49)
    assert tier_index.has_room_for("acme", 50)
    tier_index.note_evicted(b"a", 90)
    assert not tier_index.has_room_for("acme", 50)
    assert tier_index.has_room_for("acme", 90)


def test_retained_blocks_are_limited_to_a_share_of_the_tier() -> None:
    tier_index = TierIndex("host", 4, retained_share=0.5)
    for key in (b"a", b"b", b"c"):
        tier_index.add(key, ACME, 90)
    assert list(tier_index) == [b"a", b"b", b"c"]
    assert [tier_index.priority_of(key) for key in (b"a", b"b", b"c")] == [50, 90, 90], "the oldest has the default"
    tier_index.add(b"d", ACME, 80)
    assert tier_index.priority_of(b"d") == 50, "the retained ones have a higher priority"
    tier_index.remove(b"b")
    tier_index.note_evicted(b"d", 80)
    assert tier_index.priority_of(b"d") == 80


def test_a_tenant_without_retained_blocks_takes_no_share_of_another() -> None:
    tier_index = TierIndex("host", 4, retained_share=0.25)
    tier_index.add(b"a", ACME, 90)
    tier_index.add(b"o", OTHER, 95)
    assert [tier_index.priority_of(key) for key in (b"a", b"o")] == [90, 50]


def test_retained_blocks_of_a_tenant_are_limited_to_its_share() -> None:
    tier_index = TierIndex("host", 4, shares_of=lambda tenant: TierShares(retained=0.25 if tenant == "acme" else 1.0))
    for key, namespace in ((b"a", ACME), (b"b", ACME), (b"c", OTHER)):
        tier_index.add(key, namespace, 90)
    assert [tier_index.priority_of(key) for key in (b"a", b"b", b"c")] == [50, 90, 90]
    tier_index.note_loaded(b"b")
    tier_index.note_evicted(b"a", 90)
    assert tier_index.priority_of(b"a") == 90, "blocks that are also on the device do not count"


def index_with_floor() -> TierIndex:
    """Return a full index of four blocks: acme, whose floor is two blocks, has the three oldest ones."""
    tier_index = TierIndex("host", 4, shares_of=lambda tenant: TierShares(floor=0.5 if tenant == "acme" else 0.0))
    for key in (b"a", b"b", b"c"):
        tier_index.add(key, ACME)
    tier_index.add(b"o", OTHER)
    return tier_index


def test_others_take_what_a_tenant_has_above_its_floor_and_no_more() -> None:
    tier_index = index_with_floor()
    assert list(tier_index) == [b"a", b"b", b"c", b"o"]
    assert [tier_index.add(key, OTHER) for key in (b"p", b"q", b"r")] == [b"a", b"o", b"p"]
    assert tier_index.owned.num_by_tenant == {"acme": 2, "other": 2}


def test_a_tenant_below_its_floor_takes_from_others_and_else_the_oldest_of_all() -> None:
    tier_index = index_with_floor()
    tier_index.remove(b"a")
    tier_index.remove(b"b")
    tier_index.add(b"p", OTHER)
    tier_index.add(b"q", OTHER)
    assert tier_index.add(b"d", ACME) == b"c", "its own was the oldest of all"
    assert tier_index.add(b"e", ACME) == b"o"
    assert tier_index.owned.num_by_tenant == {"acme": 2, "other": 2}


def test_floors_that_cover_the_tier_leave_no_space_to_others() -> None:
    tier_index = TierIndex("host", 2, shares_of=lambda tenant: TierShares(floor=1.0 if tenant == "acme" else 0.0))
    for key in (b"a", b"b"):
        tier_index.add(key, ACME)
    assert not tier_index.has_room_for("other")
    assert tier_index.add(b"c", ACME) == b"a"
    tier_index.remove_all(ACME)
    assert tier_index.add(b"o", OTHER) is None


def test_a_page_reports_the_retained_blocks_of_each_namespace() -> None:
    tier_index = index_of(b"a", num_blocks=9)
    for key, namespace, priority in ((b"b", ACME, 90), (b"c", ACME, 60), (b"d", ACME, 50), (b"e", OTHER, 51)):
        tier_index.add(key, namespace, priority)
    assert [(each.num_blocks, each.num_retained_blocks) for each in tier_index.page(0, None, 9).namespaces] == [
        (4, 2),
        (1, 1),
    ]
    tier_index.note_loaded(b"b")
    tier_index.remove(b"e")
    assert [(each.num_blocks, each.num_retained_blocks) for each in tier_index.page(0, None, 9).namespaces] == [(4, 1)]


WALK_SHARES = {
    "free": TierShares(),
    "floored": TierShares(floor=0.4),
    "capped": TierShares(ceiling=0.3, retained=0.2),
    "both": TierShares(floor=0.2, ceiling=0.5),
}


def victim_for(tier_index: TierIndex, tenant: str) -> bytes | None:
    """Return the victim for a block of a tenant, by brute force.

    Returns:
        The key of the victim; None if there is room, and an empty key if no block may be evicted.
    """
    counts = tier_index.owned.num_by_tenant
    shares = WALK_SHARES[tenant]
    is_at_ceiling = shares.ceiling is not None and counts[tenant] >= shares.ceiling * tier_index.num_blocks
    if not is_at_ceiling and len(tier_index) < tier_index.num_blocks:
        return None
    if is_at_ceiling:
        owners = {tenant}
    else:
        at_floor = {
            name
            for name, other_shares in WALK_SHARES.items()
            if other_shares.floor and counts[name] <= other_shares.floor * tier_index.num_blocks
        }
        owners = set(WALK_SHARES) - (at_floor - {tenant})
    return next((key for key in tier_index if tier_index.owned[key].tenant in owners), b"")


def assert_retained_blocks_are_bounded(tier_index: TierIndex) -> None:
    """Count the retained blocks, and compare their numbers with the counters of the index and with the bounds."""
    retained = [
        key for key in tier_index if not tier_index.is_on_device(key) and tier_index.priority_of(key) > DEFAULT_PRIORITY
    ]
    assert {each.namespace.tenant: each.num_retained_blocks for each in tier_index.page(0, None, 9).namespaces} == {
        tenant: sum(tier_index.owned[key].tenant == tenant for key in retained)
        for tenant in tier_index.owned.num_by_tenant
    }
    assert len(retained) <= math.ceil(tier_index.retained_share * tier_index.num_blocks)
    for tenant, shares in WALK_SHARES.items():
        max_retained = math.ceil(shares.retained * tier_index.num_blocks)
        assert sum(tier_index.owned[key].tenant == tenant for key in retained) <= max_retained


@pytest.mark.parametrize("seed", range(10))
def test_a_random_walk_evicts_only_allowed_victims(seed: int) -> None:
    rng = random.Random(seed)
    tier_index = TierIndex("host", 10, shares_of=WALK_SHARES.__getitem__, retained_share=0.5)
    num_victims = num_not_added = 0
    for number in range(400):
        tenant = rng.choice(list(WALK_SHARES))
        priority = rng.choice([20, 50, 50, 50, 70, 90])
        keys_before = list(tier_index)
        choice = rng.random()
        if choice < 0.7:
            key = number.to_bytes(2, "big")
            victim = victim_for(tier_index, tenant)
            if victim:
                may_be_added = tier_index.is_on_device(victim) or tier_index.priority_of(victim) <= priority
            else:
                may_be_added = victim is None
            assert tier_index.has_room_for(tenant, priority) == may_be_added
            if may_be_added:
                assert tier_index.add(key, Namespace("model", tenant), priority) == victim
                assert set(tier_index) == {*keys_before, key} - {victim}
            num_victims += may_be_added and victim is not None
            num_not_added += not may_be_added
        elif keys_before and choice < 0.8:
            tier_index.note_loaded(rng.choice(keys_before))
        elif keys_before and choice < 0.9:
            tier_index.note_evicted(rng.choice(keys_before), priority)
        elif keys_before:
            tier_index.remove(rng.choice(keys_before))
        assert_retained_blocks_are_bounded(tier_index)
    assert num_victims
    assert num_not_added


def test_a_block_that_is_written_again_cannot_be_loaded_meanwhile() -> None:
    tier_index = index_of(b"a")
    tier_index.note_stored(b"a")
    tier_index.partless.add(b"a")
    tier_index.begin_rewrite(b"a")
    assert not tier_index.holds(b"a")
    assert b"a" in tier_index
    tier_index.note_stored(b"a")
    assert tier_index.holds(b"a")
    assert tier_index.partless == set()


def test_the_index_of_a_shared_store_forgets_the_least_recently_used() -> None:
    tier_index = SharedTierIndex("redis", 2)
    for key in (b"a", b"b"):
        assert tier_index.add(key, ACME) is None
    tier_index.note_evicted(b"a")
    assert tier_index.add(b"c", ACME) is None, "a shared store evicts by itself"
    assert [key in tier_index for key in (b"a", b"b", b"c")] == [True, False, True]
