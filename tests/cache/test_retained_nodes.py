"""Priorities of retained ranges: eviction order, limits and expiry. Blocks have four tokens."""

from __future__ import annotations

import pytest

from radixkv.api.miss_reason import MissReason
from radixkv.api.retention import Grant, Retention
from radixkv.cache.policies import make_policy
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.tenants import Quota
from radixkv.config import EVICTION_POLICIES
from radixkv.errors import InvalidRequest, InvariantViolation
from radixkv.namespace import Namespace
from tests.fakes import MODEL, FakeClock, cached, lease_text, publish, spell


class Shelf:
    """A cache in which each call happens a second after the one before, and is checked."""

    def __init__(self, num_blocks: int = 100, max_retained_blocks: int | None = None, policy: str = "lru") -> None:
        self.clock = FakeClock()
        self.cache = PrefixCache(
            num_blocks,
            4,
            policy=make_policy(policy, num_blocks),
            max_retained_blocks=max_retained_blocks,
            clock=self.clock,
        )

    def publish(self, *texts: str) -> None:
        for text in texts:
            self.clock.now_s += 1
            publish(self.cache, text)
            self.cache.check()

    def retain(self, text: str, retention: Retention, *, only_raise: bool = False) -> tuple[int, int, int]:
        grant = self.cache.retain(MODEL, spell(text), retention, only_raise=only_raise)
        self.cache.check()
        return grant[:3]

    def left_after(self, num_evicted_blocks: int, *texts: str) -> list[int]:
        self.cache.evict(num_evicted_blocks)
        self.cache.check()
        return [cached(self.cache, text) for text in texts]

    def reason(self, text: str) -> MissReason:
        return self.cache.explain(MODEL, spell(text), cached(self.cache, text))

    def priorities(self) -> dict[str, int]:
        """Priority of each node, by its text."""
        nodes = [node for tree in self.cache._trees.values() for node in tree.nodes()]
        return {node.tokens.decode("utf-32-le"): node.priority for node in nodes}


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_lower_priority_is_evicted_first_whatever_the_policy(policy: str) -> None:
    shelf = Shelf(policy=policy)
    shelf.publish("aaaa", "bbbb", "cccc", "bbbb")
    shelf.retain("aaaa", Retention(80))
    shelf.retain("bbbb", Retention(20))
    assert shelf.left_after(1, "aaaa", "bbbb", "cccc") == [4, 0, 4]
    assert shelf.left_after(1, "aaaa", "cccc") == [4, 0]


def test_a_retained_leaf_is_evicted_when_nothing_else_is_left() -> None:
    shelf = Shelf(max_retained_blocks=1)
    shelf.publish("aaaa")
    shelf.retain("aaaa", Retention(100))
    assert shelf.left_after(1, "aaaa") == [0]
    assert shelf.cache.num_retained_blocks == 0
    assert shelf.reason("aaaaX") is MissReason.EVICTED


def test_the_default_priority_ends_a_retention() -> None:
    shelf = Shelf()
    shelf.publish("aaaa", "bbbb")
    shelf.retain("aaaa", Retention(80))
    assert shelf.cache.num_retained_blocks == 1
    assert shelf.retain("aaaa", Retention(50)) == (4, 0, 0)
    assert shelf.cache.num_retained_blocks == 0
    assert shelf.left_after(1, "aaaa", "bbbb") == [0, 4]


def test_a_range_is_widened_to_whole_blocks() -> None:
    shelf = Shelf()
    shelf.publish("aaaabbbbccccdddd")
    assert shelf.retain("aaaabbbbccccdddd", Retention(20, start=5, end=9)) == (4, 0, 0)
    assert shelf.priorities() == {"aaaa": 50, "bbbbcccc": 20, "dddd": 50}


def test_blocks_before_a_retained_range_count_too() -> None:
    shelf = Shelf()
    shelf.publish("aaaabbbbcccc", "aaaaXXXX")
    assert shelf.retain("aaaabbbbcccc", Retention(80, start=8)) == (4, 0, 0)
    assert shelf.cache.num_retained_blocks == 3
    assert shelf.priorities() == {"aaaa": 50, "bbbb": 50, "cccc": 80, "XXXX": 50}


def test_tokens_that_are_not_cached_are_reported() -> None:
    shelf = Shelf()
    shelf.publish("aaaabb")
    assert shelf.retain("aaaabbYYYY", Retention(80)) == (6, 0, 4)
    assert shelf.retain("aaaabbYYYY", Retention(80, start=7)) == (0, 0, 3)
    assert shelf.retain("ZZZZ", Retention(80)) == (0, 0, 4)
    assert shelf.cache.retain(Namespace("other"), spell("aaaabb"), Retention(80)) == Grant(0, 0, 6)


