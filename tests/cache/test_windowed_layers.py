"""Hits, leases and misses of a cache whose blocks have parts."""

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from radixkv.api.awaits import Awaits
from radixkv.api.miss_reason import MissReason
from radixkv.blocks import BlockCopy, BlockIds
from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.window_pool import Reach, WindowPool
from radixkv.cache.windowed_layers import WindowedLayers, WindowLease
from radixkv.errors import InvariantViolation, OutOfBlocks
from radixkv.namespace import PUBLIC_TENANT
from tests.fakes import MODEL, spell

BLOCKS = np.arange(10, 26, dtype=np.int32)  # of two tokens


def pool_of(num_parts: int = 12) -> WindowPool:
    return WindowPool(30, num_parts, block_size=2, reach=Reach(3), step_tokens=4)


def with_part(pool: WindowPool) -> list[int]:
    return np.flatnonzero(pool.table >= 0).tolist()


def test_a_long_request_needs_no_more_than_its_reach_and_its_step() -> None:
    pool = pool_of()
    holder = WindowLease(pool, 0)
    most = 0
    for start in range(0, 32, 4):
        holder.cover(BLOCKS, start, start + 4)
        most = max(most, pool.num_pinned)
        holder.settle(start + 4)
        assert pool.num_pinned == 2  # three tokens before an even position lie in two blocks
    assert most == 4
    assert pool.num_evicted == 4  # sixteen blocks were written, and there are twelve parts


def test_the_table_holds_what_is_within_reach() -> None:
    pool = pool_of()
    holder = WindowLease(pool, 0)
    holder.cover(BLOCKS, 0, 8)
    holder.settle(8)
    cover = holder.cover(BLOCKS, 8, 9)
    assert cover.copy is None
    assert cover.part_ids.tolist() == [0, 0, *pool.table[[12, 13, 14]]]


def test_loading_parts_without_a_session_changes_no_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PrefixCache(30, 2, windows=WindowedLayers([pool_of()]))

    def publish(lease: Lease) -> None:
        for window_lease in lease.windows:
            window_lease.cover(lease.block_ids, lease.cached_tokens, 8)
            window_lease.settle(8)
        lease.commit(8)

    with cache.lease(MODEL, spell("abcdefgh"), session_id="s") as lease:
        publish(lease)
    monkeypatch.setattr(cache, "_num_reusable_tokens", lambda *found: 0)  # as if its parts had been evicted
    with cache.lease(MODEL, spell("abcdefgh"), is_prefetch=True) as lease:
        assert lease.node is None
        publish(lease)
    assert [node.session and node.session.session_id for node in cache.nodes()] == ["s"]


def test_a_step_that_is_not_all_computed_is_settled_where_it_ended() -> None:
    pool = pool_of()
    holder = WindowLease(pool, 0)
    holder.cover(BLOCKS, 0, 8)
    holder.settle(3)
    assert sorted(holder.needed) == [10, 11]
    assert pool.num_unpinned == 2


def test_a_copied_block_is_kept_until_the_copy_is_made() -> None:
    pool = pool_of()
    first = WindowLease(pool, 0)
    first.cover(BLOCKS, 0, 6)
    first.settle(6)
    first.close()
    found = BLOCKS[:3]
    second = WindowLease(pool, 0)
    second.pin_hit(found, 5)
    blocks, copy = np.array([10, 11, 27, 28], dtype=np.int32), BlockCopy(12, 27)
    cover = second.cover(blocks, 5, 7, copy)
    assert cover.copy == BlockCopy(int(pool.table[12]), int(pool.table[27]))
    second.settle(5, copy)  # the step had no room, and is tried again
    assert sorted(second.needed) == [11, 12, 27]
    assert second.cover(blocks, 5, 6, copy).copy == cover.copy
    second.settle(6)
    assert sorted(second.needed) == [11, 27]


