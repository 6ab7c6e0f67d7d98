from __future__ import annotations

import random

import pytest

from radixkv.cache.states.worth import WorthOrder


def test_the_snapshot_that_saves_fewest_tokens_is_worth_least() -> None:
    order = WorthOrder()
    for slot, saved_tokens in ((3, 512), (5, 16), (4, 100)):
        order.add(slot, saved_tokens)
    assert order.least() == 5
    order.discard(5)
    assert order.least() == 4


def test_a_use_counts_as_much_as_the_making() -> None:
    order = WorthOrder()
    order.add(1, 100)
    order.add(2, 250)
    order.used(1)
    assert order.least() == 1
    order.used(1)
    assert (order.least(), order.num_uses(1)) == (2, 2)


def test_what_was_worth_much_long_ago_falls_behind() -> None:
    order = WorthOrder()
    order.add(0, 250)
    for slot in (1, 2):
        order.add(slot, 100)
        assert order.least() == slot, "each newcomer is worth 100 more than the one before"
        order.give_up(slot)
    order.add(3, 100)
    assert order.least() == 0


def test_the_order_is_that_of_a_plain_list_whatever_happens() -> None:
    rng, order = random.Random(1), WorthOrder()
    kept: dict[int, tuple[int, int, float]] = {}  # saved tokens, uses, worth
    for slot in range(2000):
        event = rng.random()
        if event < 0.4 or not kept:
            saved_tokens = rng.randint(1, 1000)
            kept[slot] = (saved_tokens, 0, order.level + saved_tokens)
            order.add(slot, saved_tokens)
        elif event < 0.8:
            used = rng.choice(list(kept))
            saved_tokens, uses, _ = kept[used]
            kept[used] = (saved_tokens, uses + 1, order.level + saved_tokens * (uses + 2))
            order.used(used)
        elif event < 0.9:
            gone = rng.choice(list(kept))
            del kept[gone]
            order.discard(gone)
        else:
            least = order.least()
            assert least is not None
            level = max(order.level, kept.pop(least)[2])
            order.give_up(least)
            assert order.level == level
        assert len(order) == len(kept)
        least = order.least()
        assert (least is None) == (not kept)
        if least is not None:
            assert kept[least][2] == min(worth for _, _, worth in kept.values()) == order.worth(least)


@pytest.mark.parametrize("is_used", [False, True])
def test_what_is_out_of_date_takes_no_more_room_than_what_is_kept(is_used: bool) -> None:
    order = WorthOrder()
    for slot in range(1000):
        order.add(slot % 7, slot)
        if is_used:
            order.used(slot % 7)
        assert len(order._heap) <= 2 * len(order) + 64
        if not is_used:
            order.discard(slot % 7)
