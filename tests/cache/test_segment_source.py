from concurrent.futures import Future
from typing import Any

import pytest

from radixkv.cache.block_pool import BlockState
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.segment_source import SegmentSource
from radixkv.errors import InvalidRequest
from tests.fakes import FakeClock, publish


def test_each_listing_is_one_call_for_its_tenant() -> None:
    cache = PrefixCache(4, 4, clock=FakeClock())
    publish(cache, "abcdef")
    functions: list[Any] = []
    tenants: list[str | None] = []

    def call(function: Any, tenant: str | None) -> Future[Any]:
        functions.append(function)
        tenants.append(tenant)
        return Future()

    source = SegmentSource(cache, call)
    for future in (source.page(0, None, 5), source.hottest(0, 1, "", 5), source.block_states()):
        assert not future.done(), "only the function that is called reads the cache"
    assert tenants == [None, "", None]
    page, hottest, states = (function() for function in functions)
    source.stored("host", 0, "a", 5)
    with pytest.raises(InvalidRequest, match="store: expected none, since this service has no stores below the device"):
        functions[-1]()
    assert page.segments == hottest.segments
    assert sorted(states) == [BlockState.FREE] * 2 + [BlockState.PUBLISHED] * 2
