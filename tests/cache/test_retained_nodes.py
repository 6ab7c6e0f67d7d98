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


class RetentionBench:
    """A cache that is checked after each call. Each prompt is published a second after the one before."""

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

    def retain(self, text: str, retention: Retention) -> tuple[int, int, int]:
        """Return the numbers of granted tokens, of refused ones, and of those that are not cached."""
        grant = self.cache.retain(MODEL, spell(text), retention)
        self.cache.check()
        return grant[:3]

    def evict_and_match(self, num_blocks: int, *texts: str) -> list[int]:
        """Evict blocks, and return how many tokens of each text are still cached."""
        self.cache.evict(num_blocks)
        self.cache.check()
        return [cached(self.cache, text) for text in texts]

    def reason(self, text: str) -> MissReason:
        return self.cache.explain(MODEL, spell(text), cached(self.cache, text))

    def priorities(self) -> dict[str, int]:
        """Return the priority of each node, by the text of the node."""
        nodes = [node for tree in self.cache._trees.values() for node in tree.nodes()]
        return {node.tokens.decode("utf-32-le"): node.priority for node in nodes}


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_lower_priority_is_evicted_first_whatever_the_policy(policy: str) -> None:
    bench = RetentionBench(policy=policy)
    bench.publish("aaaa", "bbbb", "cccc", "bbbb")
    bench.retain("aaaa", Retention(80))
    bench.retain("bbbb", Retention(20))
    assert bench.evict_and_match(1, "aaaa", "bbbb", "cccc") == [4, 0, 4]
    assert bench.evict_and_match(1, "aaaa", "cccc") == [4, 0]


def test_a_retained_leaf_is_evicted_when_nothing_else_is_left() -> None:
    bench = RetentionBench(max_retained_blocks=1)
    bench.publish("aaaa")
    bench.retain("aaaa", Retention(100))
    assert bench.evict_and_match(1, "aaaa") == [0]
    assert bench.cache.num_retained_blocks == 0
    assert bench.reason("aaaaX") is MissReason.EVICTED


def test_the_default_priority_ends_a_retention() -> None:
    bench = RetentionBench()
    bench.publish("aaaa", "bbbb")
    bench.retain("aaaa", Retention(80))
    assert bench.cache.num_retained_blocks == 1
    assert bench.retain("aaaa", Retention(50)) == (4, 0, 0)
    assert bench.cache.num_retained_blocks == 0
    assert bench.evict_and_match(1, "aaaa", "bbbb") == [0, 4]


def test_a_range_is_widened_to_whole_blocks() -> None:
    bench = RetentionBench()
    bench.publish("aaaabbbbccccdddd")
    assert bench.retain("aaaabbbbccccdddd", Retention(20, start=5, end=9)) == (4, 0, 0)
    assert bench.priorities() == {"aaaa": 50, "bbbbcccc": 20, "dddd": 50}


def test_blocks_before_a_retained_range_count_too() -> None:
    bench = RetentionBench()
    bench.publish("aaaabbbbcccc", "aaaaXXXX")
    assert bench.retain("aaaabbbbcccc", Retention(80, start=8)) == (4, 0, 0)
    assert bench.cache.num_retained_blocks == 3
    assert bench.priorities() == {"aaaa": 50, "bbbb": 50, "cccc": 80, "XXXX": 50}


def test_tokens_that_are_not_cached_are_reported() -> None:
    bench = RetentionBench()
    bench.publish("aaaabb")
    assert bench.retain("aaaabbYYYY", Retention(80)) == (6, 0, 4)
    assert bench.retain("aaaabbYYYY", Retention(80, start=7)) == (0, 0, 3)
    assert bench.retain("ZZZZ", Retention(80)) == (0, 0, 4)
    assert bench.cache.retain(Namespace("other"), spell("aaaabb"), Retention(80)) == Grant(0, 0, 6)


