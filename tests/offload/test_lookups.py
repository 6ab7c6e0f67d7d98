"""Servers that share a store find the blocks that the others computed."""

from __future__ import annotations

import random

import pytest

from radixkv.api.result import PrefillResult
from radixkv.errors import DeadlinePassed, StoreLate, StoreUnavailable
from radixkv.namespace import Namespace
from radixkv.offload import offload
from tests.core_bench import purge_at_once
from tests.fake_runner import next_token, tokens

from .tiered_bench import FLOOD, PROMPT, SteppedStore, TieredBench

NAMESPACE = Namespace("fake")


def remote_tokens(result: PrefillResult) -> int:
    """Return the number of cached tokens that came from the shared store."""
    usage = result.usage
    assert usage.device_tokens + usage.host_tokens + usage.remote_tokens == usage.cached_tokens
    return usage.remote_tokens


def two_servers(num_blocks: int = 4) -> tuple[TieredBench, TieredBench, SteppedStore]:
    """Return two servers, and the store that they share."""
    store = SteppedStore(100)
    return TieredBench(num_blocks, redis=store), TieredBench(num_blocks, redis=store), store


def test_one_server_finds_what_another_computed() -> None:
    first, second, store = two_servers()
    first.prefill(PROMPT)
    assert store.memory.size().num_objects == 3, "blocks are stored as soon as they are published, without an eviction"
    result = second.prefill(PROMPT)
    assert remote_tokens(result) == 12
    assert second.runner.steps == [[(12, 13)]]
    assert result.next_token_id == next_token(tokens(PROMPT))


def test_generated_blocks_are_shared_as_well() -> None:
    first, second, _ = two_servers()
    future = first.generate(range(6), 8)
    first.run()
    answer = [*range(6), *future.result(0).token_ids]
    assert remote_tokens(second.prefill([*answer, 1])) == 12


def test_a_prompt_is_loaded_up_to_the_first_block_that_is_not_stored() -> None:
    first, second, _ = two_servers(8)
    first.prefill(PROMPT)
    assert remote_tokens(second.prefill([*range(9), *range(50, 60)])) == 8


def test_a_gap_on_the_own_host_is_filled_from_the_shared_store() -> None:
    store = SteppedStore(100)
    TieredBench(redis=store).prefill(PROMPT)
    bench = TieredBench(host=100, redis=SteppedStore(100))
    bench.prefill(PROMPT)
    bench.evict(4)
    found = bench.index.find(NAMESPACE, tokens(PROMPT), 0)
    bench.stores["host"].memory.delete([found[1].block.key])
    bench.index.lost("host", [found[1].block.key])
    usage = bench.prefill(PROMPT).usage
    assert (usage.host_tokens, usage.remote_tokens) == (8, 4)


def test_tenants_do_not_find_blocks_of_each_other() -> None:
    first, second, _ = two_servers()
    first.prefill(PROMPT, tenant="acme")
    assert remote_tokens(second.prefill(PROMPT, tenant="other")) == 0
    assert remote_tokens(second.prefill(PROMPT, tenant="acme")) == 12


def test_blocks_that_are_known_to_be_stored_are_not_sent_again() -> None:
    first, second, _ = two_servers()
    for bench in (first, second):
        bench.prefill(PROMPT)
        bench.evict(4)
    assert sum(first.offload.tiers["redis"].counts().saved.values()) == 3
    assert sum(second.offload.tiers["redis"].counts().saved.values()) == 0


def test_blocks_that_the_store_has_lost_are_computed_and_sent_again() -> None:
    first, second, store = two_servers()
    first.prefill(PROMPT)
    second.prefill(PROMPT)
    second.evict(4)
    store.memory.delete(list(second.index.tiers["redis"]))
    assert remote_tokens(second.prefill(PROMPT)) == 0
    assert store.memory.size().num_objects == 3


def test_cached_blocks_and_requests_that_do_not_read_the_cache_need_no_lookup() -> None:
    bench = TieredBench(redis=SteppedStore(100))
    bench.prefill(PROMPT)
    bench.submit(PROMPT)
    bench.submit(FLOOD, read_cache=False)
    assert not bench.stores["redis"].calls
    bench.run()