def test_parts_that_a_hit_needed_are_evicted_with_those_of_ends() -> None:
    pool = pool_of(8)
    first = WindowLease(pool, 0)
    first.cover(BLOCKS, 0, 6)
    first.close()
    second = WindowLease(pool, 0)
    second.pin_hit(BLOCKS, 4)
    for start in range(4, 32, 4):
        second.cover(BLOCKS, start, start + 4)
        second.settle(start + 4)
    assert {10, 11} <= set(with_part(pool)), "where a prompt was found another may be found"
    assert 14 not in with_part(pool)


def test_a_missing_part_in_the_window_is_detected() -> None:
    pool = pool_of()
    holder = WindowLease(pool, 0)
    with pytest.raises(InvariantViolation, match="each block in the window to have its part"):
        holder.cover(BLOCKS, 4, 6)
    with pytest.raises(InvariantViolation, match="each block in the window to have its part"):
        holder.pin_hit(BLOCKS, 3)


def test_a_lease_that_keeps_all_parts_passes_none() -> None:
    pool = pool_of(16)
    holder = WindowLease(pool, 0, keeps_all=True)
    for start in range(0, 20, 4):
        holder.cover(BLOCKS, start, start + 4)
        holder.settle(start + 4)
    assert sorted(holder.needed) == BLOCKS[:10].tolist()


def test_an_exchanged_block_is_evicted_in_the_place_of_the_old_one() -> None:
    pool = pool_of()
    holder = WindowLease(pool, 0)
    holder.cover(BLOCKS, 0, 4)
    holder.exchange(11, 28)
    assert sorted(holder.needed) == [10, 28]
    holder.settle(8)
    assert holder.needed == []


def test_closing_releases_reserved_parts_once() -> None:
    pool = pool_of()
    pool.reserve(4)
    holder = WindowLease(pool, 4)
    holder.cover(BLOCKS, 0, 4)
    holder.close()
    holder.close()
    assert (pool.num_reserved, pool.num_pinned, pool.num_unpinned) == (0, 0, 2)


def received(pool: WindowPool) -> tuple[WindowLease, list[int]]:
    """A request that has three blocks of a tree, two of which have their parts, and three more that are loaded."""
    other = WindowLease(pool, 0)
    other.cover(BLOCKS, 0, 6)
    other.close()
    pool.free_parts(BLOCKS[:1])
    holder = WindowLease(pool, 0)
    return holder, holder.receive(BLOCKS, 6)


def test_loaded_blocks_get_parts_where_the_next_token_reaches() -> None:
    pool = pool_of()
    holder, given = received(pool)
    assert given == [4, 5]
    assert sorted(holder.needed) == [14, 15]
    assert holder.part_of(14) == pool.table[14]
    holder.settle(12)
    assert holder.cover(BLOCKS, 12, 14).part_ids.tolist() == [0, 0, 0, 0, *pool.table[[14, 15, 16]]]


def test_cached_parts_are_not_evicted_for_loaded_ones() -> None:
    pool = pool_of(num_parts=7)
    pool.pin([14, 15, 25, 26, 27, 28, 29])
    pool.unpin_ends([14, 15, 25, 26, 27, 28, 29])
    before = pool.table[[14, 15]].tolist()
    holder = WindowLease(pool, 0, keeps_all=True)
    assert holder.receive(BLOCKS, 6) == [0, 1, 2, 3]
    assert pool.table[[14, 15]].tolist() == before, "they were used longest ago"
    assert with_part(pool) == [10, 11, 12, 13, 14, 15, 29]


def test_parts_from_which_others_may_continue_outlast_passed_ones() -> None:
    pool = pool_of(num_parts=8)
    holder = WindowLease(pool, 0)
    holder.note_divergence(8)  # needs five to eight, in the third and fourth block
    for start in range(0, 32, 4):
        holder.cover(BLOCKS, start, start + 4)
        holder.settle(start + 4)
    holder.close()
    assert pool.num_evicted == 8
    assert with_part(pool)[:2] == [12, 13]


