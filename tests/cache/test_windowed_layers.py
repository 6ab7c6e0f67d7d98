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

BLOCKS = np.arange(10, 26, dtype=np.int32)  # the blocks of a prompt, of two tokens each


def pool_of(num_parts: int = 12) -> WindowPool:
    return WindowPool(30, num_parts, block_size=2, reach=Reach(3), step_tokens=4)


def with_part(pool: WindowPool) -> list[int]:
    """Return the ids of the blocks that have a part."""
    return np.flatnonzero(pool.table >= 0).tolist()


def test_a_long_request_needs_no_more_than_its_reach_and_its_step() -> None:
    pool = pool_of()
    window_lease = WindowLease(pool, 0)
    max_pinned = 0
    for start in range(0, 32, 4):
        window_lease.cover(BLOCKS, start, start + 4)
        max_pinned = max(max_pinned, pool.num_pinned)
        window_lease.settle(start + 4)
        assert pool.num_pinned == 2  # three tokens before an even position lie in two blocks
    assert max_pinned == 4
    assert pool.num_evicted == 4  # sixteen blocks were written, and there are twelve parts


def test_the_table_holds_what_is_within_reach() -> None:
    pool = pool_of()
    window_lease = WindowLease(pool, 0)
    window_lease.cover(BLOCKS, 0, 8)
    window_lease.settle(8)
    cover = window_lease.cover(BLOCKS, 8, 9)
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


def test_a_step_that_is_computed_in_part_is_settled_where_it_ended() -> None:
    pool = pool_of()
    window_lease = WindowLease(pool, 0)
    window_lease.cover(BLOCKS, 0, 8)
    window_lease.settle(3)
    assert sorted(window_lease.needed) == [10, 11]
    assert pool.num_unpinned == 2


def test_a_copied_block_is_kept_until_the_copy_is_made() -> None:
    pool = pool_of()
    first = WindowLease(pool, 0)
    first.cover(BLOCKS, 0, 6)
    first.settle(6)
    first.close()
    second = WindowLease(pool, 0)
    second.pin_hit(BLOCKS[:3], 5)
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
    assert {10, 11} <= set(with_part(pool)), "where one prompt continued, another one may continue"
    assert 14 not in with_part(pool)


def test_a_missing_part_in_the_window_is_detected() -> None:
    pool = pool_of()
    window_lease = WindowLease(pool, 0)
    with pytest.raises(InvariantViolation, match="each block in the window to have its part"):
        window_lease.cover(BLOCKS, 4, 6)
    with pytest.raises(InvariantViolation, match="each block in the window to have its part"):
        window_lease.pin_hit(BLOCKS, 3)


def test_a_lease_that_keeps_all_parts_passes_none() -> None:
    pool = pool_of(16)
    window_lease = WindowLease(pool, 0, keeps_all=True)
    for start in range(0, 20, 4):
        window_lease.cover(BLOCKS, start, start + 4)
        window_lease.settle(start + 4)
    assert sorted(window_lease.needed) == BLOCKS[:10].tolist()


def test_an_exchanged_block_is_evicted_in_the_place_of_the_old_one() -> None:
    pool = pool_of()
    window_lease = WindowLease(pool, 0)
    window_lease.cover(BLOCKS, 0, 4)
    window_lease.exchange(11, 28)
    assert sorted(window_lease.needed) == [10, 28]
    window_lease.settle(8)
    assert window_lease.needed == []


def test_closing_releases_reserved_parts_once() -> None:
    pool = pool_of()
    pool.reserve(4)
    window_lease = WindowLease(pool, 4)
    window_lease.cover(BLOCKS, 0, 4)
    window_lease.close()
    window_lease.close()
    assert (pool.num_reserved, pool.num_pinned, pool.num_unpinned) == (0, 0, 2)


def test_loaded_blocks_get_parts_where_the_next_token_reaches() -> None:
    pool = pool_of()
    other = WindowLease(pool, 0)
    other.cover(BLOCKS, 0, 6)
    other.close()
    pool.free_parts(BLOCKS[:1])
    # Of the first three blocks, which are in a tree, two have their parts. Three more blocks are loaded.
    window_lease = WindowLease(pool, 0)
    assert window_lease.receive(BLOCKS, 6) == [4, 5]
    assert sorted(window_lease.needed) == [14, 15]
    assert window_lease.part_of(14) == pool.table[14]
    window_lease.settle(12)
    assert window_lease.cover(BLOCKS, 12, 14).part_ids.tolist() == [0, 0, 0, 0, *pool.table[[14, 15, 16]]]