def test_a_split_leaves_both_halves_retained() -> None:
    bench = RetentionBench()
    bench.publish("aaaabbbbcccc")
    bench.retain("aaaabbbbcccc", Retention(80, ttl_s=10))
    bench.publish("aaaaXXXX")
    assert bench.priorities() == {"aaaa": 80, "bbbbcccc": 80, "XXXX": 50}
    assert bench.cache.num_retained_blocks == 3
    bench.clock.now_s += 10
    bench.cache.check()
    assert set(bench.priorities().values()) == {50}
    assert bench.cache.num_retained_blocks == 0


def test_tokens_that_are_appended_to_a_retained_leaf_are_not_retained() -> None:
    bench = RetentionBench()
    bench.publish("aaaabb")
    bench.retain("aaaabb", Retention(80))
    bench.publish("aaaabbb")
    assert bench.priorities() == {"aaaabbb": 80}
    bench.publish("aaaabbbbccccd")
    assert bench.priorities() == {"aaaabbbb": 80, "ccccd": 50}
    assert bench.cache.num_retained_blocks == 2


def test_a_leaf_in_use_may_grow_beyond_what_is_retained() -> None:
    bench = RetentionBench()
    bench.publish("aaaabb")
    bench.retain("aaaabb", Retention(80, ttl_s=1000))
    with lease_text(bench.cache, "aaaabbX"), lease_text(bench.cache, "aaaabbbbcccc") as lease:
        lease.commit(12)
        bench.cache.check()
    bench.cache.check()
    assert bench.priorities() == {"aaaabbbb": 80, "cccc": 50}


def test_a_leaf_cut_short_by_eviction_keeps_its_priority() -> None:
    bench = RetentionBench()
    bench.publish("aaaabbbbcccc")
    bench.retain("aaaabbbbcccc", Retention(80, ttl_s=100))
    assert bench.evict_and_match(1, "aaaabbbbcccc") == [8]
    assert bench.cache.num_retained_blocks == 2
    assert bench.priorities() == {"aaaabbbb": 80}


def test_a_fifth_of_the_pool_may_be_retained() -> None:
    bench = RetentionBench(num_blocks=10)
    bench.publish("aaaabbbbcccc")
    assert bench.retain("aaaabbbbcccc", Retention(80)) == (8, 4, 0)
    assert bench.priorities() == {"aaaabbbb": 80, "cccc": 50}


def test_a_range_beyond_the_budget_is_cut_at_its_end() -> None:
    bench = RetentionBench(max_retained_blocks=3)
    bench.publish("aaaabbbb", "ccccddddeeeeff")
    assert bench.retain("aaaabbbb", Retention(80)) == (8, 0, 0)
    assert bench.retain("ccccddddeeeeff", Retention(90)) == (4, 10, 0)
    assert bench.retain("ccccddddeeeeff", Retention(90, start=6)) == (0, 8, 0)
    assert bench.cache.num_retained_blocks == 3


def test_a_shared_beginning_counts_once() -> None:
    bench = RetentionBench(max_retained_blocks=3)
    bench.publish("aaaabbbb", "aaaacccc")
    assert bench.retain("aaaabbbb", Retention(80)) == (8, 0, 0)
    assert bench.retain("aaaacccc", Retention(60, start=4)) == (4, 0, 0)
    assert bench.cache.num_retained_blocks == 3
    bench.retain("aaaabbbb", Retention(50))
    assert bench.cache.num_retained_blocks == 2, 'the retained "cccc", and "aaaa" before it'


def test_low_priorities_need_no_budget() -> None:
    bench = RetentionBench(max_retained_blocks=0)
    bench.publish("aaaabbbb")
    assert bench.retain("aaaabbbb", Retention(51)) == (0, 8, 0)
    assert bench.retain("aaaabbbb", Retention(0)) == (8, 0, 0)
    assert bench.priorities() == {"aaaabbbb": 0}


