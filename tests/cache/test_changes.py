"""The listeners of a cache. Blocks are four tokens."""

from __future__ import annotations

import random
from typing import Any

from radixkv.api.miss_reason import MissReason
from radixkv.api.retention import Retention
from radixkv.cache.changes import Changes, Listener
from radixkv.cache.node import Node
from radixkv.cache.prefix_cache import PrefixCache
from tests.fakes import MODEL, FakeClock, cached, make_tree, publish, spell


class Diary(Listener):
    """Records each call as its name and its numbers: tokens for `used`, otherwise blocks of nodes at that moment."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []

    def used(self, node: Node, num_bytes: int, now_s: float) -> None:
        self.entries.append(("used", num_bytes // 4))

    def inserted(self, leaf: Node, now_s: float) -> None:
        self.entries.append(("inserted", leaf.num_blocks))

    def grown(self, leaf: Node, num_new_blocks: int, now_s: float) -> None:
        self.entries.append(("grown", num_new_blocks))

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        assert lower.parent is not None
        self.entries.append(("split", lower.parent.num_blocks, lower.num_blocks))

    def cut(self, lower: Node) -> None:
        assert lower.parent is not None
        self.entries.append(("cut", lower.parent.num_blocks, lower.num_blocks))

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        self.entries.append(("evicted", leaf.num_blocks, num_blocks, reason))

    def purged(self, node: Node) -> None:
        self.entries.append(("purged", node.num_blocks))

    def take_entries(self) -> list[tuple[Any, ...]]:
        """Return the entries since the last call of this method, and remove them."""
        entries, self.entries = self.entries, []
        return entries


class Mirror(Listener):
    """Tracks the published blocks by notifications only."""

    def __init__(self) -> None:
        self.num_blocks = 0

    def inserted(self, leaf: Node, now_s: float) -> None:
        self.num_blocks += leaf.num_blocks

    def grown(self, leaf: Node, num_new_blocks: int, now_s: float) -> None:
        self.num_blocks += num_new_blocks

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        self.num_blocks -= num_blocks

    def purged(self, node: Node) -> None:
        self.num_blocks -= node.num_blocks


def test_a_listener_is_notified_of_every_change() -> None:
    diary = Diary()
    cache = PrefixCache(16, 4, clock=FakeClock(), listeners=[diary])
    publish(cache, "aaaabbbbcc")
    assert diary.take_entries() == [("inserted", 3)]
    publish(cache, "aaaabbbbccccdddd")
    assert diary.take_entries() == [("used", 10), ("grown", 1)]
    publish(cache, "aaaabbbbcccc")
    assert diary.take_entries() == [("used", 12)]
    publish(cache, "aaaaXXXX")
    assert diary.take_entries() == [("used", 4), ("split", 1, 3), ("inserted", 1)]
    cache.retain(MODEL, spell("aaaabbbb"), Retention(priority=90))
    assert diary.take_entries() == [("cut", 1, 2)]
    cache.evict(3)
    assert diary.take_entries() == [("evicted", 2, 2, MissReason.EVICTED), ("evicted", 1, 1, MissReason.EVICTED)]
    cache.purge()
    assert diary.take_entries() == [("purged", 1), ("purged", 1)]


def test_notifications_add_up_to_the_published_blocks() -> None:
    dice, mirror = random.Random(1), Mirror()
    cache = PrefixCache(24, 4, clock=FakeClock(), listeners=[mirror])
    for _ in range(500):
        publish(cache, "".join(dice.choices("ab", k=dice.randint(1, 20))))
        if dice.random() < 0.2:
            cache.evict(dice.randint(1, 5))
        if dice.random() < 0.1:
            cache.retain(MODEL, spell("ab" * 8), Retention(priority=dice.randint(0, 100)))
        if dice.random() < 0.02:
            cache.purge()
        assert mirror.num_blocks == cache.pool.num_published
        cache.check()


def test_listeners_are_notified_in_their_order_and_only_of_what_they_override() -> None:
    notified: list[str] = []

    class Named(Listener):
        def __init__(self, name: str) -> None:
            self.name = name

        def purged(self, node: Node) -> None:
            notified.append(self.name)

    node = make_tree(4).root
    changes = Changes([Named("first"), Listener(), Named("second")])
    changes.purged(node)
    changes.cut(node)
    assert notified == ["first", "second"]
    assert changes._cut == ()


def test_a_block_can_be_matched_when_listeners_are_notified_of_its_insertion() -> None:
    cached_tokens: list[int] = []

    class MatchesWhenNotified(Listener):
        def inserted(self, leaf: Node, now_s: float) -> None:
            cached_tokens.append(cached(cache, "aaaabbbb"))

    cache = PrefixCache(16, 4, clock=FakeClock(), listeners=[MatchesWhenNotified()])
    publish(cache, "aaaabbbb")
    assert cached_tokens == [8]