def test_a_split_leaves_both_halves_retained() -> None:
    shelf = Shelf()
    shelf.publish("aaaabbbbcccc")
    shelf.retain("aaaabbbbcccc", Retention(80, ttl_s=10))
    shelf.publish("aaaaXXXX")
    assert shelf.priorities() == {"aaaa": 80, "bbbbcccc": 80, "XXXX": 50}
    assert shelf.cache.num_retained_blocks == 3
    shelf.clock.now_s += 10
    shelf.cache.check()
    assert set(shelf.priorities().values()) == {50}
    assert shelf.cache.num_retained_blocks == 0


def test_tokens_that_are_appended_to_a_retained_leaf_are_not_retained() -> None:
    shelf = Shelf()
    shelf.publish("aaaabb")
    shelf.retain("aaaabb", Retention(80))
    shelf.publish("aaaabbb")
    assert shelf.priorities() == {"aaaabbb": 80}
    shelf.publish("aaaabbbbccccd")
    assert shelf.priorities() == {"aaaabbbb": 80, "ccccd": 50}
    assert shelf.cache.num_retained_blocks == 2


def test_a_leaf_in_use_may_grow_beyond_what_is_retained() -> None:
    shelf = Shelf()
    shelf.publish("aaaabb")
    shelf.retain("aaaabb", Retention(80, ttl_s=1000))
    with lease_text(shelf.cache, "aaaabbX"), lease_text(shelf.cache, "aaaabbbbcccc") as lease:
        lease.commit(12)
        shelf.cache.check()
    shelf.cache.check()
    assert shelf.priorities() == {"aaaabbbb": 80, "cccc": 50}


def test_a_leaf_cut_short_by_eviction_keeps_its_priority() -> None:
    shelf = Shelf()
    shelf.publish("aaaabbbbcccc")
    shelf.retain("aaaabbbbcccc", Retention(80, ttl_s=100))
    assert shelf.left_after(1, "aaaabbbbcccc") == [8]
    assert shelf.cache.num_retained_blocks == 2
    assert shelf.priorities() == {"aaaabbbb": 80}


def test_a_fifth_of_the_pool_may_be_retained() -> None:
    shelf = Shelf(num_blocks=10)
    shelf.publish("aaaabbbbcccc")
    assert shelf.retain("aaaabbbbcccc", Retention(80)) == (8, 4, 0)
    assert shelf.priorities() == {"aaaabbbb": 80, "cccc": 50}


def test_a_range_beyond_the_budget_is_cut_at_its_end() -> None:
    shelf = Shelf(max_retained_blocks=3)
    shelf.publish("aaaabbbb", "ccccddddeeeeff")
    assert shelf.retain("aaaabbbb", Retention(80)) == (8, 0, 0)
    assert shelf.retain("ccccddddeeeeff", Retention(90)) == (4, 10, 0)
    assert shelf.retain("ccccddddeeeeff", Retention(90, start=6)) == (0, 8, 0)
    assert shelf.cache.num_retained_blocks == 3


def test_a_shared_beginning_counts_once() -> None:
    shelf = Shelf(max_retained_blocks=3)
    shelf.publish("aaaabbbb", "aaaacccc")
    assert shelf.retain("aaaabbbb", Retention(80)) == (8, 0, 0)
    assert shelf.retain("aaaacccc", Retention(60, start=4)) == (4, 0, 0)
    assert shelf.cache.num_retained_blocks == 3
    shelf.retain("aaaabbbb", Retention(50))
    assert shelf.cache.num_retained_blocks == 2  # [aaaa] is before [cccc]


def test_low_priorities_need_no_budget() -> None:
    shelf = Shelf(max_retained_blocks=0)
    shelf.publish("aaaabbbb")
    assert shelf.retain("aaaabbbb", Retention(51)) == (0, 8, 0)
    assert shelf.retain("aaaabbbb", Retention(0)) == (8, 0, 0)
    assert shelf.priorities() == {"aaaabbbb": 0}


def test_a_tenant_may_be_bounded() -> None:
    cache = PrefixCache(100, 4, quotas={"acme": Quota(max_retained_blocks=2)}, clock=FakeClock())
    tenant = Namespace("model", "acme")
    publish(cache, "aaaabbbbcccc", tenant)
    publish(cache, "aaaabbbbcccc")
    assert cache.retain(tenant, spell("aaaabbbbcccc"), Retention(80)) == Grant(8, 4, 0)
    assert cache.retain(MODEL, spell("aaaabbbbcccc"), Retention(80)) == Grant(12, 0, 0)
    cache.check()


