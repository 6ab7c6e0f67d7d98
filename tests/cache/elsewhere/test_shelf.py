from __future__ import annotations

import math
import random

import pytest

from radixkv.api.retention import DEFAULT_PRIORITY
from radixkv.cache.elsewhere.shelf import Shares, Shelf
from radixkv.namespace import Namespace

ACME, OTHER = Namespace("model", "acme"), Namespace("model", "other")


def shelf_of(*keys: bytes, num_blocks: int = 3) -> Shelf:
    shelf = Shelf("host", num_blocks)
    for key in keys:
        assert shelf.add(key, ACME) is None
    return shelf


def test_what_left_the_device_longest_ago_goes_first() -> None:
    shelf = shelf_of(b"a", b"b", b"c")
    assert shelf.add(b"d", ACME) == b"a"
    assert list(shelf) == [b"b", b"c", b"d"]
    assert b"a" not in shelf


def test_what_leaves_again_goes_last() -> None:
    shelf = shelf_of(b"a", b"b", b"c")
    shelf.note_left(b"a")
    assert shelf.add(b"d", ACME) == b"b"


def test_what_is_on_the_device_as_well_goes_before_all_else() -> None:
    shelf = shelf_of(b"a", b"b", b"c")
    shelf.note_loaded(b"c")
    shelf.note_loaded(b"b")
    assert list(shelf) == [b"c", b"b", b"a"]
    assert shelf.add(b"d", ACME) == b"c"


def test_what_left_the_device_again_is_no_spare() -> None:
    shelf = shelf_of(b"a", b"b", b"c")
    shelf.note_loaded(b"c")
    shelf.note_left(b"c")
    assert list(shelf) == [b"a", b"b", b"c"]


def test_blocks_of_an_earlier_process_go_before_those_of_this_one() -> None:
    shelf = shelf_of(b"new", num_blocks=4)
    assert shelf.add_found([(b"old", OTHER), (b"new", OTHER)]) == []
    assert shelf.add_found([(b"older", OTHER), (b"oldest", OTHER)]) == []
    assert list(shelf) == [b"oldest", b"older", b"old", b"new"]
    assert shelf.remove_all(ACME) == [b"new"]


def test_of_too_many_found_blocks_those_that_go_last_are_kept() -> None:
    shelf = shelf_of(b"new", num_blocks=2)
    assert shelf.add_found([(b"old", OTHER), (b"older", OTHER)]) == [b"older"]
    assert list(shelf) == [b"old", b"new"]


def test_a_namespace_is_forgotten_as_a_whole() -> None:
    shelf = shelf_of(b"a", b"b")
    shelf.add(b"c", OTHER)
    assert sorted(shelf.remove_all(ACME)) == [b"a", b"b"]
    assert list(shelf.owned) == [OTHER]
    assert shelf.remove_all(ACME) == []
    assert list(shelf) == [b"c"]


def test_a_store_may_have_an_earlier_object_of_what_is_written_once_more() -> None:
    shelf = Shelf("host", 4)
    shelf.add(b"a", ACME)
    assert not shelf.may_have(b"a"), "it is on its way"
    shelf.note_stored(b"a")
    assert shelf.may_have(b"a")
    shelf.expect(b"a")
    assert (shelf.holds(b"a"), shelf.may_have(b"a")) == (False, True)
    shelf.remove(b"a")
    shelf.add(b"a", ACME)
    assert not shelf.may_have(b"a")


def test_what_is_not_there_is_forgotten_without_effect() -> None:
    shelf = shelf_of(b"a")
    shelf.remove(b"b")
    shelf.remove(b"a")
    assert len(shelf) == 0
    assert list(shelf.owned) == []


def test_a_tenant_with_its_share_gives_up_its_own() -> None:
    shelf = Shelf("host", 6)
    shelf.shares_of = lambda tenant: Shares(ceiling=0.5 if tenant == "acme" else None)
    for key in (b"o", b"p"):
        shelf.add(key, OTHER)
    assert [shelf.add(key, ACME) for key in (b"a", b"b", b"c")] == [None] * 3
    shelf.note_loaded(b"b")
    assert shelf.add(b"d", ACME) == b"b", "it is on the device as well"
    assert shelf.add(b"e", ACME) == b"a"
    assert shelf.owned.num_by_tenant == {"acme": 3, "other": 2}
    assert shelf.add(b"q", OTHER) is None
    assert shelf.add(b"r", OTHER) == b"o", "without a share the oldest of all goes"
    shelf.remove_all(ACME)
    assert shelf.owned.num_by_tenant == {"other": 3}


