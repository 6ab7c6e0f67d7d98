"""Views of caches, compared with the caches themselves."""

from __future__ import annotations

import random
from concurrent.futures import Future

import numpy as np
import pytest

from radixkv.api.events import DEVICE, AllCleared, BlocksRemoved, BlocksStored, Event, EventBatch, SnapshotPart
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.errors import ConfigError, OutOfBlocks
from radixkv.events.block_identity import Identities
from radixkv.events.event_log import EventLog
from radixkv.events.snapshot import Snapshot
from radixkv.events.tree_feed import TreeFeed
from radixkv.namespace import Namespace
from radixkv.routing.candidate import Hits
from radixkv.routing.fleet_view import FleetView
from radixkv.routing.prompt_blocks import PromptBlocks
from tests.fakes import FakeClock

SIZE = 4  # tokens per block
IDENTITIES = Identities("", bytes(range(32)))
NAMESPACES = (Namespace("m"), Namespace("m", tenant="acme"), Namespace("m", salt="acme"))


class WatchedReplica:
    """A cache whose events reach a view when the test calls `send_batches`."""

    def __init__(self, name: str, num_blocks: int = 24) -> None:
        self.name = name
        self.log = EventLog()
        self.feed = TreeFeed(self.log, SIZE, SIZE, IDENTITIES)
        self.cache = PrefixCache(num_blocks, SIZE, listeners=[self.feed])
        self.feed.switch_on(self.cache.nodes)

    def compute(self, namespace: Namespace, tokens: bytes) -> None:
        try:
            with self.cache.lease(namespace, tokens) as lease:
                lease.commit(lease.num_tokens)
        except OutOfBlocks:
            pass
        self.feed.publish()

    def purge(self, tenant: str | None) -> None:
        self.cache.purge(tenant=tenant)
        self.feed.publish()

    def send_batches(self, view: FleetView, max_batches: int = 2**30) -> None:
        """Send the view the batches that it has not read, preceded by a snapshot if the view needs one."""
        number = view.number_of(self.name)
        if not number:
            snapshot: Future[Snapshot] = Future()
            self.feed.request_snapshot(snapshot)
            self.feed.publish()
            for batch in snapshot.result(0).batches:
                assert view.read(self.name, batch)
            number = view.number_of(self.name)
        for _ in range(max_batches):
            next_batch = self.log.after(number)
            if next_batch is None:
                return
            assert view.read(self.name, next_batch)
            number += 1


def block_hashes(tokens: bytes, namespace: Namespace = NAMESPACES[0]) -> list[int]:
    return PromptBlocks(namespace, tokens, SIZE, IDENTITIES).all()


def prompt(*ids: int) -> bytes:
    return np.array(ids, "<u4").tobytes()


def batch(number: int, *events: Event) -> EventBatch:
    return EventBatch(number, 0.0, events)


def snapshot(number: int, *events: Event) -> EventBatch:
    return EventBatch(number, 0.0, (AllCleared(), *events), SnapshotPart(0, 1, 0))


def stored(*hashes: int, tier: str = DEVICE) -> BlocksStored:
    return BlocksStored(None, np.array(hashes, "<u8").tobytes(), bytes(16 * len(hashes)), SIZE, "", tier)


def removed(*hashes: int, tier: str = DEVICE) -> BlocksRemoved:
    return BlocksRemoved(np.array(hashes, "<u8").tobytes(), "", tier)


def view_of(*names: str, clock: FakeClock | None = None, max_blocks: int = 1000) -> FleetView:
    view = FleetView(SIZE, max_blocks=max_blocks, expect_s=30, clock=clock or FakeClock())
    for name in names:
        view.join(name)
        assert view.read(name, snapshot(1))
    return view


