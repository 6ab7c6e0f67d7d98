"""Tiers below the simulated cache: their hits and writes equal those of an oracle without a tree."""

from __future__ import annotations

import os
import random
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from radixkv.errors import ConfigError
from radixkv.planning.simulate import OPTIMAL, Simulation, simulate
from radixkv.planning.tiers import TierCapacity, check_tiers, tier_capacity_tokens
from radixkv.planning.trace import TOKENS_PER_ID, TraceRequest, load_trace

from .traces import trace

TRACE = os.environ.get("RADIXKV_TRACE")
Block = tuple[int, ...]  # a block, identified by the ids of its prompt up to its end


def replay(
    requests: list[TraceRequest], num_blocks: int, *tiers: tuple[str, int | None], policy: str = "lru"
) -> Simulation:
    """Simulate a device of `num_blocks` blocks above tiers, each with its name and its blocks; None if unbounded."""
    capacities = [
        TierCapacity(name, None if tier_blocks is None else tier_blocks * TOKENS_PER_ID) for name, tier_blocks in tiers
    ]
    return simulate(requests, policy=policy, capacity_tokens=num_blocks * TOKENS_PER_ID, tiers=capacities)


def chats(seed: int) -> list[Block]:
    """Return the prompts of conversations.

    Each prompt begins with the whole prompt before it in its conversation, so no node of the tree is used in part.
    """
    dice, ids = random.Random(seed), iter(range(1000, 10**6))
    open_chats: list[Block] = []
    paths: list[Block] = []
    for _ in range(600):
        history: Block = ()
        if open_chats and dice.random() < 0.7:
            history = open_chats.pop(dice.randrange(len(open_chats)))
        paths.append((*history, *(next(ids) for _ in range(dice.randint(1, 3)))))
        if len(paths[-1]) < 15:
            open_chats.append(paths[-1])
    return paths


def chats_about_documents(seed: int) -> list[Block]:
    """Return the prompts of `chats`, each after the beginning of one of eight documents."""
    dice = random.Random(seed)
    documents: dict[int, Block] = {}  # by the first id of a conversation
    paths = chats(seed)
    for path in paths:
        first_id = 100 * dice.randrange(8)
        documents.setdefault(path[0], tuple(range(first_id, first_id + dice.randint(1, 6))))
    return [(*documents[path[0]], *path) for path in paths]


class OracleTier:
    """The blocks of a tier in eviction order: first those that are also on the device, then the others."""

    def __init__(self, max_blocks: int | None) -> None:
        self.max_blocks = max_blocks
        self.also_on_device: list[Block] = []
        self.only_here: list[Block] = []
        self.num_written = 0

    @property
    def num_blocks(self) -> int:
        return len(self.also_on_device) + len(self.only_here)

    def has(self, block: Block) -> bool:
        return block in self.also_on_device or block in self.only_here

    def store(self, block: Block, evicted_now: set[Block]) -> None:
        """Store a block that the device evicts, after evicting another one if the tier is full.

        Args:
            block: the block.
            evicted_now: blocks that this request has evicted from the tier, of which none is written; updated.
        """
        if self.has(block):
            self._remove(block)
        else:
            if self.num_blocks == self.max_blocks:
                evicted_now.add((self.also_on_device or self.only_here).pop(0))
            self.num_written += block not in evicted_now
            evicted_now.discard(block)
        self.only_here.append(block)

    def note_loaded(self, block: Block) -> None:
        if self.has(block):
            self._remove(block)
            self.also_on_device.append(block)

    def _remove(self, block: Block) -> None:
        (self.also_on_device if block in self.also_on_device else self.only_here).remove(block)