def test_of_an_earlier_process_a_tenant_gets_no_more_than_its_share() -> None:
    shelf = Shelf("disk", 4)
    shelf.shares_of = lambda tenant: Shares(ceiling=0.5)
    assert shelf.add_found([(b"o", OTHER), (b"c", ACME), (b"b", ACME), (b"a", ACME)]) == [b"a"]
    assert list(shelf) == [b"b", b"c", b"o"]
    assert shelf.add(b"d", ACME) == b"b"


def test_a_share_of_less_than_a_block_is_a_block() -> None:
    shelf = Shelf("host", 4)
    shelf.shares_of = lambda tenant: Shares(ceiling=0.1)
    assert [shelf.add(key, ACME) for key in (b"a", b"b")] == [None, b"a"]


def test_what_callers_asked_to_keep_goes_last_and_what_they_need_less_first() -> None:
    shelf = Shelf("host", 4)
    for key, priority in ((b"kept", 90), (b"low", 20), (b"a", 50), (b"b", 50)):
        shelf.add(key, ACME, priority)
    assert list(shelf) == [b"low", b"a", b"b", b"kept"]
    assert [shelf.add(key, ACME) for key in (b"c", b"d", b"e", b"f")] == [b"low", b"a", b"b", b"c"]
    assert b"kept" in shelf


def test_nothing_goes_for_what_is_worth_less() -> None:
    shelf = Shelf("host", 1)
    shelf.add(b"a", ACME)
    assert not shelf.has_room_for("acme", 49)
    assert shelf.has_room_for("acme", 50)
    shelf.note_left(b"a", 90)
    assert not shelf.has_room_for("acme", 50)
    assert shelf.has_room_for("acme", 90)


def test_no_more_may_be_kept_than_a_part_of_the_room() -> None:
    shelf = Shelf("host", 4)
    shelf.retained_share = 0.5
    for key in (b"a", b"b", b"c"):
        shelf.add(key, ACME, 90)
    assert list(shelf) == [b"a", b"b", b"c"]
    assert [shelf.priority_of(key) for key in (b"a", b"b", b"c")] == [50, 90, 90], "the oldest has the default"
    shelf.add(b"d", ACME, 80)
    assert shelf.priority_of(b"d") == 50, "those that are there have more"
    shelf.remove(b"b")
    shelf.note_left(b"d", 80)
    assert shelf.priority_of(b"d") == 80


def test_a_tenant_without_kept_blocks_takes_no_place_of_another() -> None:
    shelf = Shelf("host", 4)
    shelf.retained_share = 0.25
    shelf.add(b"a", ACME, 90)
    shelf.add(b"o", OTHER, 95)
    assert [shelf.priority_of(key) for key in (b"a", b"o")] == [90, 50]


def test_no_more_of_a_tenant_may_be_kept_than_its_part() -> None:
    shelf = Shelf("host", 4)
    shelf.shares_of = lambda tenant: Shares(retained=0.25 if tenant == "acme" else 1.0)
    for key, namespace in ((b"a", ACME), (b"b", ACME), (b"c", OTHER)):
        shelf.add(key, namespace, 90)
    assert [shelf.priority_of(key) for key in (b"a", b"b", b"c")] == [50, 90, 90]
    shelf.note_loaded(b"b")
    shelf.note_left(b"a", 90)
    assert shelf.priority_of(b"a") == 90, "what is on the device is not counted here"


def floored() -> Shelf:
    """Room for four blocks, half of it acme's; acme has three, the oldest ones."""
    shelf = Shelf("host", 4)
    shelf.shares_of = lambda tenant: Shares(floor=0.5 if tenant == "acme" else 0.0)
    for key in (b"a", b"b", b"c"):
        shelf.add(key, ACME)
    shelf.add(b"o", OTHER)
    return shelf


def test_others_take_what_a_tenant_has_above_its_floor_and_no_more() -> None:
    shelf = floored()
    assert list(shelf) == [b"a", b"b", b"c", b"o"]
    assert [shelf.add(key, OTHER) for key in (b"p", b"q", b"r")] == [b"a", b"o", b"p"]
    assert shelf.owned.num_by_tenant == {"acme": 2, "other": 2}


def test_a_tenant_below_its_floor_takes_from_others_and_else_the_oldest_of_all() -> None:
    shelf = floored()
    shelf.remove(b"a")
    shelf.remove(b"b")
    shelf.add(b"p", OTHER)
    shelf.add(b"q", OTHER)
    assert shelf.add(b"d", ACME) == b"c", "its own was the oldest of all"
    assert shelf.add(b"e", ACME) == b"o"
    assert shelf.owned.num_by_tenant == {"acme": 2, "other": 2}


