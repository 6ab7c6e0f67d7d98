"""Parts of several groups, and random walks that an oracle judges."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from radixkv.blocks import BlockCopy
from radixkv.cache.parts.part_groups import PartGroups
from radixkv.cache.parts.part_holder import PartHolder
from radixkv.cache.parts.part_pool import PartPool
from radixkv.cache.parts.reach import Reach
from radixkv.errors import OutOfBlocks

SIZE = 4  # tokens a block
NUM_BLOCKS = 200
STEP_TOKENS = 11
UNWRITTEN = ()

Prefix = tuple[int, ...]  # the content of a token: all tokens up to it


def groups_of(*reaches: Reach, num_parts: int) -> PartGroups:
    return PartGroups([PartPool(NUM_BLOCKS, num_parts, SIZE, reach, STEP_TOKENS) for reach in reaches])


def test_without_groups_everything_is_found_and_nothing_is_kept() -> None:
    groups = PartGroups()
    ids = np.arange(3, dtype=np.int32)
    assert groups.longest(ids.tobytes(), 11) == 11
    assert groups.open(ids, 11, 20) == ()
    groups.check([], ids)


def test_a_prompt_is_found_as_far_as_every_group_has_what_it_needs() -> None:
    groups = groups_of(Reach(4), Reach(9), num_parts=12)
    first, second = groups.pools
    first.need(range(5))
    second.need([0, 2, 3, 4])
    ids = np.arange(5, dtype=np.int32).tobytes()
    assert groups.longest(ids, 19) == 19
    assert groups.longest(ids, 16) == 4, "of the second group seven to sixteen is needed"
    first.let_go([0], are_ends=False)
    first.freed(np.array([0], dtype=np.int32))
    assert groups.longest(ids, 16) == 0, "the second group reaches to 4, where the first has nothing"


def test_one_group_without_room_leaves_the_others_as_they_are() -> None:
    groups = groups_of(Reach(4), Reach(30), num_parts=20)
    holders = groups.open(np.empty(0, dtype=np.int32), 0, 100)
    assert [holder.num_reserved for holder in holders] == [4, 11]
    with pytest.raises(OutOfBlocks, match="expected room for 11 blocks more, got 6 of 20"):
        groups.open(np.empty(0, dtype=np.int32), 0, 100)
    groups.check([holders], np.arange(NUM_BLOCKS))
    groups.require_room(20)


@dataclass
class Running:
    """A request that computes its prompt in steps."""

    prompt: Prefix
    blocks: np.ndarray
    holders: tuple[PartHolder, ...]
    copy: BlockCopy | None
    upto: int
    own_from: int  # blocks before are the cache's


@dataclass
class PartWalk:
    """A flat cache over parts. Each slot of a part remembers whose prefix it holds."""

    groups: PartGroups
    dice: random.Random
    cached: dict[Prefix, int] = field(default_factory=dict)  # whole and partly filled blocks by their content
    running: list[Running] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.free = list(range(NUM_BLOCKS))
        self.content = [[[UNWRITTEN] * SIZE for _ in range(pool.num_parts)] for pool in self.groups.pools]

    def step(self) -> None:
        self.dice.choices((self.admit, self.compute, self.end, self.evict), (3, 6, 2, 1))[0]()
        self.groups.check([each.holders for each in self.running], np.array(self.free, dtype=np.int32))

    def find(self, prompt: Prefix) -> tuple[list[int], int]:
        """The blocks of the longest cached beginning, and its tokens."""
        found: list[int] = []
        while (block := self.cached.get(prompt[: (len(found) + 1) * SIZE])) is not None:
            found.append(block)
            if len(found) * SIZE >= len(prompt):
                return found, len(prompt)
        start = len(found) * SIZE
        for rest in range(min(SIZE, len(prompt) - start), 0, -1):
            for prefix, block in self.cached.items():
                if len(prefix) == start + SIZE and prefix[: start + rest] == prompt[: start + rest]:
                    return [*found, block], start + rest
        return found, start

    def admit(self) -> None:
        prompt: Prefix = ()
        if self.cached and self.dice.random() < 0.8:
            base = self.dice.choice(list(self.cached))
            prompt = base[: self.dice.randint(1, len(base))]
        prompt += tuple(self.dice.randrange(2) for _ in range(self.dice.randint(1, 40 if len(prompt) < 60 else 2)))
        found, num_found = self.find(prompt)
        ids, num_found = np.array(found, dtype=np.int32), min(num_found, len(prompt) - 1)
        cached = self.groups.longest(ids.tobytes(), num_found)
        whole, rest = divmod(cached, SIZE)
        num_new = -(-len(prompt) // SIZE) - whole
        if num_new > len(self.free):
            return
        try:
            holders = self.groups.open(ids, cached, len(prompt))
        except OutOfBlocks:
            assert self.running, "one request always has room"
            self.events["refused"] += 1
            return
        new = [self.free.pop(self.dice.randrange(len(self.free))) for _ in range(num_new)]
        copy = BlockCopy(found[whole], new[0]) if rest else None
        blocks = np.array([*found[:whole], *new], dtype=np.int32)
        self.running.append(Running(prompt, blocks, holders, copy, cached, whole))
        self.events["cut short"] += cached < num_found
        self.events["found"] += cached > 0
        self.events["copies"] += rest > 0

    def compute(self) -> None:
        """Compute one step of several requests, publish, and settle."""
        left = STEP_TOKENS
        chosen: list[tuple[Running, int]] = []
        for each in self.dice.sample(self.running, len(self.running)):
            tokens = min(left, len(each.prompt) - each.upto, self.dice.choice((1, 3, STEP_TOKENS)))
            if tokens > 0:
                left -= tokens
                chosen.append((each, tokens))
        covers = [
            [holder.cover(each.blocks, each.upto, each.upto + tokens, each.copy) for holder in each.holders]
            for each, tokens in chosen
        ]
        fails = self.dice.random() < 0.1
        for (each, tokens), cover_of in zip(chosen, covers, strict=True):
            for memory, cover, pool in zip(self.content, cover_of, self.groups.pools, strict=True):
                if cover.copy is not None:
                    memory[cover.copy.target] = list(memory[cover.copy.source])
                for position in range(pool.reach.first_token(each.upto), each.upto):
                    slot = memory[cover.part_ids[position // SIZE]][position % SIZE]
                    assert slot == each.prompt[: position + 1], f"token {position} is not what was computed"
                for position in range(each.upto, each.upto + tokens):
                    memory[cover.part_ids[position // SIZE]][position % SIZE] = each.prompt[: position + 1]
            if fails:
                for holder in each.holders:
                    holder.settle(each.upto, each.copy)
                self.events["tried again"] += 1
                continue
            each.upto, each.copy = each.upto + tokens, None
            for holder in each.holders:
                holder.settle(each.upto)
            self.publish(each)

    def publish(self, each: Running) -> None:
        """Publish whole blocks; where another request had them first, take those."""
        for index in range(each.own_from, each.upto // SIZE):
            prefix, own = each.prompt[: (index + 1) * SIZE], int(each.blocks[index])
            known = self.cached.setdefault(prefix, own)
            if known != own:
                old, new = np.array([own], dtype=np.int32), np.array([known], dtype=np.int32)
                self.groups.exchange(each.holders, old, new)
                self.release([own])
                each.blocks[index] = known
                self.events["adopted"] += 1
            each.own_from = index + 1

    def end(self) -> None:
        if self.running:
            each = self.running.pop(self.dice.randrange(len(self.running)))
            for holder in each.holders:
                holder.close()
            self.release(each.blocks[each.own_from :].tolist())

    def evict(self) -> None:
        """Evict a cached block that nobody uses and that begins no other."""
        used = {int(block) for each in self.running for block in each.blocks}
        used |= {each.copy.source for each in self.running if each.copy is not None}
        begun = {prefix[: len(prefix) - SIZE] for prefix in self.cached}
        leaves = [prefix for prefix, block in self.cached.items() if block not in used and prefix not in begun]
        for prefix in self.dice.sample(leaves, min(len(leaves), 4)):
            self.release([self.cached.pop(prefix)])

    def release(self, blocks: list[int]) -> None:
        self.groups.freed(np.array(blocks, dtype=np.int32))
        self.free += blocks


@pytest.mark.parametrize(
    "groups",
    [
        groups_of(Reach(9), num_parts=16),
        groups_of(Reach(1), num_parts=14),
        groups_of(Reach(14), num_parts=60),
        groups_of(Reach(5), Reach(20), num_parts=22),
    ],
    ids=["tight", "one token", "roomy", "two groups"],
)
def test_every_token_within_reach_is_what_was_computed(groups: PartGroups) -> None:
    walk = PartWalk(groups, random.Random(1))
    for _ in range(2500):
        walk.step()
    for each in ("found", "copies", "adopted", "tried again", "refused"):
        assert walk.events[each] > 10, each
    if groups.pools[0].num_parts < 60:
        assert walk.events["cut short"] > 10
        assert min(pool.num_given_up for pool in groups.pools) > 100
    for running in walk.running:
        for holder in running.holders:
            holder.close()
    groups.check([], np.array(walk.free, dtype=np.int32))
    assert all(pool.num_needed == pool.num_reserved == 0 for pool in groups.pools)


@pytest.mark.parametrize(
    ("loaded", "num_usable"),
    [
        ([], 0),
        ([True], 1),
        ([False], 0),
        ([False, True, True, False], 3),
        ([True, False, False], 1),
        ([False, False, True], 0),
    ],
)
def test_loaded_blocks_are_usable_up_to_one_that_has_all_within_reach(loaded: list[bool], num_usable: int) -> None:
    groups = groups_of(Reach(8), num_parts=12)  # two blocks
    groups.pools[0].need([1])
    assert groups.num_usable(np.arange(2, dtype=np.int32), loaded) == num_usable


def test_loaded_blocks_are_usable_as_far_as_every_group_has_what_it_needs() -> None:
    groups = groups_of(Reach(4), Reach(12), num_parts=12)
    blocks = np.arange(1, dtype=np.int32)
    assert groups.num_usable(blocks, [True, True, True]) == 3
    assert groups.num_usable(blocks, [True, True]) == 0, "the second group has no part of the first block"
    groups.pools[1].need([0])
    assert groups.num_usable(blocks, [True, True]) == 2
    assert groups.num_reached_blocks == 4


def test_what_suits_a_group_suits_it_no_more_once_another_could_use_less() -> None:
    groups = groups_of(Reach(8), Reach(12), num_parts=12)  # two blocks, three
    blocks = np.arange(1, dtype=np.int32)
    groups.pools[1].need([0])
    loaded = [True, False, True, True]
    assert groups.num_usable(blocks, loaded) == 0, "after one loaded block the first group needs that before it"
    groups.pools[0].need([0])
    assert groups.num_usable(blocks, loaded) == 1


def test_who_keeps_all_can_use_no_block_after_one_without_its_part() -> None:
    groups = groups_of(Reach(1), num_parts=12)
    blocks = np.arange(1, dtype=np.int32)
    assert groups.num_usable(blocks, [True], keeps_all=True) == 0
    groups.pools[0].need([0])
    assert groups.num_usable(blocks, [True, False, True], keeps_all=True) == 1
    assert groups.num_usable(blocks, [True, True], keeps_all=True) == 2


def test_without_groups_all_loaded_blocks_are_usable() -> None:
    assert PartGroups().num_usable(np.arange(2, dtype=np.int32), [False, False]) == 2
    assert PartGroups().num_reached_blocks == 0
