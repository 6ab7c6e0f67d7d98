"""The index of blocks and the servers that have them, compared with plain sets."""

from __future__ import annotations

import random

import pytest

from radixkv.routing.block_index import BlockIndex

NUM_SWEEPS = 256  # after as many calls of `sweep`, the whole index has been swept


def test_runs_end_at_the_first_block_without_a_holder() -> None:
    index = BlockIndex(100)
    one, two = index.add_holder(), index.add_holder()
    index.store(one, [1, 2, 3])
    index.store(two, [1, 2])
    assert index.runs([1, 2, 3, 4, 5]) == [(one | two, 2), (one, 1)]
    assert index.runs([1, 2, 3]) == [(one | two, 2), (one, 1)]
    assert index.runs([1, 2]) == [(one | two, 2)]
    assert index.runs([4, 5]) == index.runs([]) == []


def test_runs_are_those_of_a_lookup_of_every_block() -> None:
    draw = random.Random(5)
    for _ in range(200):
        index, prompt = BlockIndex(1000), range(draw.randrange(1, 90))
        # Each holder has the blocks `[0, depth)`.
        depths = {index.add_holder(): draw.choice((0, 3, 7, draw.randrange(90))) for _ in range(5)}
        for bit, depth in depths.items():
            index.store(bit, range(depth))
        holders_by_run = [holders for holders, num_blocks in index.runs(prompt) for _ in range(num_blocks)]
        holders_by_block = [sum(bit for bit, depth in depths.items() if block < depth) for block in prompt]
        assert holders_by_run == [holders for holders in holders_by_block if holders]


def test_few_blocks_of_a_long_prompt_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    index, looked_up = BlockIndex(10_000), list[int]()
    one, two = index.add_holder(), index.add_holder()
    index.store(one, range(8000))
    index.store(two, range(100))
    holders_of = index.holders_of

    def record_holders_of(block: int) -> int:
        looked_up.append(block)
        return holders_of(block)

    monkeypatch.setattr(index, "holders_of", record_holders_of)
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
    for _ in range(NUM_SWEEPS):
        index.sweep()
    assert (index.num_blocks, index.runs(range(1000))) == (500, [(two, 500)])


def test_a_bit_has_no_new_holder_before_it_is_swept() -> None:
    index = BlockIndex(10_000)
    one = index.add_holder()
    index.store(one, range(1000))
    index.forget_holder(one)
    for _ in range(NUM_SWEEPS - 1):
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
    for _ in range(NUM_SWEEPS - 100):
        index.sweep()
    assert index.add_holder() == one
    assert index.num_blocks == 512
    for _ in range(NUM_SWEEPS):
        index.sweep()
    assert (index.num_blocks, index.add_holder()) == (0, two)


def test_blocks_without_room_are_not_added() -> None:
    index = BlockIndex(3)
    one, two = index.add_holder(), index.add_holder()
    index.store(one, [1, 2, 3, 4, 5])
    assert (index.num_blocks, index.num_refused) == (3, 2)
    index.store(two, [1, 2, 3])  # blocks that the index already has need no room
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
    for _ in range(2 * NUM_SWEEPS):  # the second time for holders that were forgotten during the first one
        index.sweep()
    assert index.num_blocks == len(set().union(*oracle.values()))