def test_other_requests_run_while_one_waits_for_a_lookup() -> None:
    bench = TieredBench(8, redis=SteppedStore(100))
    waiting = bench.submit(PROMPT)
    short = bench.submit(range(3))
    bench.core.step()
    assert short.done()
    assert not waiting.done()
    bench.run()
    assert waiting.done()


@pytest.mark.parametrize("error", [StoreLate("late"), StoreUnavailable("gone")])
def test_a_prompt_is_computed_if_the_lookup_fails(error: Exception) -> None:
    first, second, store = two_servers()
    first.prefill(PROMPT)
    store.error = error
    result = second.prefill(PROMPT)
    assert remote_tokens(result) == 0
    assert result.next_token_id == next_token(tokens(PROMPT))
    second.evict(4)
    store.error = None
    assert remote_tokens(second.prefill(PROMPT)) == 12


def test_a_purged_request_publishes_nothing_that_others_computed_after_the_purge() -> None:
    first, second, store = two_servers()
    future = second.submit(PROMPT)
    lookup_calls, store.calls = store.calls, []
    purge_at_once(second.core, tenant="")
    store.run()
    first.prefill(PROMPT)
    store.calls = lookup_calls
    second.run()
    assert remote_tokens(future.result(0)) == 12
    assert second.cache.match(NAMESPACE, tokens(PROMPT)).cached_tokens == 0


def test_a_cancelled_or_late_request_does_not_wait_for_its_lookup() -> None:
    bench = TieredBench(redis=SteppedStore(100))
    late = bench.submit(PROMPT, deadline_s=5.0)
    cancelled = bench.submit(FLOOD)
    cancelled.cancel()
    bench.clock.now_s = 6.0
    bench.core.step()
    with pytest.raises(DeadlinePassed):
        late.result(0)
    bench.run()
    assert not bench.offload._lookups._num_open


def test_no_lookup_starts_if_computing_is_faster_than_the_answer() -> None:
    first, second, store = two_servers(16)
    first.prefill(PROMPT)
    second.choice.note_step(8e-6, [(0, 8)])
    second.choice.note_lookup("redis", 0.1)
    future = second.submit(PROMPT)
    assert not store.calls
    second.run()
    assert remote_tokens(future.result(0)) == 0
    second.evict(4)
    for _ in range(500):  # each time the store is not asked, its estimated time shrinks
        second.submit(PROMPT)
        if store.calls:
            break
        second.run()
        second.cache.evict(4)
    assert store.calls
    second.run()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_of_two_servers_reads_only_its_own_blocks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake device raises where a position holds anything but K and V of this prefix."""
    monkeypatch.setattr(offload, "_RETRY_PERIOD_S", 0.0)
    rng = random.Random(seed)
    shared = SteppedStore(rng.choice([12, 100]))
    benches = [TieredBench(rng.choice([4, 6, 9]), host=rng.choice([1, 3, 8]), redis=shared) for _ in range(2)]
    futures = []
    num_remote_tokens = 0
    for _ in range(300):
        bench = rng.choice(benches)
        for store in bench.stores.values():
            if rng.random() < 0.5:
                store.error = rng.choice([None, None, None, StoreUnavailable("gone")])
                store.run()
        choice = rng.random()
        if choice < 0.4:
            ids = [*range(rng.choice([0, 4, 8])), *(rng.randrange(3) for _ in range(rng.randrange(1, 6)))]
            future = bench.submit(ids, tenant=rng.choice("ab"), read_cache=rng.random() < 0.9)
            futures.append((ids, future))
        elif choice < 0.45 and futures:
            rng.choice(futures)[1].cancel()
        elif choice < 0.5:
            purge_at_once(bench.core, tenant=rng.choice(["a", "b", None]))
        elif choice < 0.55:
            bench.cache.evict(rng.randrange(4))
        bench.core.step()
        bench.cache.check()
    for bench in benches:
        for store in bench.stores.values():
            store.error = None
        bench.run()
    for ids, future in futures:
        assert future.done()
        if not future.cancelled() and future.exception() is None:
            assert future.result(0).next_token_id == next_token(tokens(ids))
            num_remote_tokens += remote_tokens(future.result(0))
    assert num_remote_tokens
    for bench in benches:
        purge_at_once(bench.core, tenant=None)
        bench.run()
        assert bench.cache.pool.num_free == bench.cache.pool.num_blocks
    assert not shared.memory.size().num_objects
