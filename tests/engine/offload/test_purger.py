"""A purge of one server reaches what all servers stored, however late the store answers."""

from __future__ import annotations

import pytest

from radixkv.errors import StoreLate, StoreUnavailable
from radixkv.namespace import PUBLIC_TENANT, Namespace
from tests.core_bench import purge_at_once

from .test_lookups import PROMPT, remote, two_servers


def test_a_purge_reaches_what_another_server_stored() -> None:
    first, second, store = two_servers()
    first.prefill(PROMPT, tenant="acme")
    first.prefill(PROMPT, tenant="other")
    first.run()
    purge_at_once(second.core, tenant="acme")
    second.run()
    assert store.memory.size().num_objects == 3
    assert remote(second.prefill(PROMPT, tenant="acme")) == 0
    assert remote(second.prefill(PROMPT, tenant="other")) == 12


def test_nothing_is_loaded_before_the_store_has_purged() -> None:
    first, second, _ = two_servers()
    first.prefill(PROMPT)
    purge_at_once(second.core, tenant="")
    future = second.submit(PROMPT)
    while second.core.has_work:
        second.core.step()
    assert remote(future.result(0)) == 0
    second.run()
    assert not second.offload.purger.is_purging("redis", Namespace("fake"))


def test_an_answer_that_is_older_than_a_purge_is_not_believed() -> None:
    first, second, store = two_servers()
    first.prefill(PROMPT)
    future = second.submit(PROMPT)
    ask, store.calls = store.calls, []
    purge_at_once(second.core, tenant="")
    purge, store.calls = store.calls, ask
    store.run()
    second.core.step()
    assert future.done(), "it waits for no load"
    assert remote(future.result(0)) == 0
    store.calls = purge + store.calls
    second.run()


@pytest.mark.parametrize("error", [StoreLate("late"), StoreUnavailable("gone")])
def test_a_store_that_can_not_be_asked_is_asked_again(error: Exception) -> None:
    first, second, store = two_servers()
    first.prefill(PROMPT, tenant="acme")
    first.prefill(PROMPT, tenant="other")
    store.error = error
    purge_at_once(second.core, tenant="acme")
    store.run()
    assert second.offload.purger.is_purging("redis", Namespace("fake", "acme"))
    assert not second.offload.purger.is_purging("redis", Namespace("fake", "other"))
    assert not second.offload.purger.is_purging("redis", Namespace("fake", PUBLIC_TENANT))
    assert second.core.seconds_to_rest() == 1.0, "also if no request comes"
    store.error = None
    assert remote(second.prefill(PROMPT, tenant="acme")) == 0
    second.run()
    assert second.core.seconds_to_rest() is None
    assert not second.offload.purger.is_purging("redis", Namespace("fake", "acme"))
    assert remote(second.prefill(PROMPT, tenant="other")) == 12