def oracle(paths: list[Block], num_blocks: int, *tiers: tuple[str, int | None]) -> dict[str, tuple[int, int, int]]:
    """Replay full blocks with LRU. Returns blocks hit, written and held at the end, for the device and each tier."""
    last_used: dict[Block, int] = {}  # blocks on the device, with the index of the last request that used them
    oracle_tiers = {name: OracleTier(max_blocks) for name, max_blocks in tiers}
    hits: Counter[str] = Counter()
    for index, path in enumerate(paths):
        blocks = [path[: end + 1] for end in range(len(path))]
        num_device_hits = next(end for end, block in enumerate(blocks) if block not in last_used)
        hits["device"] += num_device_hits
        loaded = []
        for block in blocks[num_device_hits:]:
            tier_name = next((name for name, tier in oracle_tiers.items() if tier.has(block)), None)
            if tier_name is None:
                break
            hits[tier_name] += 1
            loaded.append(block)
        evicted_now: dict[str, set[Block]] = {name: set() for name in oracle_tiers}
        while len(last_used) + len(blocks) - num_device_hits > num_blocks:
            evictable = [block for block in last_used if block not in blocks[:num_device_hits]]
            victim = min(evictable, key=lambda block: (last_used[block], -len(block)))
            del last_used[victim]
            for name, tier in oracle_tiers.items():
                tier.store(victim, evicted_now[name])
        last_used.update(dict.fromkeys(blocks, index))
        for block in reversed(loaded):
            for tier in oracle_tiers.values():
                tier.note_loaded(block)
    counts = {name: (hits[name], tier.num_written, tier.num_blocks) for name, tier in oracle_tiers.items()}
    return {"device": (hits["device"], 0, 0), **counts}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("num_blocks", "tiers"),
    [
        (40, [("host", 100)]),
        (40, [("host", 7)]),
        (25, [("host", 60), ("disk", 200)]),
        (25, [("host", 200), ("disk", 60)]),
        (60, [("host", 50), ("disk", None)]),
    ],
    ids=str,
)
def test_hits_and_writes_are_those_of_the_oracle(
    num_blocks: int, tiers: list[tuple[str, int | None]], seed: int
) -> None:
    paths = chats(seed)
    done = replay(trace(paths), num_blocks, *tiers)
    counts = oracle(paths, num_blocks, *tiers)
    assert done.device_tokens == counts["device"][0] * TOKENS_PER_ID
    for tier, (name, _) in zip(done.tiers, tiers, strict=True):
        num_hit, num_written, num_held = counts[name]
        assert (tier.cached_tokens, tier.written_blocks) == (num_hit * TOKENS_PER_ID, num_written)
        assert tier.held_blocks == num_held
    assert done.cached_tokens == sum(num_hit for num_hit, _, _ in counts.values()) * TOKENS_PER_ID
    assert done.tiers[0].cached_tokens > 0


def test_a_tier_without_bound_reuses_whatever_a_cache_without_bound_reuses() -> None:
    requests = trace(chats_about_documents(0))
    unbounded = replay(requests, 5000)
    assert unbounded.evicted_tokens == 0
    with_disk = replay(requests, 30, ("disk", None), policy="adaptive")
    without_disk = replay(requests, 30, policy="adaptive")
    assert with_disk.cached_tokens == unbounded.cached_tokens > without_disk.cached_tokens


def test_a_block_that_the_device_has_in_part_counts_once() -> None:
    """The device has 100 tokens of block 2 when the last prompt finds the whole block in the tier."""
    paths: list[Block] = [(1, 2, 3), (9, 10, 11, 12), (1, 2), (1, 2, 3, 4)]
    done = replay(trace(paths, prompt_lengths=[1536, 2048, 612, 2048]), 5, ("host", 100))
    assert done.device_tokens == 512 + 612
    assert [tier.cached_tokens for tier in done.tiers] == [1536 - 612]


def test_the_last_token_is_computed_so_its_block_is_not_loaded() -> None:
    done = replay(trace([(1, 2), (3, 4), (1, 2)]), 2, ("host", 100))
    assert done.cached_tokens == done.tiers[0].cached_tokens == 512


def test_a_prompt_longer_than_the_cache_leaves_tiers_alone() -> None:
    done = replay(trace([(1, 2, 3), (1, 2, 3)]), 2, ("host", 100))
    assert (done.cached_tokens, done.tiers[0].written_blocks) == (0, 0)


def test_without_tiers_all_hits_are_on_the_device() -> None:
    done = replay(trace(chats_about_documents(0)), 40)
    assert done.tiers == ()
    assert done.device_tokens == done.cached_tokens


def test_the_same_trace_gives_the_same_counts() -> None:
    first, second = (
        replay(trace(chats_about_documents(1)), 40, ("host", 60), ("disk", None), policy="adaptive") for _ in range(2)
    )
    assert (first.tiers, first.cached_tokens) == (second.tiers, second.cached_tokens)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("host_blocks", [7, 60, None])