def test_the_parts_that_compute_the_last_token_again_are_kept() -> None:
    pool = pool_of()
    holder = WindowLease(pool, 0)
    holder.cover(BLOCKS, 0, 9)
    holder.settle(9)
    assert sorted(holder.needed) == [12, 13, 14], "five to seven, before the last token, begin in the third block"


SIZE = 4  # tokens per block
NUM_BLOCKS = 200
STEP_TOKENS = 11
UNWRITTEN = ()

Prefix = tuple[int, ...]  # the content of a token: all tokens up to it


def groups_of(*reaches: Reach, num_parts: int) -> WindowedLayers:
    return WindowedLayers([WindowPool(NUM_BLOCKS, num_parts, SIZE, reach, STEP_TOKENS) for reach in reaches])


def opened(groups: WindowedLayers, block_ids: BlockIds, cached_tokens: int, num_tokens: int) -> tuple[WindowLease, ...]:
    """Pin what a request found, and reserve what it may need."""
    holders = groups.pin(block_ids, cached_tokens, num_tokens)
    groups.reserve(holders)
    return holders


def test_without_groups_everything_is_found_and_nothing_is_kept() -> None:
    groups = WindowedLayers()
    ids = np.arange(3, dtype=np.int32)
    assert groups.num_reusable_tokens(ids.tobytes(), 11) == 11
    assert opened(groups, ids, 11, 20) == ()
    groups.check([], ids)


def test_a_prompt_is_found_as_far_as_every_group_has_what_it_needs() -> None:
    groups = groups_of(Reach(4), Reach(9), num_parts=12)
    first, second = groups.pools
    first.pin(range(5))
    second.pin([0, 2, 3, 4])
    ids = np.arange(5, dtype=np.int32).tobytes()
    assert groups.num_reusable_tokens(ids, 19) == 19
    assert groups.num_reusable_tokens(ids, 16) == 4, "of the second group seven to sixteen is needed"
    first.unpin_passed({0: 0}, 1)
    first.free_parts(np.array([0], dtype=np.int32))
    assert groups.num_reusable_tokens(ids, 16) == 0, "the second group reaches to 4, where the first has nothing"


def test_a_group_without_room_leaves_the_others_unchanged() -> None:
    groups = groups_of(Reach(4), Reach(30), num_parts=20)
    holders = opened(groups, np.empty(0, dtype=np.int32), 0, 100)
    assert [holder.num_reserved for holder in holders] == [4, 11]
    with pytest.raises(OutOfBlocks, match="expected room for 11 blocks more of 20"):
        opened(groups, np.empty(0, dtype=np.int32), 0, 100)
    groups.check([holders], np.arange(NUM_BLOCKS))
    groups.require_room(20)


@dataclass
class Running:
    """A request that computes its prompt in steps."""

    prompt: Prefix
    blocks: np.ndarray
    holders: tuple[WindowLease, ...]
    copy: BlockCopy | None
    upto: int
    own_from: int  # blocks before are the cache's


