"""Stores below the simulated cache: their hits and writes equal those of an oracle without a tree."""

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

TRACE = os.environ.get("RADIXKV_TRACE")
Block = tuple[int, ...]  # the ids up to its end


def trace(paths: list[Block], num_tokens: list[int] | None = None) -> list[TraceRequest]:
    lengths = num_tokens or [len(path) * TOKENS_PER_ID for path in paths]
    return [TraceRequest(1000.0 * index, lengths[index], 1, path) for index, path in enumerate(paths)]


def replay(
    requests: list[TraceRequest], num_blocks: int, *tiers: tuple[str, int | None], policy: str = "lru"
) -> Simulation:
    rooms = [TierCapacity(name, None if blocks is None else blocks * TOKENS_PER_ID) for name, blocks in tiers]
    return simulate(requests, policy=policy, capacity_tokens=num_blocks * TOKENS_PER_ID, tiers=rooms)


def talks(seed: int) -> list[Block]:
    """Conversations whose prompts begin with all of the one before, so that no node of the tree is used in part."""
    dice, ids = random.Random(seed), iter(range(1000, 10**6))
    open_talks: list[Block] = []
    paths: list[Block] = []
    for _ in range(600):
        begun = open_talks.pop(dice.randrange(len(open_talks))) if open_talks and dice.random() < 0.7 else ()
        paths.append((*begun, *(next(ids) for _ in range(dice.randint(1, 3)))))
        if len(paths[-1]) < 15:
            open_talks.append(paths[-1])
    return paths


def talks_about_documents(seed: int) -> list[Block]:
    """Such conversations, each about one of eight documents."""
    dice = random.Random(seed)
    documents: dict[int, Block] = {}
    paths = talks(seed)
    for path in paths:
        documents.setdefault(path[0], tuple(range(100 * dice.randrange(8), 800))[: dice.randint(1, 6)])
    return [(*documents[path[0]], *path) for path in paths]


class OracleStore:
    """Blocks in the order in which they go: those that are on the device as well, then the others."""

    def __init__(self, num_blocks: int | None) -> None:
        self.num_blocks = num_blocks
        self.spare: list[Block] = []
        self.needed: list[Block] = []
        self.num_written = 0

    def has(self, block: Block) -> bool:
        return block in self.spare or block in self.needed

    def take(self, block: Block, just_gone: set[Block]) -> None:
        if self.has(block):
            (self.spare if block in self.spare else self.needed).remove(block)
        else:
            if len(self.spare) + len(self.needed) == self.num_blocks:
                just_gone.add((self.spare or self.needed).pop(0))
            self.num_written += block not in just_gone
            just_gone.discard(block)
        self.needed.append(block)

    def note_loaded(self, block: Block) -> None:
        if self.has(block):
            (self.spare if block in self.spare else self.needed).remove(block)
            self.spare.append(block)


def oracle(paths: list[Block], num_blocks: int, *tiers: tuple[str, int | None]) -> dict[str, tuple[int, int, int]]:
    """Replay whole blocks with LRU. Returns blocks hit, written and held at the end, for the device and each tier."""
    used_at: dict[Block, int] = {}
    stores = {name: OracleStore(size) for name, size in tiers}
    hits: Counter[str] = Counter()
    for now, path in enumerate(paths):
        blocks = [path[: end + 1] for end in range(len(path))]
        there = next(index for index, block in enumerate(blocks) if block not in used_at)
        hits["device"] += there
        loaded = []
        for block in blocks[there:]:
            name = next((name for name, store in stores.items() if store.has(block)), None)
            if name is None:
                break
            hits[name] += 1
            loaded.append(block)
        just_gone: dict[str, set[Block]] = {name: set() for name in stores}
        while len(used_at) + len(blocks) - there > num_blocks:
            rest = [block for block in used_at if block not in blocks[:there]]
            victim = min(rest, key=lambda block: (used_at[block], -len(block)))
            del used_at[victim]
            for name, store in stores.items():
                store.take(victim, just_gone[name])
        used_at.update(dict.fromkeys(blocks, now))
        for block in reversed(loaded):
            for store in stores.values():
                store.note_loaded(block)
    counts = {name: (hits[name], each.num_written, len(each.spare + each.needed)) for name, each in stores.items()}
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
    paths = talks(seed)
    done = replay(trace(paths), num_blocks, *tiers)
    counts = oracle(paths, num_blocks, *tiers)
    assert done.device_tokens == counts["device"][0] * TOKENS_PER_ID
    assert [(tier.cached_tokens, tier.written_blocks, tier.held_blocks) for tier in done.tiers] == [
        (counts[name][0] * TOKENS_PER_ID, *counts[name][1:]) for name, _ in tiers
    ]
    assert done.cached_tokens == sum(hit for hit, _, _ in counts.values()) * TOKENS_PER_ID
    assert done.tiers[0].cached_tokens > 0


