"""The index of blocks and the servers that have them, compared with plain sets."""

from __future__ import annotations

import random

import pytest

from radixkv.routing.block_index import BlockIndex


def test_runs_end_at_the_first_block_without_a_holder() -> None:
    index = BlockIndex(100)
    one, two = index.add_holder(), index.add_holder()
    index.store(one, [1, 2, 3])
    index.store(two, [1, 2])
    assert index.runs([1, 2, 3, 4, 5]) == [(one | two, 2), (one, 1)]
    assert index.runs([1, 2, 3]) == [(one | two, 2), (one, 1)]
    assert index.runs([1, 2]) == [(one | two, 2)]
    assert index.runs([4, 5]) == index.runs([]) == []


def test_runs_are_those_of_a_look_at_every_block() -> None:
    draw = random.Random(5)
    for _ in range(200):
        index, prompt = BlockIndex(1000), range(draw.randrange(1, 90))
        depths = {index.add_holder(): draw.choice((0, 3, 7, draw.randrange(90))) for _ in range(5)}
        for bit, depth in depths.items():
            index.store(bit, range(depth))
        found = [holders for holders, num_blocks in index.runs(prompt) for _ in range(num_blocks)]
        sets = [sum(bit for bit, depth in depths.items() if block < depth) for block in prompt]
        assert found == [holders for holders in sets if holders]


def test_few_blocks_of_a_long_prompt_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    index, looked_up = BlockIndex(10_000), []
    one, two = index.add_holder(), index.add_holder()
    index.store(one, range(8000))
    index.store(two, range(100))
    real = index.holders_of
    monkeypatch.setattr(index, "holders_of", lambda block: looked_up.append(block) or real(block))
    assert index.runs(range(8192)) == [(one | two, 100), (one, 7900)]
    assert len(looked_up) < 60


def test_a_removed_holder_is_ignored_at_once_and_its_blocks_are_swept_later() -> None:
    index = BlockIndex(10_000)
    one, two = index.add_holder(), index.add_holder()
    index.store(one, range(1000))
    index.store(two, range(500))
    index.forget_holder(one)
    assert index.runs(range(1000)) == [(two, 500)]
    assert index.num_blocks == 1000
    for _ in range(256):
        index.sweep()
    assert (index.num_blocks, index.runs(range(1000))) == (500, [(two, 500)])


def test_a_bit_has_no_new_holder_before_it_is_swept() -> None:
    index = BlockIndex(10_000)
    one = index.add_holder()
    index.store(one, range(1000))
    index.forget_holder(one)
    for _ in range(255):
        index.sweep()
        assert index.add_holder() != one
    index.sweep()
    assert index.add_holder() == one
    assert index.runs(range(1000)) == []


def test_a_holder_that_is_forgotten_during_a_sweep_waits_for_the_next() -> None:
    index = BlockIndex(10_000)
    one, two = index.add_holder(), index.add_holder()
    index.store(one, range(512))
    index.store(two, range(512))
    index.forget_holder(one)
    for _ in range(100):
        index.sweep()
    index.forget_holder(two)
    for _ in range(156):
        index.sweep()
    assert index.add_holder() == one
    assert index.num_blocks == 512
    for _ in range(256):
        index.sweep()
    assert (index.num_blocks, index.add_holder()) == (0, two)


def test_blocks_without_room_are_not_added() -> None:
    index = BlockIndex(3)
    one, two = index.add_holder(), index.add_holder()
    index.store(one, [1, 2, 3, 4, 5])
    assert (index.num_blocks, index.num_refused) == (3, 2)
    index.store(two, [1, 2, 3])  # no blocks of its own
    assert index.runs([1, 2, 3, 4]) == [(one | two, 3)]
    index.remove(one | two, [3])
    index.store(one, [4])
    assert (index.num_blocks, index.holders_of(4)) == (3, one)


def test_the_index_agrees_with_sets_after_random_steps() -> None:
    draw = random.Random(3)
    index = BlockIndex(10_000)
    oracle: dict[int, set[int]] = {}
    for _ in range(4000):
        step = draw.randrange(20)
        blocks = [draw.randrange(2000) for _ in range(draw.randrange(40))]
        if step < 2 and len(oracle) < 9:
            bit = index.add_holder()
            assert bit not in oracle
            oracle[bit] = set()
        elif step < 3 and oracle:
            bit = draw.choice(list(oracle))
            index.forget_holder(bit)
            del oracle[bit]
        elif step < 12 and oracle:
            bit = draw.choice(list(oracle))
            index.store(bit, blocks)
            oracle[bit].update(blocks)
        elif step < 16 and oracle:
            bit = draw.choice(list(oracle))
            index.remove(bit, blocks)
            oracle[bit].difference_update(blocks)
        else:
            index.sweep()
        for block in blocks:
            assert index.holders_of(block) == sum(bit for bit, held in oracle.items() if block in held)
    for _ in range(512):
        index.sweep()
    assert index.num_blocks == len(set().union(*oracle.values()))