@dataclass
class PartWalk:
    """A flat cache over parts. Each slot of a part remembers whose prefix it holds."""

    groups: WindowedLayers
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
        cached = self.groups.num_reusable_tokens(ids.tobytes(), num_found)
        whole, rest = divmod(cached, SIZE)
        num_new = -(-len(prompt) // SIZE) - whole
        if num_new > len(self.free):
            return
        try:
            holders = opened(self.groups, ids, cached, len(prompt))
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
        """Evict an unused cached block that no other block continues."""
        used = {int(block) for each in self.running for block in each.blocks}
        used |= {each.copy.source for each in self.running if each.copy is not None}
        begun = {prefix[: len(prefix) - SIZE] for prefix in self.cached}
        leaves = [prefix for prefix, block in self.cached.items() if block not in used and prefix not in begun]
        for prefix in self.dice.sample(leaves, min(len(leaves), 4)):
            self.release([self.cached.pop(prefix)])

    def release(self, blocks: list[int]) -> None:
        self.groups.free_parts(np.array(blocks, dtype=np.int32))
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
def test_every_token_within_reach_is_what_was_computed(groups: WindowedLayers) -> None:
    walk = PartWalk(groups, random.Random(1))
    for _ in range(2500):
        walk.step()
    for each in ("found", "copies", "adopted", "tried again", "refused"):
        assert walk.events[each] > 10, each
    if groups.pools[0].num_parts < 60:
        assert walk.events["cut short"] > 10
        assert min(pool.num_evicted for pool in groups.pools) > 100
    for running in walk.running:
        for holder in running.holders:
            holder.close()
    groups.check([], np.array(walk.free, dtype=np.int32))
    assert all(pool.num_pinned == pool.num_reserved == 0 for pool in groups.pools)


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
    groups.pools[0].pin([1])
    assert groups.num_usable(np.arange(2, dtype=np.int32), loaded) == num_usable


def test_loaded_blocks_are_usable_as_far_as_every_group_has_what_it_needs() -> None:
    groups = groups_of(Reach(4), Reach(12), num_parts=12)
    blocks = np.arange(1, dtype=np.int32)
    assert groups.num_usable(blocks, [True, True, True]) == 3
    assert groups.num_usable(blocks, [True, True]) == 0, "the second group has no part of the first block"
    groups.pools[1].pin([0])
    assert groups.num_usable(blocks, [True, True]) == 2
    assert groups.num_reached_blocks == 4


def test_a_prefix_that_one_group_could_reuse_is_cut_if_another_group_can_reuse_less() -> None:
    groups = groups_of(Reach(8), Reach(12), num_parts=12)  # two blocks, three
    blocks = np.arange(1, dtype=np.int32)
    groups.pools[1].pin([0])
    loaded = [True, False, True, True]
    assert groups.num_usable(blocks, loaded) == 0, "after one loaded block the first group needs that before it"
    groups.pools[0].pin([0])
    assert groups.num_usable(blocks, loaded) == 1


def test_a_request_that_keeps_all_parts_can_use_no_block_after_one_without_its_part() -> None:
    groups = groups_of(Reach(1), num_parts=12)
    blocks = np.arange(1, dtype=np.int32)
    assert groups.num_usable(blocks, [True], keeps_all=True) == 0
    groups.pools[0].pin([0])
    assert groups.num_usable(blocks, [True, False, True], keeps_all=True) == 1
    assert groups.num_usable(blocks, [True, True], keeps_all=True) == 2


def test_without_groups_all_loaded_blocks_are_usable() -> None:
    assert WindowedLayers().num_usable(np.arange(2, dtype=np.int32), [False, False]) == 2
    assert WindowedLayers().num_reached_blocks == 0


WINDOW = 7  # a hit of n tokens needs the 6 before
ALPHABET = "abcdefghijklmnopqrstuvwx"


def cache_of(num_blocks: int = 32, num_parts: int = 14) -> PrefixCache:
    pool = WindowPool(num_blocks, num_parts, block_size=4, reach=Reach.of_window(WINDOW), step_tokens=8)
    return PrefixCache(num_blocks, 4, windows=WindowedLayers([pool]))


def compute(lease: Lease, upto: int | None = None) -> None:
    """Compute and publish in steps of eight tokens."""
    upto, start = upto or lease.num_tokens, lease.committed_tokens
    (holder,) = lease.windows
    while start < upto:
        end = min(upto, start + 8)
        holder.cover(lease.block_ids, start, end, lease.copy)
        lease.copy = None
        holder.settle(end)
        lease.commit(end)
        start = end


def publish(cache: PrefixCache, text: str) -> list[int]:
    with cache.lease(MODEL, spell(text)) as lease:
        compute(lease)
        return lease.block_ids.tolist()


def free_parts(cache: PrefixCache, *block_ids: int) -> None:
    cache.windows.free_parts(np.array(block_ids, dtype=np.int32))


def found(cache: PrefixCache, text: str) -> int:
    return cache.match(MODEL, spell(text)).cached_tokens


def test_a_hit_needs_only_what_is_within_reach_of_its_end() -> None:
    cache = cache_of()
    blocks = publish(cache, ALPHABET)
    free_parts(cache, *blocks[:4])
    assert found(cache, ALPHABET + "!") == 24
    assert found(cache, ALPHABET) == 23
    assert found(cache, ALPHABET[:22] + "!") == 22, "sixteen to twenty-two, in the last two blocks"
    assert found(cache, ALPHABET[:21] + "!") == 0, "fifteen is in a block without a part"


def test_a_hit_is_the_longest_one_whose_parts_are_there() -> None:
    cache = cache_of()
    blocks = publish(cache, ALPHABET)
    free_parts(cache, blocks[3])
    assert found(cache, ALPHABET[:20] + "!") == 12
    with cache.lease(MODEL, spell(ALPHABET[:20] + "!")) as lease:
        assert (lease.cached_tokens, lease.copy) == (12, None)
        assert lease.block_ids[:3].tolist() == blocks[:3]
        compute(lease)
        cache.check()
    assert found(cache, ALPHABET[:20] + "!") == 20, "what was computed again gave the missing part to the tree's block"
    assert cache.windows.pools[0].table[blocks[3]] >= 0


def test_tokens_that_cannot_be_reused_are_dropped_and_await_what_their_session_awaits() -> None:
    cache = cache_of()
    free_parts(cache, *publish(cache, ALPHABET))
    assert found(cache, ALPHABET) == 0
    assert cache.set_awaits(MODEL, spell(ALPHABET), Awaits.TOOL) == 24
    assert [node.awaits for node in cache.nodes()] == [Awaits.TOOL]
    assert cache.drop(MODEL, spell(ALPHABET), 8, evicts=False) == (16, 0)
    assert [node.num_blocks for node in cache.nodes()] == [2]
    cache.check()


def test_a_miss_for_a_missing_part_has_a_reason_of_its_own() -> None:
    cache = cache_of()
    blocks = publish(cache, ALPHABET)
    free_parts(cache, blocks[3])
    prompt = spell(ALPHABET[:20] + "!")
    assert cache.explain(MODEL, prompt, 12) is MissReason.NO_WINDOW
    assert cache.explain(MODEL, spell("abc!"), 3) is MissReason.NONE
    assert cache.explain(MODEL, spell("abc!!"), 3) is MissReason.DIVERGED


def test_parts_that_a_lease_found_stay_until_it_is_closed() -> None:
    cache = cache_of(num_parts=11)
    publish(cache, ALPHABET)
    with cache.lease(MODEL, spell(ALPHABET + "!")) as lease:
        assert lease.cached_tokens == 24
        with pytest.raises(OutOfBlocks, match="parts of windowed layers: expected room for 5 blocks more of 11"):
            cache.lease(MODEL, spell("0" * 100))
        cache.check()
    other = cache.lease(MODEL, spell("0" * 100))
    compute(other)
    other.close()
    assert found(cache, ALPHABET + "!") == 24, "parts that a request passed are evicted before those where one ended"
    cache.check()


def test_less_of_a_prompt_has_other_parts_within_reach() -> None:
    """In a full cache, the block that is shared in part is not reused, nor what cannot be used without it."""
    cache = cache_of(num_blocks=6)
    blocks = publish(cache, ALPHABET)
    free_parts(cache, *blocks[2:4])
    prompt = spell(ALPHABET[:22] + "!!")
    assert cache.match(MODEL, prompt).cached_tokens == 22
    with cache.lease(MODEL, prompt) as lease:
        assert (lease.cached_tokens, lease.copy) == (8, None)
        assert lease.block_ids[:2].tolist() == blocks[:2]
        cache.check()


def test_a_held_lease_keeps_what_its_prompt_needs_to_be_found() -> None:
    cache = cache_of(num_parts=14)
    lease = cache.lease(MODEL, spell(ALPHABET))
    compute(lease)
    lease.hold()
    cache.check()
    pool = cache.windows.pools[0]
    assert (pool.num_lasting, pool.num_reserved, pool.num_pinned) == (2, 2, 2)
    for text in "0123":
        publish(cache, text * 60)
    assert found(cache, ALPHABET) == 23
    lease.close()
    assert (pool.num_lasting, pool.num_reserved, pool.num_pinned) == (0, 0, 0)


def test_held_leases_leave_a_request_its_parts() -> None:
    cache = cache_of(num_parts=14)
    leases = [cache.lease(MODEL, spell(text * 20)) for text in "a"]
    for text in "bcd":
        compute(leases[-1])
        leases[-1].hold()
        leases.append(cache.lease(MODEL, spell(text * 20)))
    pool = cache.windows.pools[0]
    assert pool.max_lasting == 3
    assert pool.num_lasting == 2, "one lease's"
    publish(cache, ALPHABET)
    cache.check()


def test_a_public_prefix_keeps_all_its_parts() -> None:
    cache = cache_of(num_blocks=64, num_parts=60)
    prefix = cache.public.register("system", "model", "", spell(ALPHABET))
    with cache.lease(prefix.namespace, prefix.tokens) as lease:
        compute(lease)
    cache.public.activate(prefix)
    cache.check()
    for text in "0123456":
        publish(cache, text * 60)
    assert prefix.namespace.tenant == PUBLIC_TENANT
    assert found(cache, ALPHABET[:9] + "!") == 9, "wherever a prompt diverges from it"
    with cache.lease(MODEL, spell(ALPHABET[:9] + "!" * 9)) as lease:
        compute(lease)
        cache.check()
    assert found(cache, ALPHABET[:9] + "!" * 12) == 18
    cache.public.unregister("system")
    cache.check()
    assert cache.windows.pools[0].num_lasting == 0


def test_a_public_prefix_for_which_there_are_too_few_parts_is_refused() -> None:
    cache = cache_of(num_blocks=64, num_parts=14)
    with pytest.raises(
        OutOfBlocks, match="expected at most 3 that outlive their requests, got more with the 7 of this one"
    ):
        cache.public.register("system", "model", "", spell(ALPHABET))


def test_hits_that_lack_parts_are_counted_with_what_they_leave_out() -> None:
    cache = cache_of()
    blocks = publish(cache, ALPHABET)
    free_parts(cache, *blocks[2:4])
    with cache.lease(MODEL, spell(ALPHABET[:14] + "!")) as lease:
        assert lease.cached_tokens == 8
    with cache.lease(MODEL, spell(ALPHABET + "!")), cache.lease(MODEL, spell(ALPHABET[:14] + "!"), is_resumed=True):
        pass
    stats = cache.windows.stats()
    assert stats is not None
    assert (stats.shortened_hits, stats.lost_tokens) == (1, 6)


def test_parts_are_counted_by_owner() -> None:
    cache = cache_of()
    publish(cache, ALPHABET)
    with cache.lease(MODEL, spell(ALPHABET + "!")) as lease:
        (holder,) = lease.windows
        (pool,) = cache.windows.pools
        stats = cache.windows.stats()
        assert stats is not None
        assert (stats.needed, stats.kept, stats.free) == (len(holder.needed), 6 - len(holder.needed), 8)
        assert stats.given_up == pool.num_evicted == 0


def test_a_cache_without_parts_counts_none() -> None:
    assert PrefixCache(8, 4).windows.stats() is None


def test_a_branch_is_found_after_two_prompts_have_diverged_there() -> None:
    cache = cache_of(num_blocks=200, num_parts=16)
    for number, cached_tokens in ("1", 0), ("2", 0), ("3", 16), ("4", 16):
        text = ALPHABET[:16] + number * 120  # more blocks than there are parts
        with cache.lease(MODEL, spell(text)) as lease:
            assert lease.cached_tokens == cached_tokens
            assert lease.found_tokens == (0 if number == "1" else 16)
            compute(lease)
    cache.check()
