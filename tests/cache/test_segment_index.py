"""Lookup of segments. Blocks have four tokens, and a token is a character."""

import random

import pytest

from radixkv.api.retention import Retention
from radixkv.api.segments import HEAT_HALF_LIFE_S, Segment
from radixkv.cache import segment_index
from radixkv.cache.node import Node
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.errors import InvariantViolation
from radixkv.namespace import Namespace
from tests.fakes import MODEL, FakeClock, lease_text, publish, spell


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def cache(clock: FakeClock) -> PrefixCache:
    return PrefixCache(64, 4, clock=clock)


def list_segments(cache: PrefixCache, tenant: str | None = None) -> list[Segment]:
    """List all segments, with at most three per page."""
    segments: list[Segment] = []
    start: int | None = 0
    while start is not None:
        page = cache.segments.page(start, tenant, 3)
        segments += page.segments
        start = page.next_start
    return segments


def test_an_empty_cache_has_one_empty_page(cache: PrefixCache) -> None:
    page = cache.segments.page(0)
    assert (page.segments, page.next_start, page.num_segments) == ((), None, 0)


def test_a_segment_reports_its_position_and_its_size(cache: PrefixCache) -> None:
    publish(cache, "abcdefghij")
    publish(cache, "abcdefghXY")
    first, tail, other = sorted(list_segments(cache), key=lambda segment: (segment.start_token, segment.number))
    assert (first.start_token, first.num_tokens, first.num_blocks, first.num_children) == (0, 8, 2, 2)
    assert first.parent_number is None
    assert {tail.parent_number, other.parent_number} == {first.number}
    assert [(each.start_token, each.num_tokens, each.num_blocks) for each in (tail, other)] == [(8, 2, 1)] * 2


def test_a_split_leaves_the_old_node_its_number(cache: PrefixCache) -> None:
    publish(cache, "abcdefgh")
    (before,) = list_segments(cache)
    publish(cache, "abcdXYZ")
    lower = next(segment for segment in list_segments(cache) if segment.number == before.number)
    assert (lower.start_token, lower.num_tokens) == (4, 4)


def test_a_segment_reports_its_uses_leases_and_heat(cache: PrefixCache, clock: FakeClock) -> None:
    publish(cache, "abcdefgh")
    clock.now_s = 100.0
    with lease_text(cache, "abcdefghij"):
        clock.now_s = 100.0 + HEAT_HALF_LIFE_S
        (used,) = list_segments(cache)
    assert (used.num_uses, used.num_leases, used.idle_s) == (1, 1, HEAT_HALF_LIFE_S)
    assert used.heat == pytest.approx((1 + 1) / 2), "one use plus one, halved after a half-life"
    assert list_segments(cache)[0].num_leases == 0


def test_a_segment_reports_its_retention_and_when_it_expires(cache: PrefixCache, clock: FakeClock) -> None:
    publish(cache, "abcdefgh")
    cache.retain(MODEL, spell("abcdefgh"), Retention(80, ttl_s=60.0, start=4))
    clock.now_s = 20.0
    first, second = sorted(list_segments(cache), key=lambda segment: segment.start_token)
    assert (first.priority, first.is_retained, first.expires_in_s) == (50, True, None)
    assert (second.priority, second.is_retained, second.expires_in_s) == (80, True, 40.0)


def test_a_tenant_is_listed_alone(cache: PrefixCache) -> None:
    for tenant in ("a", "b", "a", ""):
        publish(cache, f"{tenant}bcd", Namespace("model", tenant))
    assert [segment.namespace.tenant for segment in list_segments(cache, "a")] == ["a"]
    assert [segment.namespace.tenant for segment in list_segments(cache, "")] == [""]
    assert len(list_segments(cache)) == 3


def test_numbers_of_removed_nodes_are_assigned_again(cache: PrefixCache) -> None:
    for tenant in "abc":
        publish(cache, "abcd", Namespace("model", tenant))
    cache.purge(tenant="a")
    cache.purge(tenant="b")
    assert [segment.number for segment in list_segments(cache)] == [2]
    publish(cache, "efgh", Namespace("model", "d"))
    assert sorted(segment.number for segment in list_segments(cache)) == [0, 2]
    cache.purge()
    assert cache.segments.page(0).end_number == 0


def test_a_page_passes_a_bounded_number_of_segment_numbers(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_index, "MAX_PASSED", 2)
    for tenant in "aaabca":
        publish(cache, "abcd" if tenant != "c" else "xyz", Namespace("model", tenant))
    page = cache.segments.page(0, "c")
    assert (page.segments, page.next_start) == ((), 2)
    assert [segment.num_tokens for segment in list_segments(cache, "c")] == [3]


def test_segments_that_stay_are_listed_once_whatever_happens_between_pages(cache: PrefixCache) -> None:
    """Prompts are published, split and evicted between the pages of many listings."""
    rng = random.Random(5)
    for _ in range(40):
        listed_nodes: list[Node] = []
        surviving_nodes = set(cache.nodes())
        start: int | None = 0
        while start is not None:
            page = cache.segments.page(start, None, 2)
            numbers = {segment.number for segment in page.segments}
            listed_nodes += [node for node in cache.nodes() if node.segment_number in numbers]
            start = page.next_start
            publish(cache, "".join(rng.choices("ab", k=rng.randint(1, 24))))
            cache.evict(rng.randint(0, 3))
            cache.check()
            surviving_nodes &= set(cache.nodes())
        assert [listed_nodes.count(node) for node in surviving_nodes] == [1] * len(surviving_nodes)


def test_the_hottest_segments_are_listed_with_their_ancestors(cache: PrefixCache, clock: FakeClock) -> None:
    publish(cache, "abcdefgh")
    publish(cache, "abcdxyz")
    for _ in range(3):
        lease_text(cache, "abcdefghi").close()
    publish(cache, "zzzz")
    page = cache.segments.hottest(0, 1, max_segments=2)
    assert sorted((each.start_token, each.num_uses) for each in page.segments) == [(0, 4), (4, 3)]
    assert page.num_compared == 4


def test_no_segment_is_hotter_than_its_parent(cache: PrefixCache, clock: FakeClock) -> None:
    rng = random.Random(3)
    for _ in range(300):
        clock.now_s += rng.random() * 50
        publish(cache, "".join(rng.choices("ab", k=rng.randint(1, 24))))
        segments = {segment.number: segment for segment in list_segments(cache)}
        for segment in segments.values():
            if segment.parent_number is not None:
                assert segment.heat <= segments[segment.parent_number].heat


def test_a_stride_skips_numbers_and_still_finds_the_parent(cache: PrefixCache) -> None:
    publish(cache, "abcdefgh")
    for letter in "wxyz":
        publish(cache, f"abcd{letter * 4}")
    (parent,) = (segment for segment in list_segments(cache) if segment.start_token == 0)
    page = cache.segments.hottest(parent.number + 1, 2)
    assert page.num_compared < 5
    assert parent.number in {segment.number for segment in page.segments}


def test_check_notices_a_lost_number(cache: PrefixCache) -> None:
    publish(cache, "abcd")
    (node,) = cache.nodes()
    node.segment_number = 7
    with pytest.raises(InvariantViolation, match="a node has no number"):
        cache.check()
    node.segment_number, node.start_bytes = 0, 4
    with pytest.raises(InvariantViolation, match="does not begin where its parent ends"):
        cache.check()
