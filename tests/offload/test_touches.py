"""Shared stores are notified of hits on the device, and receive blocks again that they have lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from radixkv.errors import StoreLate
from radixkv.namespace import Namespace
from radixkv.offload import touches
from tests.core_bench import purge_at_once
from tests.fake_runner import next_token, tokens

from .tiered_bench import SteppedStore, TieredBench

NAMESPACE = Namespace("fake")
HOT = range(33)  # eight whole blocks and a token


def bench_and_store(**options: int) -> tuple[TieredBench, SteppedStore]:
    """Return a bench with a shared store, and the store."""
    bench = TieredBench(**{"num_blocks": 40, "redis": 100, **options})
    return bench, bench.stores["redis"]


def keys_of(bench: TieredBench, prompt: range) -> list[bytes]:
    return [block.key for block in bench.index.key_blocks(NAMESPACE, tokens(prompt))]


def prefill_hot(bench: TieredBench, suffix: int) -> None:
    """Prefill the hot prefix, followed by five tokens that depend on the number `suffix`."""
    bench.prefill([*HOT[:32], *range(1000 * suffix, 1000 * suffix + 5)])


def lose(store: SteppedStore, keys: list[bytes]) -> None:
    """Let the store evict blocks by itself, as Redis does."""
    assert store.memory.delete(keys) == len(keys)


def test_a_hit_on_the_device_touches_the_blocks_in_the_store() -> None:
    bench, store = bench_and_store()
    bench.prefill(HOT)
    store.touches.clear()
    bench.prefill(HOT)
    assert store.touches == [keys_of(bench, HOT)[::-1]], "the beginning of the prompt is the most recent"
    assert bench.offload.stats()[0].touched_blocks >= 8


def test_the_last_touch_of_a_chunked_prompt_ends_with_its_beginning() -> None:
    bench, store = bench_and_store(num_parts=40)  # with windowed layers, whose steps have only eight tokens
    bench.prefill(HOT)
    assert store.touches[-1] == keys_of(bench, HOT)[::-1]


def test_blocks_after_a_shared_prefix_are_not_touched() -> None:
    bench, store = bench_and_store()
    bench.prefill(range(33))
    store.touches.clear()
    bench.prefill([*range(18), *range(100, 103)])  # four whole blocks and a half are shared
    (touched,) = store.touches
    assert touched[-4:] == keys_of(bench, range(16))[::-1]
    assert not set(touched) & set(keys_of(bench, range(33))[4:])


def test_many_hits_are_one_touch() -> None:
    bench, store = bench_and_store()
    bench.prefill(HOT)
    store.touches.clear()
    for suffix in range(1, 7):
        bench.submit([*HOT[:32], 1000 * suffix])
    bench.run()
    assert len(store.touches) == 1
    assert sorted(store.touches[0]) == sorted(keys_of(bench, HOT))


def test_blocks_that_the_store_has_lost_are_written_again() -> None:
    bench, store = bench_and_store()
    bench.prefill(HOT)
    hot = keys_of(bench, HOT)
    lose(store, hot[2:5])
    prefill_hot(bench, 1)
    assert store.memory.exists(hot) == [True] * 8
    assert bench.offload.stats()[0].rewritten_blocks == 3
    other = TieredBench(num_blocks=40, redis=store)
    assert other.prefill(HOT).usage.remote_tokens == 32
    assert other.prefill(HOT).next_token_id == bench.prefill(HOT).next_token_id == next_token(tokens(HOT))


def test_blocks_evicted_in_the_meantime_are_written_when_they_are_computed_again() -> None:
    bench, store = bench_and_store()
    bench.prefill(HOT)
    hot = keys_of(bench, HOT)
    lose(store, hot)
    bench.submit(HOT)
    bench.core.step()
    touch_calls, store.calls = store.calls, []  # the touch is in flight
    bench.cache.evict(40)
    store.calls += touch_calls
    bench.run()
    assert bench.offload.stats()[0].rewritten_blocks == 0
    bench.prefill(HOT)
    assert store.memory.exists(hot) == [True] * 8


def test_a_block_that_is_being_stored_is_not_touched() -> None:
    bench, store = bench_and_store()
    bench.submit(HOT)
    while bench.core.has_work:
        bench.core.step()
    bench.clock.now_s += 10
    bench.core.step()
    assert not store.touches
    bench.run()
    assert len(store.touches) <= 1
    assert store.memory.exists(keys_of(bench, HOT)) == [True] * 8


def test_a_failed_touch_writes_nothing() -> None:
    bench, store = bench_and_store()
    bench.prefill(HOT)
    lose(store, keys_of(bench, HOT))
    store.error = StoreLate("late")
    prefill_hot(bench, 1)
    store.error = None
    assert bench.offload.stats()[0].rewritten_blocks == 0
    prefill_hot(bench, 2)
    assert bench.offload.stats()[0].rewritten_blocks == 8


def test_a_store_that_is_too_small_is_not_written_to_endlessly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touches, "_MAX_REWRITES", 4)
    monkeypatch.setattr(touches, "_REWRITES_PER_S", 0.0)
    bench, store = bench_and_store()
    bench.prefill(HOT)
    hot = keys_of(bench, HOT)
    for suffix in range(1, 9):
        present = [key for key, is_present in zip(hot, store.memory.exists(hot), strict=True) if is_present]
        lose(store, present)
        prefill_hot(bench, suffix)
    assert bench.offload.stats()[0].rewritten_blocks == 4


def test_the_beginning_is_written_first_when_not_all_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touches, "_MAX_REWRITES", 3)
    bench, store = bench_and_store()
    bench.prefill(HOT)
    hot = keys_of(bench, HOT)
    lose(store, hot)
    prefill_hot(bench, 1)
    assert store.memory.exists(hot) == [True] * 3 + [False] * 5


def test_a_purged_prompt_is_not_written_again() -> None:
    bench, store = bench_and_store()
    bench.prefill(HOT)
    bench.submit(HOT)
    bench.core.step()  # the touch is not sent yet, or is in flight
    purge_at_once(bench.core, tenant=None)
    bench.run()
    assert store.memory.exists(keys_of(bench, HOT)) == [False] * 8


def test_shutdown_touches_the_last_used_blocks_and_writes_lost_ones_again() -> None:
    bench, store = bench_and_store()
    bench.prefill(HOT)
    hot = keys_of(bench, HOT)
    lose(store, hot)
    bench.submit(HOT)
    while bench.core.has_work:
        bench.core.step()
    enqueue = store._later

    def call_at_once(call: Callable[[], Any]) -> Future[Any]:
        future = enqueue(call)
        store.run()
        return future

    store._later = call_at_once
    store.run()
    bench.offload.close()
    assert store.memory.exists(hot) == [True] * 8


def test_without_shared_stores_no_uses_are_recorded() -> None:
    bench = TieredBench(host=100)
    bench.prefill(HOT[:13])
    bench.prefill(HOT[:13])
    assert not bench.index.used_nodes
    assert not bench.stores["host"].touches
