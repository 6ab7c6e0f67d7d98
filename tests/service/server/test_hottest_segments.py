from __future__ import annotations

import math
import random
from concurrent.futures import Future

import pytest

from radixkv.cache import segment_index
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.segment_source import SegmentSource
from radixkv.service.server import hottest_segments
from radixkv.service.server.hottest_segments import HottestSegments
from tests.fakes import FakeClock, lease_text, publish

MAX_COMPARED = 8


def call_at_once(function, tenant) -> Future:
    """Stands in for the engine's thread, which calls functions that read the cache."""
    future: Future = Future()
    future.set_result(function())
    return future


@pytest.fixture
def cache(monkeypatch) -> PrefixCache:
    """A cache of about a hundred segments. A call compares at most eight of them."""
    for module in (segment_index, hottest_segments):
        monkeypatch.setattr(module, "MAX_COMPARED", MAX_COMPARED)
    rng = random.Random(1)
    clock = FakeClock()
    cache = PrefixCache(1024, 4, clock=clock)
    for _ in range(80):
        clock.now_s += 1.0
        publish(cache, "".join(rng.choices("ab", k=12)))
        lease_text(cache, "abababababab").close()
    return cache


def collect(cache: PrefixCache, max_segments: int) -> tuple[HottestSegments, int]:
    """Make all calls that the search for the hottest segments needs; return the search and the number of calls."""
    source, search, num_calls = SegmentSource(cache, call_at_once), HottestSegments(max_segments), 0
    while (future := search.next_call(source)) is not None:
        num_calls += 1
        search.add(future.result())
    return search, num_calls


@pytest.mark.parametrize("max_segments", [1, 5, 20])
def test_all_segments_are_compared_if_the_calls_suffice(cache, max_segments):
    search, num_calls = collect(cache, max_segments)
    page = cache.segments.page(0)
    assert search.num_compared == search.num_segments == len(cache.segments) == len(page.segments)
    assert num_calls == math.ceil(page.end_number / MAX_COMPARED)
    hottest = search.result()
    heats = sorted((each.heat for each in page.segments), reverse=True)
    assert [each.heat for each in hottest] == heats[:max_segments]
    numbers = {each.number for each in hottest}
    assert all(each.parent_number is None or each.parent_number in numbers for each in hottest), "a parent is missing"


def test_a_sample_finds_a_segment_that_many_others_continue(monkeypatch):
    for module in (segment_index, hottest_segments):
        monkeypatch.setattr(module, "MAX_COMPARED", MAX_COMPARED)
    monkeypatch.setattr(hottest_segments, "MAX_CALLS", 3)
    cache = PrefixCache(1024, 4)
    for number in range(100):
        publish(cache, f"{number:04}")  # these take the first numbers, and are compared first
        publish(cache, f"same{number:04}")
    search, num_calls = collect(cache, 3)
    assert num_calls <= 3
    assert search.num_segments == 201  # 100 without children; "same" and its 100 children
    assert MAX_COMPARED < search.num_compared <= 3 * MAX_COMPARED
    assert [search.result()[0].num_tokens, search.result()[0].num_children] == [4, 100]


def test_an_empty_cache_takes_one_call():
    search, num_calls = collect(PrefixCache(4, 4), 5)
    assert (search.result(), num_calls) == ([], 1)