def test_a_tenants_retained_blocks_are_counted() -> None:
    shelf = Shelf()
    tenant = Namespace("model", "acme")
    publish(shelf.cache, "aaaabbbb", tenant)
    shelf.cache.retain(tenant, spell("aaaabbbb"), Retention(80, end=3))
    assert shelf.cache.tenants["acme"].num_retained_blocks == 1
    assert shelf.cache.tenants[""].num_retained_blocks == 0


def test_a_priority_ends_with_its_time() -> None:
    shelf = Shelf()
    shelf.publish("aaaa", "bbbb")
    shelf.retain("aaaa", Retention(80, ttl_s=10))
    shelf.clock.now_s += 9.5
    assert shelf.cache.num_retained_blocks == 1
    shelf.clock.now_s += 0.5
    assert shelf.cache.num_retained_blocks == 0
    assert shelf.left_after(1, "aaaa", "bbbb") == [0, 4]


@pytest.mark.parametrize(
    ("text", "expires_s"),
    [
        ("aaaabbbbX", 18),  # a hit on all of the range
        ("aaaaX", 11),  # a hit on a part of it, which is not published, so the node stays whole
        ("bbbbX", 11),  # no hit
    ],
)
def test_a_hit_renews_the_time_of_the_nodes_that_it_finds(text: str, expires_s: float) -> None:
    shelf = Shelf()
    shelf.publish("aaaabbbb")
    shelf.retain("aaaabbbb", Retention(80, ttl_s=10, renew=True))
    shelf.clock.now_s = 8
    lease_text(shelf.cache, text).close()
    shelf.cache.check()
    shelf.clock.now_s = expires_s - 0.5
    assert shelf.cache.num_retained_blocks == 2
    shelf.clock.now_s = expires_s
    assert shelf.cache.num_retained_blocks == 0


def test_both_halves_of_a_split_are_renewed_separately() -> None:
    shelf = Shelf()
    shelf.publish("aaaabbbb")
    shelf.retain("aaaabbbb", Retention(80, ttl_s=10, renew=True))
    shelf.publish("aaaacccc")
    shelf.clock.now_s = 8
    lease_text(shelf.cache, "aaaaX").close()
    shelf.clock.now_s = 12
    assert shelf.cache.num_retained_blocks == 1
    assert shelf.priorities() == {"aaaa": 80, "bbbb": 50, "cccc": 50}
    shelf.clock.now_s = 18
    assert shelf.cache.num_retained_blocks == 0
    shelf.publish("aaaadddd")
    assert shelf.cache.num_retained_blocks == 0


def test_a_later_retention_replaces_the_renewal() -> None:
    shelf = Shelf()
    shelf.publish("aaaa")
    shelf.retain("aaaa", Retention(80, ttl_s=10, renew=True))
    shelf.retain("aaaa", Retention(80, ttl_s=20))
    shelf.clock.now_s = 8
    lease_text(shelf.cache, "aaaaX").close()
    shelf.clock.now_s = 22
    assert shelf.cache.num_retained_blocks == 0


def test_a_miss_after_the_time_is_up_is_explained() -> None:
    shelf = Shelf()
    shelf.publish("aaaa", "bbbb")
    shelf.retain("aaaa", Retention(80, ttl_s=10))
    shelf.clock.now_s += 10
    shelf.cache.evict(2)
    assert shelf.reason("aaaaX") is MissReason.EXPIRED
    assert shelf.reason("bbbbX") is MissReason.EVICTED


def test_only_what_was_kept_longer_expires() -> None:
    shelf = Shelf()
    shelf.publish("aaaa", "bbbb")
    shelf.retain("aaaa", Retention(80, ttl_s=10))
    shelf.retain("bbbb", Retention(20, ttl_s=10))
    shelf.clock.now_s += 10
    shelf.cache.check()
    shelf.publish("aaaacccc")  # grows in place, and was never kept
    assert shelf.priorities() == {"aaaa": 50, "cccc": 50, "bbbb": 50}
    shelf.cache.evict(3)
    assert [shelf.reason(text) for text in ("aaaaX", "bbbbX")] == [MissReason.EXPIRED, MissReason.EVICTED]
    shelf.publish("aaaa")
    shelf.cache.evict(1)
    assert shelf.reason("aaaaX") is MissReason.EVICTED


def test_both_halves_of_a_split_have_expired() -> None:
    shelf = Shelf()
    shelf.publish("aaaabbbb")
    shelf.retain("aaaabbbb", Retention(80, ttl_s=10))
    shelf.clock.now_s += 10
    shelf.cache.check()
    shelf.publish("aaaaXXXX")
    shelf.cache.evict(3)
    assert [shelf.reason(text) for text in ("aaaaX", "YYYYY")] == [MissReason.EXPIRED, MissReason.COLD]