def test_the_view_of_a_random_fleet_agrees_with_its_caches() -> None:
    """Caches evict and are purged, replicas leave and join, and streams of events lag, have gaps and recover."""
    for seed in range(12):
        draw = random.Random(seed)
        view = FleetView(SIZE)
        replicas = [WatchedReplica(name) for name in "abc"]
        joined = set()
        prompts = [
            (draw.choice(NAMESPACES), prompt(*(draw.randrange(3) for _ in range(draw.randrange(1, 40)))))
            for _ in range(40)
        ]
        for _ in range(150):
            replica = draw.choice(replicas)
            event = draw.randrange(12)
            if event < 6:
                replica.compute(*draw.choice(prompts))
            elif event == 6:
                replica.purge(draw.choice((None, "acme", "unknown")))
            elif event == 7 and replica.name in joined:
                view.leave(replica.name)
                joined.remove(replica.name)
            elif event == 7:
                view.join(replica.name)
                joined.add(replica.name)
            elif event == 8 and replica.name in joined and view.is_up_to_date(replica.name):
                after_gap = batch(view.number_of(replica.name) + 2, stored(draw.randrange(9)))
                assert not view.read(replica.name, after_gap)
            elif replica.name in joined:
                replica.send_batches(view, draw.choice((1, 2**30)))
        for replica in replicas:
            if replica.name not in joined:
                view.join(replica.name)
            replica.send_batches(view)
        for namespace, tokens in prompts:
            hits = view.match(block_hashes(tokens, namespace), [replica.name for replica in replicas])
            for replica, replica_hits in zip(replicas, hits, strict=True):
                cached_tokens = replica.cache.match(namespace, tokens).cached_tokens // SIZE * SIZE  # of whole blocks
                assert replica_hits == Hits(device=cached_tokens)


def test_a_match_counts_each_block_in_its_fastest_tier_and_ends_at_a_gap() -> None:
    view = view_of("a", "b", "c")
    assert view.read("a", batch(2, stored(1, 2), stored(2, 3, tier="host"), stored(4, tier="disk")))
    assert view.read("b", batch(2, stored(1, 3, 4), stored(5, 6, tier="redis"), stored(7, tier="another package's")))
    assert view.read("c", batch(2, stored(2, 5, tier="mooncake")))
    assert view.match([1, 2, 3, 4, 5, 7], ["a", "b", "c"]) == [
        Hits(device=8, host=4, disk=4, remote=4),
        Hits(device=12, remote=8),
        Hits(),
    ]
    assert view.read("c", batch(3, removed(5, tier="mooncake")))
    assert view.match([1, 2, 3, 4, 5], ["a"]) == [Hits(device=8, host=4, disk=4, remote=4)], (
        "b has stored block 5 in a shared store, too"
    )
    view.leave("b")
    assert view.match([1, 2, 3, 4, 5], ["a"]) == [Hits(device=8, host=4, disk=4)]


def test_blocks_that_leave_one_tier_are_still_in_the_others() -> None:
    view = view_of("a")
    view.read("a", batch(2, stored(1, 2), stored(1, 2, tier="host")))
    view.read("a", batch(3, removed(2)))
    assert view.match([1, 2], ["a"]) == [Hits(device=4, host=4)]
    view.read("a", batch(4, AllCleared()))
    assert view.match([1, 2], ["a"]) == [Hits(host=8)], "a purge of one tenant may empty the device alone"
    view.read("a", batch(5, stored(1), removed(1, 2, tier="host")))
    assert view.match([1, 2], ["a"]) == [Hits(device=4)]


def test_a_snapshot_replaces_the_known_blocks_of_all_tiers() -> None:
    view = view_of("a")
    tiers = ("host", "disk", "redis")
    view.read("a", batch(2, stored(1, 2), *(stored(1, 2, 3, tier=tier) for tier in tiers)))
    view.read("a", snapshot(7, stored(1), stored(2, tier="disk")))
    assert view.match([1, 2, 3], ["a"]) == [Hits(device=4, disk=4)]


def test_blocks_of_stores_are_refused_before_those_of_devices() -> None:
    view = view_of("a", max_blocks=8)
    view.read("a", batch(2, stored(*range(10, 14), tier="disk"), stored(10, 11, 20, 21, tier="host")))
    view.read("a", batch(3, stored(1, 2, 3, 4)))
    assert view.match([1, 2, 3, 4], ["a"]) == [Hits(device=16)]
    assert view.match([10, 11, 12, 13], ["a"]) == [Hits(host=8, disk=8)], "known blocks are not counted again"
    assert view.match([20], ["a"]) == [Hits()]