def test_cached_parts_are_not_evicted_for_loaded_ones() -> None:
    pool = pool_of(num_parts=7)
    pool.pin([14, 15, 25, 26, 27, 28, 29])
    pool.unpin_ends([14, 15, 25, 26, 27, 28, 29])
    before = pool.table[[14, 15]].tolist()
    window_lease = WindowLease(pool, 0, keeps_all=True)
    assert window_lease.receive(BLOCKS, 6) == [0, 1, 2, 3]
    assert pool.table[[14, 15]].tolist() == before, "although these parts were used least recently"
    assert with_part(pool) == [10, 11, 12, 13, 14, 15, 29]


def test_parts_from_which_others_may_continue_outlast_passed_ones() -> None:
    pool = pool_of(num_parts=8)
    window_lease = WindowLease(pool, 0)
    window_lease.note_divergence(
        8
    )  # to continue after 8 tokens, the tokens at 5 to 7 are needed, in the third and fourth block
    for start in range(0, 32, 4):
        window_lease.cover(BLOCKS, start, start + 4)
        window_lease.settle(start + 4)
    window_lease.close()
    assert pool.num_evicted == 8
    assert with_part(pool)[:2] == [12, 13]


def test_the_parts_that_compute_the_last_token_again_are_kept() -> None:
    pool = pool_of()
    window_lease = WindowLease(pool, 0)
    window_lease.cover(BLOCKS, 0, 9)
    window_lease.settle(9)
    assert sorted(window_lease.needed) == [12, 13, 14], (
        "the tokens at 5 to 7, before the last token, begin in the third block"
    )


SIZE = 4  # tokens per block, from here on
NUM_BLOCKS = 200
STEP_TOKENS = 11
UNWRITTEN = ()

Prefix = tuple[int, ...]  # as the content of a slot: the tokens up to the one whose K/V it holds


def groups_of(*reaches: Reach, num_parts: int) -> WindowedLayers:
    return WindowedLayers([WindowPool(NUM_BLOCKS, num_parts, SIZE, reach, STEP_TOKENS) for reach in reaches])


def open_window_leases(
    groups: WindowedLayers, block_ids: BlockIds, cached_tokens: int, num_tokens: int
) -> tuple[WindowLease, ...]:
    """Pin what a request found, and reserve what it may need."""
    window_leases = groups.pin(block_ids, cached_tokens, num_tokens)
    groups.reserve(window_leases)
    return window_leases


def test_without_groups_everything_is_found_and_nothing_is_kept() -> None:
    groups = WindowedLayers()
    ids = np.arange(3, dtype=np.int32)
    assert groups.num_reusable_tokens(ids.tobytes(), 11) == 11
    assert open_window_leases(groups, ids, 11, 20) == ()
    groups.check([], ids)


def test_a_prompt_is_found_as_far_as_every_group_has_what_it_needs() -> None:
    groups = groups_of(Reach(4), Reach(9), num_parts=12)
    first, second = groups.pools
    first.pin(range(5))
    second.pin([0, 2, 3, 4])
    ids = np.arange(5, dtype=np.int32).tobytes()
    assert groups.num_reusable_tokens(ids, 19) == 19
    assert groups.num_reusable_tokens(ids, 16) == 4, (
        "the second group needs the tokens at 7 to 15, and lacks a part of them"
    )
    first.unpin_passed({0: 0}, 1)
    first.free_parts(np.array([0], dtype=np.int32))
    assert groups.num_reusable_tokens(ids, 16) == 0, (
        "the second group could reuse 4 tokens, but the first group has no part of them"
    )


def test_a_group_without_room_leaves_the_others_unchanged() -> None:
    groups = groups_of(Reach(4), Reach(30), num_parts=20)
    window_leases = open_window_leases(groups, np.empty(0, dtype=np.int32), 0, 100)
    assert [window_lease.num_reserved for window_lease in window_leases] == [4, 11]
    with pytest.raises(OutOfBlocks, match="expected room for 11 blocks more of 20"):
        open_window_leases(groups, np.empty(0, dtype=np.int32), 0, 100)
    groups.check([window_leases], np.arange(NUM_BLOCKS))
    groups.require_room(20)