def test_a_new_priority_makes_an_expired_one_forgotten() -> None:
    shelf = Shelf()
    shelf.publish("aaaa")
    shelf.retain("aaaa", Retention(80, ttl_s=10))
    shelf.clock.now_s += 10
    shelf.cache.check()
    shelf.retain("aaaa", Retention(60))
    shelf.cache.evict(1)
    assert shelf.reason("aaaaX") is MissReason.EVICTED


def test_low_priority_ends_too() -> None:
    shelf = Shelf()
    shelf.publish("aaaa", "bbbb", "aaaa")
    shelf.retain("aaaa", Retention(0, ttl_s=10))
    shelf.clock.now_s += 10
    assert shelf.left_after(1, "aaaa", "bbbb") == [4, 0]


def test_a_second_retention_replaces_the_first() -> None:
    shelf = Shelf()
    shelf.publish("aaaa")
    shelf.retain("aaaa", Retention(80, ttl_s=10))
    shelf.retain("aaaa", Retention(60, ttl_s=100))
    shelf.clock.now_s += 50
    shelf.cache.check()
    assert shelf.priorities() == {"aaaa": 60}


@pytest.mark.parametrize(
    ("first", "second", "priority", "lasts_s"),
    [
        (Retention(80, ttl_s=10), Retention(90, ttl_s=5), 90, 5),
        (Retention(80, ttl_s=10), Retention(60, ttl_s=100), 80, 10),
        (Retention(80, ttl_s=10), Retention(80, ttl_s=100), 80, 100),
        (Retention(80, ttl_s=100), Retention(80, ttl_s=10), 80, 100),
        (Retention(80), Retention(80, ttl_s=10), 80, None),
        (Retention(80, ttl_s=10), Retention(80), 80, None),
        (Retention(20, ttl_s=10), Retention(60, ttl_s=5), 60, 5),
        (Retention(80, ttl_s=10), Retention(20), 80, 10),
        (Retention(0, ttl_s=10), Retention(20, ttl_s=5), 20, 5),
    ],
)
def test_a_retention_that_only_raises_leaves_what_lasts_longer(
    first: Retention, second: Retention, priority: int, lasts_s: float | None
) -> None:
    shelf = Shelf()
    shelf.publish("aaaa")
    shelf.retain("aaaa", first)
    grant = shelf.cache.retain(MODEL, spell("aaaa"), second, only_raise=True)
    assert grant == Grant(4, 0, 0, None if lasts_s is None else shelf.clock.now_s + lasts_s)
    assert shelf.priorities() == {"aaaa": priority}
    shelf.clock.now_s += 1000 if lasts_s is None else lasts_s - 0.5
    shelf.cache.check()
    assert shelf.priorities() == {"aaaa": priority}
    shelf.clock.now_s += 0.5
    shelf.cache.check()
    assert shelf.priorities() == {"aaaa": priority if lasts_s is None else 50}


@pytest.mark.parametrize(
    ("retention", "message"),
    [
        (Retention(101), "retention.priority: expected 0 to 100, got 101"),
        (Retention(-1), "retention.priority: expected 0 to 100, got -1"),
        (Retention(60, ttl_s=0.0), "retention.ttl: expected more than 0"),
        (Retention(60, ttl_s=float("nan")), "retention.ttl: expected more than 0"),
        (Retention(60, ttl_s=float("inf")), "retention.ttl: expected more than 0"),
        (Retention(60, start=4), "retention.start_token: expected 0 to 3, got 4"),
        (Retention(60, start=-1), "retention.start_token: expected 0 to 3, got -1"),
        (Retention(60, start=2, end=2), "retention.end_token: expected 3 to 4, got 2"),
        (Retention(60, end=5), "retention.end_token: expected 1 to 4, got 5"),
    ],
)
def test_an_invalid_retention_is_refused_by_field_and_changes_nothing(retention: Retention, message: str) -> None:
    shelf = Shelf()
    shelf.publish("aaaa")
    with pytest.raises(InvalidRequest, match=message):
        shelf.retain("aaaa", retention)
    assert shelf.priorities() == {"aaaa": 50}


def test_check_notices_a_drifted_number_of_retained_blocks() -> None:
    shelf = Shelf()
    shelf.publish("aaaa")
    shelf.cache._retained.num_blocks += 1
    with pytest.raises(InvariantViolation, match="retained blocks drifted"):
        shelf.cache.check()