def test_a_tier_without_bound_finds_whatever_a_cache_without_bound_finds() -> None:
    requests = trace(talks_about_documents(0))
    everything = replay(requests, 5000)
    assert everything.evicted_tokens == 0
    done = replay(requests, 30, ("disk", None), policy="adaptive")
    assert done.cached_tokens == everything.cached_tokens > replay(requests, 30, policy="adaptive").cached_tokens


def test_a_block_that_the_device_has_in_part_counts_once() -> None:
    """The device has 100 tokens of block 2 when the last prompt finds the whole block in the store."""
    paths: list[Block] = [(1, 2, 3), (9, 10, 11, 12), (1, 2), (1, 2, 3, 4)]
    done = replay(trace(paths, [1536, 2048, 612, 2048]), 5, ("host", 100))
    assert done.device_tokens == 512 + 612
    assert [tier.cached_tokens for tier in done.tiers] == [1536 - 612]


def test_the_last_token_is_computed_so_its_block_is_not_loaded() -> None:
    done = replay(trace([(1, 2), (3, 4), (1, 2)]), 2, ("host", 100))
    assert done.cached_tokens == done.tiers[0].cached_tokens == 512


def test_a_prompt_longer_than_the_cache_leaves_tiers_alone() -> None:
    done = replay(trace([(1, 2, 3), (1, 2, 3)]), 2, ("host", 100))
    assert (done.cached_tokens, done.tiers[0].written_blocks) == (0, 0)


def test_without_tiers_all_hits_are_the_devices() -> None:
    done = replay(trace(talks_about_documents(0)), 40)
    assert done.tiers == ()
    assert done.device_tokens == done.cached_tokens


def test_the_same_trace_gives_the_same_counts() -> None:
    one, other = (
        replay(trace(talks_about_documents(1)), 40, ("host", 60), ("disk", None), policy="adaptive") for _ in range(2)
    )
    assert (one.tiers, one.cached_tokens) == (other.tiers, other.cached_tokens)


@pytest.mark.parametrize("host_blocks", [7, 60, None])
def test_the_optimum_is_one_cache_with_the_room_of_all(host_blocks: int | None) -> None:
    requests = trace(talks_about_documents(2))
    bound = replay(requests, 25, ("host", host_blocks), policy=OPTIMAL)
    assert (bound.capacity_tokens, bound.tiers) == (25 * TOKENS_PER_ID, ())
    assert bound.cached_tokens == replay(requests, 25 + (host_blocks or 5000), policy=OPTIMAL).cached_tokens
    for policy in ("lru", "adaptive"):
        assert replay(requests, 25, ("host", host_blocks), policy=policy).cached_tokens <= bound.cached_tokens


@pytest.mark.parametrize(
    ("rooms", "message"),
    [
        ([TierCapacity("host", 4096), TierCapacity("host", None)], r"^tier host: expected each tier once, got 2$"),
        (
            [TierCapacity("disk", 511)],
            r"^tier disk: expected room for at least a block of 512 tokens, got 511 tokens$",
        ),
    ],
)
def test_tiers_that_make_no_sense_are_refused(rooms: list[TierCapacity], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_tiers(rooms, 512)
    with pytest.raises(ConfigError, match=message):
        simulate(trace([(1,)]), policy="lru", capacity_tokens=512, tiers=rooms)


@pytest.mark.parametrize(("block_size", "token_bytes"), [(16, 4096), (64, 1536), (17, 37)])
def test_bytes_are_the_tokens_that_stores_have_room_for(tmp_path: Path, block_size: int, token_bytes: int) -> None:
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


def test_bytes_without_room_for_a_block_are_refused() -> None:
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
def test_device_and_host_find_on_the_trace_what_one_cache_of_both_finds() -> None:
    host = [TierCapacity("host", HOST_TOKENS)]
    both = simulate(conversations(), policy="adaptive", capacity_tokens=DEVICE_TOKENS, tiers=host)
    one = simulate(conversations(), policy="adaptive", capacity_tokens=DEVICE_TOKENS + HOST_TOKENS)
    assert one.token_hit_rate <= both.token_hit_rate <= one.token_hit_rate + 0.005


@needs_trace
@pytest.mark.slow
def test_with_a_disk_without_bound_nearly_nothing_on_the_trace_is_computed_twice() -> None:
    tiers = [TierCapacity("host", HOST_TOKENS), TierCapacity("disk", None)]
    done = simulate(conversations(), policy="adaptive", capacity_tokens=DEVICE_TOKENS, tiers=tiers)
    assert 0.370 <= done.token_hit_rate <= 0.3737
    assert all(tier.cached_tokens > 0 for tier in done.tiers)