def test_a_tenant_may_be_bounded() -> None:
    cache = PrefixCache(100, 4, quotas={"acme": Quota(max_retained_blocks=2)}, clock=FakeClock())
    tenant = Namespace("model", "acme")
    publish(cache, "aaaabbbbcccc", tenant)
    publish(cache, "aaaabbbbcccc")
    assert cache.retain(tenant, spell("aaaabbbbcccc"), Retention(80)) == Grant(8, 4, 0)
    assert cache.retain(MODEL, spell("aaaabbbbcccc"), Retention(80)) == Grant(12, 0, 0)
    cache.check()


def test_a_tenants_retained_blocks_are_counted() -> None:
    bench = RetentionBench()
    tenant = Namespace("model", "acme")
    publish(bench.cache, "aaaabbbb", tenant)
    bench.cache.retain(tenant, spell("aaaabbbb"), Retention(80, end=3))
    assert bench.cache.tenants["acme"].num_retained_blocks == 1
    assert bench.cache.tenants[""].num_retained_blocks == 0


def test_a_priority_ends_when_its_time_to_live_has_expired() -> None:
    bench = RetentionBench()
    bench.publish("aaaa", "bbbb")
    bench.retain("aaaa", Retention(80, ttl_s=10))
    bench.clock.now_s += 9.5
    assert bench.cache.num_retained_blocks == 1
    bench.clock.now_s += 0.5
    assert bench.cache.num_retained_blocks == 0
    assert bench.evict_and_match(1, "aaaa", "bbbb") == [0, 4]


@pytest.mark.parametrize(
    ("text", "expires_s"),
    [
        ("aaaabbbbX", 18),  # a hit on the whole node
        ("aaaaX", 11),  # a hit on a part of the node, which is not split because nothing is published
        ("bbbbX", 11),  # no hit
    ],
)
def test_a_hit_renews_the_time_to_live_of_the_nodes_that_it_matches_completely(text: str, expires_s: float) -> None:
    bench = RetentionBench()
    bench.publish("aaaabbbb")
    bench.retain("aaaabbbb", Retention(80, ttl_s=10, renew=True))
    bench.clock.now_s = 8
    lease_text(bench.cache, text).close()
    bench.cache.check()
    bench.clock.now_s = expires_s - 0.5
    assert bench.cache.num_retained_blocks == 2
    bench.clock.now_s = expires_s
    assert bench.cache.num_retained_blocks == 0


def test_both_halves_of_a_split_are_renewed_separately() -> None:
    bench = RetentionBench()
    bench.publish("aaaabbbb")
    bench.retain("aaaabbbb", Retention(80, ttl_s=10, renew=True))
    bench.publish("aaaacccc")
    bench.clock.now_s = 8
    lease_text(bench.cache, "aaaaX").close()
    bench.clock.now_s = 12
    assert bench.cache.num_retained_blocks == 1
    assert bench.priorities() == {"aaaa": 80, "bbbb": 50, "cccc": 50}
    bench.clock.now_s = 18
    assert bench.cache.num_retained_blocks == 0
    bench.publish("aaaadddd")
    assert bench.cache.num_retained_blocks == 0


def test_a_later_retention_replaces_the_renewal() -> None:
    bench = RetentionBench()
    bench.publish("aaaa")
    bench.retain("aaaa", Retention(80, ttl_s=10, renew=True))
    bench.retain("aaaa", Retention(80, ttl_s=20))
    bench.clock.now_s = 8
    lease_text(bench.cache, "aaaaX").close()
    bench.clock.now_s = 22
    assert bench.cache.num_retained_blocks == 0


def test_a_miss_of_an_expired_retention_has_the_reason_expired() -> None:
    bench = RetentionBench()
    bench.publish("aaaa", "bbbb")
    bench.retain("aaaa", Retention(80, ttl_s=10))
    bench.clock.now_s += 10
    bench.cache.evict(2)
    assert bench.reason("aaaaX") is MissReason.EXPIRED
    assert bench.reason("bbbbX") is MissReason.EVICTED


