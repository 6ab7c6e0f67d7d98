from __future__ import annotations

import random
from concurrent.futures import Future

import pytest

from radixkv.cache import segment_index
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.segment_source import SegmentSource
from radixkv.service.server import hottest_segments
from radixkv.service.server.hottest_segments import HottestSegments
from tests.fakes import FakeClock, lease_text, publish


def answered(function, tenant) -> Future:
    future: Future = Future()
    future.set_result(function())
    return future


@pytest.fixture
def cache(monkeypatch) -> PrefixCache:
    """A cache of a hundred segments or so; a call compares eight places."""
    for module in (segment_index, hottest_segments):
        monkeypatch.setattr(module, "MAX_COMPARED", 8)
    rng = random.Random(1)
    clock = FakeClock()
    cache = PrefixCache(1024, 4, clock=clock)
    for _ in range(80):
        clock.now_s += 1.0
        publish(cache, "".join(rng.choices("ab", k=12)))
        lease_text(cache, "abababababab").close()
    return cache


def walk(cache: PrefixCache, max_segments: int) -> tuple[HottestSegments, int]:
    source, found, num_calls = SegmentSource(cache, answered), HottestSegments(max_segments), 0
    while (future := found.next_call(source)) is not None:
        num_calls += 1
        found.add(future.result())
    return found, num_calls


@pytest.mark.parametrize("max_segments", [1, 5, 20])
def test_all_are_compared_while_calls_suffice(cache, max_segments):
    found, num_calls = walk(cache, max_segments)
    page = cache.segments.page(0)
    assert found.num_compared == found.num_segments == len(cache.segments) == len(page.segments)
    assert num_calls == -(-page.num_places // 8)
    hottest = found.result()
    assert [each.heat for each in hottest] == sorted((each.heat for each in page.segments), reverse=True)[:max_segments]
    seen = {None} | {each.place for each in hottest}
    assert all(each.parent_place in seen for each in hottest), "a tree can be drawn"


def test_a_sample_finds_what_many_segments_continue(monkeypatch):
    for module in (segment_index, hottest_segments):
        monkeypatch.setattr(module, "MAX_COMPARED", 8)
    monkeypatch.setattr(hottest_segments, "MAX_CALLS", 3)
    cache = PrefixCache(1024, 4)
    for number in range(100):
        publish(cache, f"{number:04}")  # these take the first places, and are compared first
        publish(cache, f"same{number:04}")
    found, num_calls = walk(cache, 3)
    assert num_calls <= 3
    assert 8 < found.num_compared <= 24 < found.num_segments == 201
    assert [found.result()[0].num_tokens, found.result()[0].num_children] == [4, 100]


def test_an_empty_cache_takes_one_call():
    found, num_calls = walk(PrefixCache(4, 4), 5)
    assert (found.result(), num_calls) == ([], 1)