def test_where_floors_take_all_the_room_others_have_none() -> None:
    shelf = Shelf("host", 2)
    shelf.shares_of = lambda tenant: Shares(floor=1.0 if tenant == "acme" else 0.0)
    for key in (b"a", b"b"):
        shelf.add(key, ACME)
    assert not shelf.has_room_for("other")
    assert shelf.add(b"c", ACME) == b"a"
    shelf.remove_all(ACME)
    assert shelf.add(b"o", OTHER) is None


def test_a_page_tells_what_is_retained_of_each_namespace() -> None:
    shelf = shelf_of(b"a", num_blocks=9)
    for key, namespace, priority in ((b"b", ACME, 90), (b"c", ACME, 60), (b"d", ACME, 50), (b"e", OTHER, 51)):
        shelf.add(key, namespace, priority)
    assert [(each.num_blocks, each.num_retained_blocks) for each in shelf.page(0, None, 9).namespaces] == [
        (4, 2),
        (1, 1),
    ]
    shelf.note_loaded(b"b")
    shelf.remove(b"e")
    assert [(each.num_blocks, each.num_retained_blocks) for each in shelf.page(0, None, 9).namespaces] == [(4, 1)]


WALK_SHARES = {
    "free": Shares(),
    "floored": Shares(floor=0.4),
    "capped": Shares(ceiling=0.3, retained=0.2),
    "both": Shares(floor=0.2, ceiling=0.5),
}


def goes_for(shelf: Shelf, tenant: str) -> bytes | None:
    """Return what may go for a block of a tenant, found by looking at every block; None if there is room."""
    counts, parts = shelf.owned.num_by_tenant, WALK_SHARES[tenant]
    has_its_share = parts.ceiling is not None and counts[tenant] >= parts.ceiling * shelf.num_blocks
    if not has_its_share and len(shelf) < shelf.num_blocks:
        return None
    spared = {
        name for name, each in WALK_SHARES.items() if each.floor and counts[name] <= each.floor * shelf.num_blocks
    }
    owners = {tenant} if has_its_share else {tenant, *WALK_SHARES} - (spared - {tenant})
    return next((key for key in shelf if shelf.owned[key].tenant in owners), b"")


def require_bounds(shelf: Shelf) -> None:
    """Count what is retained, and compare it with the books and their bounds."""
    retained = [key for key in shelf if not shelf.is_on_device(key) and shelf.priority_of(key) > DEFAULT_PRIORITY]
    assert {each.namespace.tenant: each.num_retained_blocks for each in shelf.page(0, None, 9).namespaces} == {
        tenant: sum(shelf.owned[key].tenant == tenant for key in retained) for tenant in shelf.owned.num_by_tenant
    }
    assert len(retained) <= math.ceil(shelf.retained_share * shelf.num_blocks)
    for tenant, parts in WALK_SHARES.items():
        most = math.ceil(parts.retained * shelf.num_blocks)
        assert sum(shelf.owned[key].tenant == tenant for key in retained) <= most


@pytest.mark.parametrize("seed", range(10))
def test_in_a_walk_nothing_goes_but_what_may(seed: int) -> None:
    rng = random.Random(seed)
    shelf = Shelf("host", 10)
    shelf.shares_of, shelf.retained_share = WALK_SHARES.__getitem__, 0.5
    num_given_up = num_refused = 0
    for number in range(400):
        tenant, priority = rng.choice(list(WALK_SHARES)), rng.choice([20, 50, 50, 50, 70, 90])
        there = list(shelf)
        choice = rng.random()
        if choice < 0.7:
            key, victim = number.to_bytes(2, "big"), goes_for(shelf, tenant)
            may_come = victim is None or (
                victim != b"" and (shelf.is_on_device(victim) or shelf.priority_of(victim) <= priority)
            )
            assert shelf.has_room_for(tenant, priority) == may_come
            if may_come:
                assert shelf.add(key, Namespace("model", tenant), priority) == victim
                assert set(shelf) == {*there, key} - {victim}
            num_given_up += may_come and victim is not None
            num_refused += not may_come
        elif there and choice < 0.8:
            shelf.note_loaded(rng.choice(there))
        elif there and choice < 0.9:
            shelf.note_left(rng.choice(there), priority)
        elif there:
            shelf.remove(rng.choice(there))
        require_bounds(shelf)
    assert num_given_up
    assert num_refused


def test_a_block_that_is_written_once_more_can_not_be_loaded_meanwhile() -> None:
    shelf = shelf_of(b"a")
    shelf.note_stored(b"a")
    shelf.partless.add(b"a")
    shelf.expect(b"a")
    assert not shelf.holds(b"a")
    assert b"a" in shelf
    shelf.note_stored(b"a")
    assert shelf.holds(b"a")
    assert shelf.partless == set()