def test_the_optimum_is_that_of_one_cache_with_the_total_capacity(host_blocks: int | None) -> None:
    requests = trace(chats_about_documents(2))
    bound = replay(requests, 25, ("host", host_blocks), policy=OPTIMAL)
    assert (bound.capacity_tokens, bound.tiers) == (25 * TOKENS_PER_ID, ())
    assert bound.cached_tokens == replay(requests, 25 + (host_blocks or 5000), policy=OPTIMAL).cached_tokens
    for policy in ("lru", "adaptive"):
        assert replay(requests, 25, ("host", host_blocks), policy=policy).cached_tokens <= bound.cached_tokens


@pytest.mark.parametrize(
    ("capacities", "message"),
    [
        ([TierCapacity("host", 4096), TierCapacity("host", None)], r"^tier host: expected each tier once, got 2$"),
        (
            [TierCapacity("disk", 511)],
            r"^tier disk: expected room for at least a block of 512 tokens, got 511 tokens$",
        ),
    ],
)
def test_repeated_and_too_small_tiers_are_refused(capacities: list[TierCapacity], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_tiers(capacities, 512)
    with pytest.raises(ConfigError, match=message):
        simulate(trace([(1,)]), policy="lru", capacity_tokens=512, tiers=capacities)


@pytest.mark.parametrize(("block_size", "token_bytes"), [(16, 4096), (64, 1536), (17, 37)])
def test_a_size_in_bytes_has_the_capacity_in_tokens_of_the_real_store(
    tmp_path: Path, block_size: int, token_bytes: int
) -> None:
    pytest.importorskip("torch")
    from radixkv.offload.block_keys import BlockFormat
    from radixkv.offload.tiers.block_object import object_bytes
    from radixkv.offload.tiers.disk import DiskStore
    from radixkv.offload.tiers.host import HostStore, map_memory

    num_bytes, payload_bytes = 10_000_001, block_size * token_bytes
    slot_bytes = object_bytes(block_size, payload_bytes)
    host = HostStore(map_memory(num_bytes), slot_bytes)
    block_format = BlockFormat("model", "float32", "fp32", "by block", block_size, payload_bytes, "cpu")
    disk = DiskStore(tmp_path, block_format, slot_bytes, num_bytes)
    for name, store in (("host", host), ("disk", disk)):
        num_blocks = store.size().max_objects
        assert num_blocks is not None
        assert tier_capacity_tokens(name, num_bytes, token_bytes, block_size) == num_blocks * block_size
    disk.close()


def test_a_size_below_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^tier disk: expected room for a block, 69632 bytes, got 69631$"):
        tier_capacity_tokens("disk", 69_631, token_bytes=1024, block_size=64)


needs_trace = pytest.mark.skipif(TRACE is None, reason="RADIXKV_TRACE names no conversation trace")
DEVICE_TOKENS, HOST_TOKENS = 2_560_000, 10_240_000


@cache
def conversations() -> list[TraceRequest]:
    assert TRACE is not None
    return load_trace(TRACE)


@needs_trace
@pytest.mark.slow
def test_on_the_trace_device_and_host_reuse_as_much_as_one_cache_of_both_sizes() -> None:
    host = [TierCapacity("host", HOST_TOKENS)]
    two_tiers = simulate(conversations(), policy="adaptive", capacity_tokens=DEVICE_TOKENS, tiers=host)
    one_cache = simulate(conversations(), policy="adaptive", capacity_tokens=DEVICE_TOKENS + HOST_TOKENS)
    assert one_cache.token_hit_rate <= two_tiers.token_hit_rate <= one_cache.token_hit_rate + 0.005


@needs_trace
@pytest.mark.slow
def test_on_the_trace_hardly_anything_is_computed_twice_with_an_unbounded_disk() -> None:
    tiers = [TierCapacity("host", HOST_TOKENS), TierCapacity("disk", None)]
    done = simulate(conversations(), policy="adaptive", capacity_tokens=DEVICE_TOKENS, tiers=tiers)
    unbounded_hit_rate = 0.3737  # of a cache that evicts nothing
    assert 0.370 <= done.token_hit_rate <= unbounded_hit_rate
    assert all(tier.cached_tokens > 0 for tier in done.tiers)