def test_only_tokens_of_a_high_priority_expire() -> None:
    bench = RetentionBench()
    bench.publish("aaaa", "bbbb")
    bench.retain("aaaa", Retention(80, ttl_s=10))
    bench.retain("bbbb", Retention(20, ttl_s=10))
    bench.clock.now_s += 10
    bench.cache.check()
    bench.publish("aaaacccc")  # the appended block was never retained
    assert bench.priorities() == {"aaaa": 50, "cccc": 50, "bbbb": 50}
    bench.cache.evict(3)
    assert [bench.reason(text) for text in ("aaaaX", "bbbbX")] == [MissReason.EXPIRED, MissReason.EVICTED]
    bench.publish("aaaa")
    bench.cache.evict(1)
    assert bench.reason("aaaaX") is MissReason.EVICTED


def test_both_halves_of_a_split_have_expired() -> None:
    bench = RetentionBench()
    bench.publish("aaaabbbb")
    bench.retain("aaaabbbb", Retention(80, ttl_s=10))
    bench.clock.now_s += 10
    bench.cache.check()
    bench.publish("aaaaXXXX")
    bench.cache.evict(3)
    assert [bench.reason(text) for text in ("aaaaX", "YYYYY")] == [MissReason.EXPIRED, MissReason.COLD]


def test_after_a_new_retention_an_earlier_one_no_longer_counts_as_expired() -> None:
    bench = RetentionBench()
    bench.publish("aaaa")
    bench.retain("aaaa", Retention(80, ttl_s=10))
    bench.clock.now_s += 10
    bench.cache.check()
    bench.retain("aaaa", Retention(60))
    bench.cache.evict(1)
    assert bench.reason("aaaaX") is MissReason.EVICTED


def test_a_low_priority_expires_too() -> None:
    bench = RetentionBench()
    bench.publish("aaaa", "bbbb", "aaaa")
    bench.retain("aaaa", Retention(0, ttl_s=10))
    bench.clock.now_s += 10
    assert bench.evict_and_match(1, "aaaa", "bbbb") == [4, 0]


def test_a_second_retention_replaces_the_first() -> None:
    bench = RetentionBench()
    bench.publish("aaaa")
    bench.retain("aaaa", Retention(80, ttl_s=10))
    bench.retain("aaaa", Retention(60, ttl_s=100))
    bench.clock.now_s += 50
    bench.cache.check()
    assert bench.priorities() == {"aaaa": 60}


@pytest.mark.parametrize(
    ("first", "second", "priority", "expires_in_s"),
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
def test_a_retention_that_only_raises_leaves_a_higher_or_longer_one_in_place(
    first: Retention, second: Retention, priority: int, expires_in_s: float | None
) -> None:
    bench = RetentionBench()
    bench.publish("aaaa")
    bench.retain("aaaa", first)
    grant = bench.cache.retain(MODEL, spell("aaaa"), second, only_raise=True)
    assert grant == Grant(4, 0, 0, None if expires_in_s is None else bench.clock.now_s + expires_in_s)
    assert bench.priorities() == {"aaaa": priority}
    bench.clock.now_s += 1000 if expires_in_s is None else expires_in_s - 0.5
    bench.cache.check()
    assert bench.priorities() == {"aaaa": priority}
    bench.clock.now_s += 0.5
    bench.cache.check()
    assert bench.priorities() == {"aaaa": priority if expires_in_s is None else 50}


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
    bench = RetentionBench()
    bench.publish("aaaa")
    with pytest.raises(InvalidRequest, match=message):
        bench.retain("aaaa", retention)
    assert bench.priorities() == {"aaaa": 50}


def test_check_notices_a_drifted_number_of_retained_blocks() -> None:
    bench = RetentionBench()
    bench.publish("aaaa")
    bench.cache._retained.num_blocks += 1
    with pytest.raises(InvariantViolation, match="retained blocks drifted"):
        bench.cache.check()
