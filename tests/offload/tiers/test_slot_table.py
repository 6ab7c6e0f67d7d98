from __future__ import annotations

from radixkv.offload.tiers.slot_table import SlotEntry, SlotTable


def fill(table: SlotTable, *keys: bytes, victims: tuple[bytes, ...] = ()) -> list[bytes]:
    """Put keys one by one. Returns the evicted keys."""
    evicted_keys = []
    remaining_victims = iter(victims)
    for key in keys:
        slot, evicted = table.claim(key, remaining_victims)
        evicted_keys += evicted
        if slot is not None:
            table.publish(key, SlotEntry(slot, 0, 1))
    return evicted_keys


def test_the_least_recently_used_is_evicted_first() -> None:
    table = SlotTable(3)
    assert fill(table, b"a", b"b", b"c") == []
    table.find(b"a")
    table.find(b"b", is_use=False)
    assert fill(table, b"d", b"e") == [b"b", b"c"]


def test_the_first_free_slot_is_taken() -> None:
    table = SlotTable(4)
    fill(table, b"a", b"b", b"c", b"d")
    for key in (b"b", b"d", b"a"):
        table.remove(key)
    assert [table.claim(key, iter(()))[0] for key in (b"e", b"f", b"g")] == [0, 1, 3]


def test_put_last_moves_to_the_end_of_the_eviction_order() -> None:
    table = SlotTable(3)
    fill(table, b"a", b"b", b"c")
    table.put_last([b"b", b"nothing", b"a"])
    assert fill(table, b"d", b"e", b"f") == [b"c", b"b", b"a"]


def test_victims_are_evicted_first() -> None:
    table = SlotTable(3)
    fill(table, b"a", b"b", b"c")
    assert fill(table, b"d", b"e", b"f", victims=(b"nothing", b"c", b"b")) == [b"c", b"b", b"a"]


def test_no_more_victims_are_evicted_than_needed() -> None:
    table = SlotTable(3)
    fill(table, b"a", b"b")
    assert fill(table, b"c", b"d", victims=(b"b", b"a")) == [b"b"]


def test_objects_being_read_are_not_evicted() -> None:
    table = SlotTable(1)
    fill(table, b"a")
    entry = table.find(b"a")
    assert entry is not None
    table.start_reading(entry)
    assert fill(table, b"b", victims=(b"a",)) == []
    assert table.remove(b"a") is entry
    assert table.num_free == 0
    table.end_reading(entry)
    assert table.num_free == 1


def test_nothing_is_evicted_in_place_of_a_victim_that_is_being_read() -> None:
    table = SlotTable(3)
    fill(table, b"a", b"b", b"c")
    entry = table.find(b"b")
    assert entry is not None
    table.start_reading(entry)
    assert table.claim(b"d", iter((b"b", b"c"))) == (None, [])
    assert fill(table, b"d", b"e", victims=(b"b", b"c")) == [b"c"]
    assert [key for key, _ in table] == [b"a", b"b", b"e"]


def test_an_object_removed_during_its_write_is_not_published() -> None:
    table = SlotTable(1)
    slot, _ = table.claim(b"a", iter(()))
    assert slot is not None
    table.remove(b"a")
    table.publish(b"a", SlotEntry(slot, 0, 1))
    assert table.find(b"a") is None
    assert table.num_free == 1


def test_a_claim_that_is_abandoned_frees_its_slot() -> None:
    table = SlotTable(1)
    slot, _ = table.claim(b"a", iter(()))
    assert slot is not None
    assert table.has(b"a", 9)
    table.abandon(b"a", slot)
    assert not table.has(b"a", 0)
    assert table.num_free == 1


def test_a_later_generation_takes_the_slot_of_an_earlier_one() -> None:
    table = SlotTable(1)
    fill(table, b"a")
    assert table.has(b"a", 0)
    assert not table.has(b"a", 1)
    slot, evicted = table.claim(b"a", iter(()))
    assert (slot, evicted) == (0, [])