@dataclass
class Running:
    """A request that computes its prompt in steps."""

    prompt: Prefix
    blocks: np.ndarray
    window_leases: tuple[WindowLease, ...]
    copy: BlockCopy | None
    upto: int  # number of computed tokens
    num_cached_blocks: int  # blocks at the beginning that belong to the cache, and not to the request


@dataclass
class PartWalk:
    """Random requests, and a dictionary as their cache. Each slot of a part remembers the prefix that it holds."""

    groups: WindowedLayers
    dice: random.Random
    cached: dict[Prefix, int] = field(default_factory=dict)  # block ids, by all tokens up to the end of the block
    running: list[Running] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.free = list(range(NUM_BLOCKS))
        # By group, part and offset.
        self.content = [[[UNWRITTEN] * SIZE for _ in range(pool.num_parts)] for pool in self.groups.pools]

    def step(self) -> None:
        self.dice.choices((self.admit, self.compute, self.end, self.evict), (3, 6, 2, 1))[0]()
        self.groups.check([each.window_leases for each in self.running], np.array(self.free, dtype=np.int32))

    def find(self, prompt: Prefix) -> tuple[list[int], int]:
        """Return the blocks of the longest cached beginning of a prompt, and its number of tokens."""
        blocks: list[int] = []
        while (block := self.cached.get(prompt[: (len(blocks) + 1) * SIZE])) is not None:
            blocks.append(block)
            if len(blocks) * SIZE >= len(prompt):
                return blocks, len(prompt)
        start = len(blocks) * SIZE
        # The last block may be shared in part.
        for end in range(min(start + SIZE, len(prompt)), start, -1):
            for prefix, block in self.cached.items():
                if len(prefix) == start + SIZE and prefix[:end] == prompt[:end]:
                    return [*blocks, block], end
        return blocks, start

    def admit(self) -> None:
        prompt: Prefix = ()
        if self.cached and self.dice.random() < 0.8:
            base = self.dice.choice(list(self.cached))
            prompt = base[: self.dice.randint(1, len(base))]
        prompt += tuple(self.dice.randrange(2) for _ in range(self.dice.randint(1, 40 if len(prompt) < 60 else 2)))
        found_blocks, num_found_tokens = self.find(prompt)
        num_found_tokens = min(num_found_tokens, len(prompt) - 1)  # the last token is always computed
        ids = np.array(found_blocks, dtype=np.int32)
        cached_tokens = self.groups.num_reusable_tokens(ids.tobytes(), num_found_tokens)
        num_whole_blocks, num_tokens_in_copy = divmod(cached_tokens, SIZE)
        num_new_blocks = -(-len(prompt) // SIZE) - num_whole_blocks
        if num_new_blocks > len(self.free):
            return
        try:
            window_leases = open_window_leases(self.groups, ids, cached_tokens, len(prompt))
        except OutOfBlocks:
            assert self.running, "one request always has room"
            self.events["refused"] += 1
            return
        new_blocks = [self.free.pop(self.dice.randrange(len(self.free))) for _ in range(num_new_blocks)]
        copy = BlockCopy(found_blocks[num_whole_blocks], new_blocks[0]) if num_tokens_in_copy else None
        blocks = np.array([*found_blocks[:num_whole_blocks], *new_blocks], dtype=np.int32)
        self.running.append(Running(prompt, blocks, window_leases, copy, cached_tokens, num_whole_blocks))
        self.events["cut short"] += cached_tokens < num_found_tokens
        self.events["found"] += cached_tokens > 0
        self.events["copies"] += num_tokens_in_copy > 0

    def compute(self) -> None:
        """Compute one step of several requests, settle their window leases, and publish; or fail, and only settle."""
        budget_tokens = STEP_TOKENS
        chosen: list[tuple[Running, int]] = []
        for each in self.dice.sample(self.running, len(self.running)):
            num_tokens = min(budget_tokens, len(each.prompt) - each.upto, self.dice.choice((1, 3, STEP_TOKENS)))
            if num_tokens > 0:
                budget_tokens -= num_tokens
                chosen.append((each, num_tokens))
        covers = [
            [
                window_lease.cover(each.blocks, each.upto, each.upto + num_tokens, each.copy)
                for window_lease in each.window_leases
            ]
            for each, num_tokens in chosen
        ]
        fails = self.dice.random() < 0.1
        for (each, num_tokens), covers_of_request in zip(chosen, covers, strict=True):
            for memory, cover, pool in zip(self.content, covers_of_request, self.groups.pools, strict=True):
                if cover.copy is not None:
                    memory[cover.copy.target] = list(memory[cover.copy.source])
                for position in range(pool.reach.first_token(each.upto), each.upto):
                    slot = memory[cover.part_ids[position // SIZE]][position % SIZE]
                    assert slot == each.prompt[: position + 1], f"token {position} is not what was computed"
                for position in range(each.upto, each.upto + num_tokens):
                    memory[cover.part_ids[position // SIZE]][position % SIZE] = each.prompt[: position + 1]
            if fails:
                for window_lease in each.window_leases:
                    window_lease.settle(each.upto, each.copy)
                self.events["tried again"] += 1
                continue
            each.upto, each.copy = each.upto + num_tokens, None
            for window_lease in each.window_leases:
                window_lease.settle(each.upto)
            self.publish(each)

    def publish(self, each: Running) -> None:
        """Publish whole blocks. If another request published an equal block first, adopt it."""
        for index in range(each.num_cached_blocks, each.upto // SIZE):
            prefix, own_block = each.prompt[: (index + 1) * SIZE], int(each.blocks[index])
            cached_block = self.cached.setdefault(prefix, own_block)
            if cached_block != own_block:
                old, new = np.array([own_block], dtype=np.int32), np.array([cached_block], dtype=np.int32)
                self.groups.exchange(each.window_leases, old, new)
                self.release([own_block])
                each.blocks[index] = cached_block
                self.events["adopted"] += 1
            each.num_cached_blocks = index + 1

    def end(self) -> None:
        if self.running:
            each = self.running.pop(self.dice.randrange(len(self.running)))
            for window_lease in each.window_leases:
                window_lease.close()
            self.release(each.blocks[each.num_cached_blocks :].tolist())

    def evict(self) -> None:
        """Evict up to four unused cached blocks that no other block continues."""
        used = {int(block) for each in self.running for block in each.blocks}
        used |= {each.copy.source for each in self.running if each.copy is not None}
        continued = {prefix[: len(prefix) - SIZE] for prefix in self.cached}
        leaves = [prefix for prefix, block in self.cached.items() if block not in used and prefix not in continued]
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
        for window_lease in running.window_leases:
            window_lease.close()
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
    groups = groups_of(Reach(8), num_parts=12)  # the reach is two blocks
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
    groups = groups_of(Reach(8), Reach(12), num_parts=12)  # the reaches are two and three blocks
    blocks = np.arange(1, dtype=np.int32)
    groups.pools[1].pin([0])
    loaded = [True, False, True, True]
    assert groups.num_usable(blocks, loaded) == 0, (
        "after one loaded block, the first group needs the part of the block before it"
    )
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


WINDOW = 7  # the token after a hit sees itself and the 6 tokens before it
ALPHABET = "abcdefghijklmnopqrstuvwx"


def cache_of(num_blocks: int = 32, num_parts: int = 14) -> PrefixCache:
    pool = WindowPool(num_blocks, num_parts, block_size=4, reach=Reach.of_window(WINDOW), step_tokens=8)
    return PrefixCache(num_blocks, 4, windows=WindowedLayers([pool]))


def compute(lease: Lease, upto: int | None = None) -> None:
    """Compute and publish in steps of eight tokens."""
    upto, start = upto or lease.num_tokens, lease.committed_tokens
    (window_lease,) = lease.windows
    while start < upto:
        end = min(upto, start + 8)
        window_lease.cover(lease.block_ids, start, end, lease.copy)
        lease.copy = None
        window_lease.settle(end)
        lease.commit(end)
        start = end


def publish(cache: PrefixCache, text: str) -> list[int]:
    with cache.lease(MODEL, spell(text)) as lease:
        compute(lease)
        return lease.block_ids.tolist()


def free_parts(cache: PrefixCache, *block_ids: int) -> None:
    cache.windows.free_parts(np.array(block_ids, dtype=np.int32))


def cached_tokens_of(cache: PrefixCache, text: str) -> int:
    return cache.match(MODEL, spell(text)).cached_tokens


def test_a_hit_needs_only_what_is_within_reach_of_its_end() -> None:
    cache = cache_of()
    blocks = publish(cache, ALPHABET)
    free_parts(cache, *blocks[:4])
    assert cached_tokens_of(cache, ALPHABET + "!") == 24
    assert cached_tokens_of(cache, ALPHABET) == 23
    assert cached_tokens_of(cache, ALPHABET[:22] + "!") == 22, "the tokens at 16 to 21 are in the last two blocks"
    assert cached_tokens_of(cache, ALPHABET[:21] + "!") == 0, "the token at 15 is in a block without a part"


def test_a_hit_is_the_longest_one_whose_parts_are_there() -> None:
    cache = cache_of()
    blocks = publish(cache, ALPHABET)
    free_parts(cache, blocks[3])
    assert cached_tokens_of(cache, ALPHABET[:20] + "!") == 12
    with cache.lease(MODEL, spell(ALPHABET[:20] + "!")) as lease:
        assert (lease.cached_tokens, lease.copy) == (12, None)
        assert lease.block_ids[:3].tolist() == blocks[:3]
        compute(lease)
        cache.check()
    assert cached_tokens_of(cache, ALPHABET[:20] + "!") == 20, (
        "the block of the tree got its missing part from the block that was computed again"
    )
    assert cache.windows.pools[0].table[blocks[3]] >= 0


def test_tokens_that_cannot_be_reused_are_dropped_and_await_what_their_session_awaits() -> None:
    cache = cache_of()
    free_parts(cache, *publish(cache, ALPHABET))
    assert cached_tokens_of(cache, ALPHABET) == 0
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
    assert cached_tokens_of(cache, ALPHABET + "!") == 24, (
        "parts that a request passed are evicted before those where one ended"
    )
    cache.check()


def test_a_hit_is_shortened_to_one_whose_parts_are_there_if_its_last_block_cannot_be_copied() -> None:
    """In a full cache, a block that is shared in part is not reused, nor blocks that lack parts for a shorter hit."""
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
    assert cached_tokens_of(cache, ALPHABET) == 23
    lease.close()
    assert (pool.num_lasting, pool.num_reserved, pool.num_pinned) == (0, 0, 0)


def test_held_leases_leave_a_request_its_parts() -> None:
    cache = cache_of(num_parts=14)
    leases = [cache.lease(MODEL, spell("a" * 20))]
    for text in "bcd":
        compute(leases[-1])
        leases[-1].hold()
        leases.append(cache.lease(MODEL, spell(text * 20)))
    pool = cache.windows.pools[0]
    assert pool.max_lasting == 3
    assert pool.num_lasting == 2, "the parts of one lease"
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
    assert cached_tokens_of(cache, ALPHABET[:9] + "!") == 9, "wherever a prompt diverges from it"
    with cache.lease(MODEL, spell(ALPHABET[:9] + "!" * 9)) as lease:
        compute(lease)
        cache.check()
    assert cached_tokens_of(cache, ALPHABET[:9] + "!" * 12) == 18
    cache.public.unregister("system")
    cache.check()
    assert cache.windows.pools[0].num_lasting == 0


def test_a_public_prefix_for_which_there_are_too_few_parts_is_refused() -> None:
    cache = cache_of(num_blocks=64, num_parts=14)
    with pytest.raises(
        OutOfBlocks, match="expected at most 3 that outlive their requests, got more with the 7 of this one"
    ):
        cache.public.register("system", "model", "", spell(ALPHABET))


def test_hits_that_lack_parts_are_counted_with_the_tokens_that_they_lose() -> None:
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
        (window_lease,) = lease.windows
        (pool,) = cache.windows.pools
        stats = cache.windows.stats()
        assert stats is not None
        assert (stats.needed, stats.kept, stats.free) == (len(window_lease.needed), 6 - len(window_lease.needed), 8)
        assert stats.given_up == pool.num_evicted == 0


def test_a_cache_without_parts_counts_none() -> None:
    assert PrefixCache(8, 4).windows.stats() is None


def test_a_branch_is_found_after_two_prompts_have_diverged_there() -> None:
    cache = cache_of(num_blocks=200, num_parts=16)
    for suffix, cached_tokens in ("1", 0), ("2", 0), ("3", 16), ("4", 16):
        text = ALPHABET[:16] + suffix * 120  # more blocks than there are parts
        with cache.lease(MODEL, spell(text)) as lease:
            assert lease.cached_tokens == cached_tokens
            assert lease.found_tokens == (0 if suffix == "1" else 16)
            compute(lease)
    cache.check()
