"""A purge on one server deletes the blocks of all servers, even if the store responds late."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from radixkv.api.params import PrefillParams
from radixkv.errors import StoreLate, StoreUnavailable
from radixkv.namespace import PUBLIC_TENANT, Namespace
from radixkv.offload.tiers.block_object import BlockObject
from radixkv.scheduling.request import Request
from tests.core_bench import purge_at_once
from tests.fake_runner import tokens

from .test_lookups import NAMESPACE, PROMPT, remote_tokens, two_servers
from .tiered_bench import SteppedStore, TieredBench


def test_a_purge_deletes_blocks_that_another_server_stored() -> None:
    first, second, store = two_servers()
    first.prefill(PROMPT, tenant="acme")
    first.prefill(PROMPT, tenant="other")
    first.run()
    purge_at_once(second.core, tenant="acme")
    second.run()
    assert store.memory.size().num_objects == 3
    assert remote_tokens(second.prefill(PROMPT, tenant="acme")) == 0
    assert remote_tokens(second.prefill(PROMPT, tenant="other")) == 12


def test_nothing_is_loaded_before_the_store_has_purged() -> None:
    first, second, _ = two_servers()
    first.prefill(PROMPT)
    purge_at_once(second.core, tenant="")
    future = second.submit(PROMPT)
    while second.core.has_work:
        second.core.step()
    assert remote_tokens(future.result(0)) == 0
    second.run()
    assert not second.offload.purger.is_purging("redis", Namespace("fake"))


def test_a_lookup_result_older_than_a_purge_is_ignored() -> None:
    first, second, store = two_servers()
    first.prefill(PROMPT)
    future = second.submit(PROMPT)
    lookup_calls, store.calls = store.calls, []
    purge_at_once(second.core, tenant="")
    purge_calls, store.calls = store.calls, lookup_calls
    store.run()
    second.core.step()
    assert future.done(), "the request does not wait for a load"
    assert remote_tokens(future.result(0)) == 0
    store.calls = purge_calls + store.calls
    second.run()


@pytest.mark.parametrize("error", [StoreLate("late"), StoreUnavailable("gone")])
def test_a_failed_purge_is_retried(error: Exception) -> None:
    first, second, store = two_servers()
    first.prefill(PROMPT, tenant="acme")
    first.prefill(PROMPT, tenant="other")
    store.error = error
    purge_at_once(second.core, tenant="acme")
    store.run()
    assert second.offload.purger.is_purging("redis", Namespace("fake", "acme"))
    assert not second.offload.purger.is_purging("redis", Namespace("fake", "other"))
    assert not second.offload.purger.is_purging("redis", Namespace("fake", PUBLIC_TENANT))
    assert second.core.seconds_until_due() == 1.0, "the retry needs no request"
    store.error = None
    assert remote_tokens(second.prefill(PROMPT, tenant="acme")) == 0
    second.run()
    assert second.core.seconds_until_due() is None
    assert not second.offload.purger.is_purging("redis", Namespace("fake", "acme"))
    assert remote_tokens(second.prefill(PROMPT, tenant="other")) == 12


def test_blocks_of_an_invoked_adapter_are_not_looked_up_during_their_purge() -> None:
    bench, _, store = two_servers()
    marks = bench.cache.marks
    lookups = bench.offload._lookups
    marks.add("law")
    invocation = marks.invocation("law", 6)  # in the second block
    older, newer = (
        Request(PrefillParams(tokens(PROMPT)), NAMESPACE, Future(), 0.0, invocation=invocation) for _ in range(2)
    )
    blocks = list(bench.index.key_blocks(NAMESPACE, older.prompt_tokens))
    store.memory.put([BlockObject(each.key, each.parent, 0, each.tokens, memoryview(bytes(64))) for each in blocks])
    assert lookups.begin(older, 0)
    lookup_calls, store.calls = store.calls, []
    bench.offload.purge(None, "law", None)
    assert not lookups.begin(newer, 0)
    purge_calls, store.calls = store.calls, lookup_calls
    store.run()
    assert lookups.ended() == [older]
    assert bench.index.find(NAMESPACE, older.prompt_tokens, 0) == []
    store.calls = purge_calls
    store.run()
    assert lookups.begin(newer, 0)
    store.run()
    lookups.ended()
    found = bench.index.find(NAMESPACE, newer.prompt_tokens, 0)
    assert [each.block for each in found] == blocks[:1], (
        "only the block before the invocation, which the base model computed"
    )


def test_the_engine_is_woken_when_a_call_must_be_retried() -> None:
    store = SteppedStore(100)
    has_failed_at_wake: list[bool] = []
    bench = TieredBench(redis=store, wake=lambda: has_failed_at_wake.append(bench.offload.purger.has_failed))
    purge_at_once(bench.core, tenant="acme")
    store.run()
    assert has_failed_at_wake == []
    store.error = StoreUnavailable("gone")
    purge_at_once(bench.core, tenant="acme")
    store.run()
    assert has_failed_at_wake[0]