def test_after_a_gap_a_snapshot_is_needed_and_makes_the_view_up_to_date() -> None:
    view = view_of("a")
    assert view.read("a", batch(2, stored(1, 2)))
    assert not view.read("a", batch(4, removed(2)))
    assert (view.number_of("a"), view.is_up_to_date("a")) == (0, False)
    assert not view.read("a", batch(5, stored(9)))
    assert view.match([1, 2], ["a"]) == [Hits(device=8)], "old hits are better than none"
    assert view.read("a", snapshot(5, stored(1, 3)))
    assert view.match([1, 2], ["a"]) == [Hits(device=4)]
    assert view.match([9], ["a"]) == [Hits()]


def test_a_replica_that_leaves_is_forgotten_and_returns_without_blocks() -> None:
    view = view_of("a", "b")
    for name in "ab":
        view.read(name, batch(2, stored(1, 2)))
    view.expect("a", [3])
    view.leave("a")
    view.leave("a")
    assert view.names == ("b",)
    view.join("a")
    assert view.number_of("a") == 0
    assert view.match([1, 2], ["a", "b"]) == [Hits(), Hits(device=8)]
    assert view.match([3], ["a"]) == [Hits()]


def test_an_expected_prefix_expires_without_an_event() -> None:
    clock = FakeClock()
    view = view_of("a", "b", clock=clock)
    clock.now_s = 29
    view.expect("a", [1, 2])
    view.expect("b", [1])
    view.read("b", batch(2, stored(1)))
    for now_s, expected in ((59, 8), (60, 0), (90, 0)):
        clock.now_s = now_s
        view.tidy()
        assert view.match([1, 2], ["a", "b"]) == [Hits(device=expected), Hits(device=4)]


def test_an_expectation_is_renewed_by_the_next_request() -> None:
    clock = FakeClock()
    view = view_of("a", clock=clock)
    for now_s in (0, 29, 58, 87, 116):
        clock.now_s = now_s
        view.tidy()
        assert view.match([1, 2], ["a"])[0].total == (8 if now_s else 0)
        view.expect("a", [1, 2, 100 + now_s], 2 if now_s else 0)
        assert view.match([1, 2, 100 + now_s], ["a"]) == [Hits(device=12)]


def test_expectations_end_also_after_a_long_pause() -> None:
    clock = FakeClock()
    view = view_of("a", clock=clock)
    view.expect("a", [1])
    clock.now_s = 60
    view.tidy()
    assert view.match([1], ["a"]) == [Hits()]


def test_a_block_that_is_evicted_is_no_longer_expected() -> None:
    view = view_of("a")
    view.expect("a", [1, 2])
    view.read("a", batch(2, stored(1, 2), removed(2)))
    assert view.match([1, 2], ["a"]) == [Hits(device=4)]


def test_a_snapshot_keeps_expected_blocks_and_a_purge_does_not() -> None:
    view = view_of("a")
    view.expect("a", [1])
    view.read("a", snapshot(9))
    assert view.match([1], ["a"]) == [Hits(device=4)]
    view.read("a", batch(10, AllCleared()))
    assert view.match([1], ["a"]) == [Hits()]


def test_blocks_of_another_size_are_refused() -> None:
    view = view_of("a")
    with pytest.raises(ConfigError, match=r"events.block_size: expected 4 tokens, .* got 8"):
        view.read("a", batch(2, BlocksStored(None, bytes(8), bytes(32), 8, "")))


def test_after_a_request_for_a_snapshot_the_view_is_not_up_to_date() -> None:
    view = view_of("a")
    view.request_snapshot("a")
    assert (view.number_of("a"), view.is_up_to_date("a")) == (0, False)


def test_blocks_above_the_maximum_shorten_matches() -> None:
    view = view_of("a", max_blocks=3)
    view.read("a", batch(2, stored(1, 2, 3, 4)))
    assert view.match([1, 2, 3, 4], ["a"]) == [Hits(device=12)]
    assert view.index.num_refused == 1


def test_memory_stays_bounded_while_replicas_join_and_leave() -> None:
    clock = FakeClock()
    view = view_of(clock=clock)
    for turn in range(400):
        clock.now_s += 40
        view.join("a")
        view.read("a", snapshot(1, stored(*range(turn * 8, turn * 8 + 8))))
        view.expect("a", range(turn * 8, turn * 8 + 9))
        for _ in range(50):
            view.tidy()
        assert view.index.num_blocks < 200
        assert view.index._num_bits < 32
