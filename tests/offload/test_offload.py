"""Evicted blocks are restored exactly, whatever the stores do in the meantime."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.api.miss_reason import MissReason
from radixkv.api.params import PrefillParams
from radixkv.api.result import PrefillResult
from radixkv.api.retention import Grant, Retention
from radixkv.api.segments import StoredNamespace
from radixkv.compute.forward import Chunk
from radixkv.compute.runner import StepResult
from radixkv.errors import DeadlinePassed, InvalidRequest, StoreLate, StorePaused, StoreUnavailable
from radixkv.namespace import Namespace
from radixkv.offload import offload
from radixkv.offload.block_keys import BlockKeys
from radixkv.offload.copies import CompleteCopy, Copy
from radixkv.offload.index.prompt_blocks import FetchedBlocks
from radixkv.offload.offload import Offload
from radixkv.offload.tiers.block_object import BlockObject
from radixkv.offload.tiers.block_store import PutOutcome, PutResult
from radixkv.scheduling.request import Request
from tests.core_bench import purge_at_once
from tests.fake_runner import next_token, tokens
from tests.patience import PATIENCE_S

from .tiered_bench import (
    BLOCK_SIZE,
    FLOOD,
    FORMAT,
    PAYLOAD_BYTES,
    PROMPT,
    FakeMover,
    TieredBench,
    compute_and_evict_prompt,
)

NAMESPACE = Namespace("fake")
WITHOUT_LOADS = (5, 10)  # seeds whose stores are so small that nothing is loaded


def cached_by_tier(result: PrefillResult) -> tuple[int, int, int]:
    """Return the numbers of cached tokens that came from the device, host memory and disk."""
    usage = result.usage
    assert usage.device_tokens + usage.host_tokens + usage.disk_tokens == usage.cached_tokens
    assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
    return usage.device_tokens, usage.host_tokens, usage.disk_tokens


def test_an_evicted_prompt_is_loaded_and_not_computed() -> None:
    bench = compute_and_evict_prompt(TieredBench())
    result = bench.prefill(PROMPT)
    assert cached_by_tier(result) == (0, 12, 0)
    assert result.miss_reason is MissReason.NONE
    assert bench.runner.steps[-1] == [(12, 13)]
    assert result.next_token_id == next_token(tokens(PROMPT))
    assert bench.cache.match(NAMESPACE, tokens(PROMPT)).cached_tokens == 12


@pytest.mark.parametrize(("is_asynchronous", "expected"), [(True, [1, 1, 1]), (False, [0, 0, 1])])
def test_stores_do_not_work_while_a_step_keeps_the_host_busy(
    is_asynchronous: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are saved after a step is launched, or after its results are sent if the host computes it."""
    bench = TieredBench()
    monkeypatch.setattr(bench.runner, "is_asynchronous", is_asynchronous)
    bench.prefill(PROMPT)
    # Calls of the store: when the fake runner computes the step, when the request is answered, and after the step.
    num_calls: list[int] = []
    run_step = bench.runner.run

    def count_and_run(chunks: Sequence[Chunk]) -> StepResult:
        num_calls.append(len(bench.stores["host"].calls))
        return run_step(chunks)

    monkeypatch.setattr(bench.runner, "run", count_and_run)
    answer = bench.submit(FLOOD)
    answer.add_done_callback(lambda _: num_calls.append(len(bench.stores["host"].calls)))
    bench.core.step()
    num_calls.append(len(bench.stores["host"].calls))
    assert num_calls == expected


def test_a_probe_reports_stored_tokens() -> None:
    bench = TieredBench(num_blocks=6)
    bench.prefill(PROMPT)
    bench.evict(3)  # of four blocks
    result = bench.core.probe(NAMESPACE, tokens(PROMPT))
    assert (result.cached_tokens, result.stored_tokens, result.miss_reason) == (4, 8, MissReason.EVICTED)
    assert bench.core.probe(NAMESPACE, tokens(range(6))).stored_tokens == 0


def bench_with_late_answer() -> TieredBench:
    """Return a bench whose store has answered that it stored `PROMPT`, but only after the engine became idle."""
    bench = TieredBench()
    bench.prefill(PROMPT)
    bench.submit(FLOOD)
    while bench.core.has_work:
        bench.core.step()
    (store,) = bench.stores.values()
    store.run()
    return bench


def test_the_first_request_after_an_idle_time_loads_blocks_stored_in_it() -> None:
    assert cached_by_tier(bench_with_late_answer().prefill(PROMPT)) == (0, 12, 0)


def test_a_probe_after_an_idle_time_reports_blocks_stored_in_it() -> None:
    assert bench_with_late_answer().core.probe(NAMESPACE, tokens(PROMPT)).stored_tokens == 12


def flood(bench: TieredBench, num_prompts: int) -> None:
    """Compute other prompts of three whole blocks, and evict them to the stores."""
    for seed in range(1, num_prompts + 1):
        bench.prefill(range(1000 * seed, 1000 * seed + 15))
        bench.evict(4)


def test_a_retained_stored_prompt_is_evicted_after_others() -> None:
    bench = compute_and_evict_prompt(TieredBench(host=8))
    retained = bench.core.retain(NAMESPACE, tokens(PROMPT), Retention(90, ttl_s=100.0))
    assert retained.grant == Grant(12, 0, 1, bench.clock() + 100.0), "three whole blocks are stored"
    flood(bench, 4)
    assert bench.core.probe(NAMESPACE, tokens(PROMPT)).stored_tokens == 12
    bench.clock.now_s += 101.0
    flood(bench, 4)
    assert bench.core.probe(NAMESPACE, tokens(PROMPT)).stored_tokens == 0


def test_a_prompt_whose_priority_was_reset_is_evicted_like_others() -> None:
    bench = compute_and_evict_prompt(TieredBench(host=8))
    bench.core.retain(NAMESPACE, tokens(PROMPT), Retention(90))
    bench.core.retain(NAMESPACE, tokens(PROMPT), Retention(50))
    flood(bench, 4)
    assert bench.core.probe(NAMESPACE, tokens(PROMPT)).stored_tokens == 0


def test_a_prompt_that_is_not_stored_is_not_retained_later() -> None:
    bench = TieredBench(host=8)
    assert bench.core.retain(NAMESPACE, tokens(PROMPT), Retention(90)).grant == Grant(0, 0, 13)
    flood(compute_and_evict_prompt(bench), 4)
    assert bench.core.probe(NAMESPACE, tokens(PROMPT)).stored_tokens == 0


def test_the_blocks_of_a_store_are_listed_by_namespace() -> None:
    bench = compute_and_evict_prompt(TieredBench(host=100))
    page = bench.offload.stored("host", 0, None, 10)
    assert page.namespaces == (StoredNamespace(NAMESPACE, 3),)
    bench.core.retain(NAMESPACE, tokens(range(8)), Retention(90))
    assert bench.offload.stored("host", 0, None, 10).namespaces == (StoredNamespace(NAMESPACE, 3, 2),)
    with pytest.raises(InvalidRequest, match="store: expected one of host, got 'attic'"):
        bench.offload.stored("attic", 0, None, 10)


def fetched_from(bench: TieredBench, first_block: int = 0) -> FetchedBlocks:
    """Compute `PROMPT` on a bench, and return its blocks from `first_block` on, as if they were fetched from there."""
    bench.prefill(PROMPT)
    blocks = list(bench.index.key_blocks(NAMESPACE, tokens(PROMPT)))[first_block:]
    block_ids = bench.cache.match(NAMESPACE, tokens(PROMPT)).block_ids.tolist()
    return FetchedBlocks(first_block, blocks, FakeMover(bench.runner).read(block_ids[first_block:3]).payloads)


def prefill_with_fetched(bench: TieredBench, fetched: FetchedBlocks, **params: bool) -> PrefillResult:
    """Prefill `PROMPT` with a request that comes with fetched blocks."""
    future: Future[PrefillResult] = Future()
    bench.core.submit(Request(PrefillParams(tokens(PROMPT), **params), NAMESPACE, future, 0.0, fetched=fetched))
    bench.run()
    return future.result(0)


def test_fetched_blocks_are_not_computed_and_stay_cached() -> None:
    bench = TieredBench()
    result = prefill_with_fetched(bench, fetched_from(TieredBench()))
    assert (result.usage.remote_tokens, result.usage.computed_tokens) == (12, 1)
    assert result.miss_reason is MissReason.NONE
    assert result.next_token_id == next_token(tokens(PROMPT))
    assert cached_by_tier(bench.prefill(PROMPT)) == (12, 0, 0)


def test_fetched_blocks_are_kept_until_the_engine_has_copied_them() -> None:
    """The component that fetched the blocks counts their bytes until then."""
    bench = TieredBench(num_blocks=4)
    fetched = fetched_from(TieredBench())
    busy = bench.generate(range(100, 106), 9)
    future = Future()
    fetched_ref = weakref.ref(fetched)
    bench.core.step()
    bench.core.submit(Request(PrefillParams(tokens(PROMPT)), NAMESPACE, future, 0.0, fetched=fetched))
    del fetched
    bench.core.step()
    assert not future.done(), "it waits for blocks"
    assert fetched_ref() is not None
    bench.run()
    assert busy.done()
    assert future.result(0).usage.remote_tokens == 12
    assert fetched_ref() is None


def test_fetched_blocks_after_missing_ones_are_not_used() -> None:
    result = prefill_with_fetched(TieredBench(), fetched_from(TieredBench(), first_block=1))
    assert (result.usage.remote_tokens, result.usage.computed_tokens) == (0, 13)


def test_a_request_that_may_not_read_uses_no_fetched_blocks() -> None:
    result = prefill_with_fetched(TieredBench(), fetched_from(TieredBench()), read_cache=False)
    assert (result.usage.remote_tokens, result.usage.computed_tokens) == (0, 13)


def test_a_purge_drops_the_fetched_blocks_of_a_waiting_request() -> None:
    bench = TieredBench()
    future: Future[PrefillResult] = Future()
    fetched = fetched_from(TieredBench())
    bench.core.submit(Request(PrefillParams(tokens(PROMPT)), NAMESPACE, future, 0.0, fetched=fetched))
    purge_at_once(bench.core, tenant="")
    bench.run()
    assert future.result(0).usage.computed_tokens == 13


def test_a_prompt_that_no_store_has_is_computed() -> None:
    bench = compute_and_evict_prompt(TieredBench(host=100))
    bench.index.purge(None, None, None)
    assert cached_by_tier(bench.prefill(PROMPT)) == (0, 0, 0)


def test_blocks_on_the_device_are_not_loaded() -> None:
    bench = TieredBench(num_blocks=6)
    bench.prefill(PROMPT)
    bench.evict(3)  # of four blocks
    assert cached_by_tier(bench.prefill(PROMPT)) == (4, 8, 0)


def test_a_partly_shared_block_is_replaced_by_the_whole_one() -> None:
    bench = TieredBench(num_blocks=8)
    bench.prefill(PROMPT)
    bench.evict(4)
    bench.prefill(range(6))  # the first block and a half of the same prompt
    assert cached_by_tier(bench.prefill(PROMPT)) == (6, 6, 0)
    bench.cache.check()


def test_a_partly_shared_block_is_replaced_also_for_a_request_that_writes_nothing() -> None:
    """Otherwise the copy of the shared part would overwrite the loaded block."""
    bench = TieredBench(num_blocks=8)
    bench.prefill(PROMPT)
    bench.evict(4)
    bench.prefill(range(6))
    assert cached_by_tier(bench.prefill(PROMPT, write_cache=False)) == (6, 6, 0)


def test_blocks_evicted_for_a_loaded_prompt_are_saved_before_they_are_overwritten() -> None:
    bench = compute_and_evict_prompt(TieredBench())
    bench.prefill(FLOOD)
    assert cached_by_tier(bench.prefill(PROMPT)) == (0, 12, 0)
    assert cached_by_tier(bench.prefill(FLOOD)) == (0, 12, 0)  # the fake device raises if a block has wrong contents


def test_each_block_comes_from_the_fastest_store_that_has_it() -> None:
    bench = compute_and_evict_prompt(TieredBench(host=2, disk=100))
    tier_index = bench.index.tiers["host"]
    assert len(tier_index) == 2
    assert cached_by_tier(bench.prefill(PROMPT)) == (0, 8, 4)


def test_a_block_stored_once_is_not_written_again() -> None:
    bench = TieredBench()
    for _ in range(3):
        compute_and_evict_prompt(bench)
    assert sum(bench.offload.tiers["host"].counts().saved.values()) == 3


def test_tenants_do_not_load_blocks_of_each_other() -> None:
    bench = TieredBench()
    bench.prefill(PROMPT, tenant="acme")
    bench.prefill(FLOOD, tenant="acme")
    assert cached_by_tier(bench.prefill(PROMPT, tenant="other")) == (0, 0, 0)
    bench.prefill(FLOOD, tenant="other")
    assert cached_by_tier(bench.prefill(PROMPT, tenant="acme")) == (0, 12, 0)


def test_adapters_do_not_load_blocks_of_each_other() -> None:
    bench = TieredBench()
    bench.prefill(PROMPT, adapter="law")
    bench.prefill(FLOOD)
    assert cached_by_tier(bench.prefill(PROMPT, adapter="tax")) == (0, 0, 0)
    assert cached_by_tier(bench.prefill(PROMPT)) == (0, 0, 0)
    assert cached_by_tier(bench.prefill(PROMPT, adapter="law")) == (0, 12, 0)


def test_other_requests_run_while_blocks_are_loaded() -> None:
    bench = compute_and_evict_prompt(TieredBench(num_blocks=5))
    waiting = bench.submit(PROMPT)
    assert not bench.core.has_work  # nothing to compute until the store answers
    other = bench.submit(range(50, 54))
    bench.core.step()
    assert other.done()
    assert not waiting.done()
    bench.run()
    assert cached_by_tier(waiting.result(0))[1] > 0


def test_requests_for_the_same_blocks_share_a_load() -> None:
    bench = compute_and_evict_prompt(TieredBench(num_blocks=12))
    futures = [bench.submit(PROMPT) for _ in range(3)]
    (store,) = bench.stores.values()
    assert len(store.calls) == 1
    bench.run()
    assert [future.result(0).usage.cached_tokens for future in futures] == [12, 12, 12]
    assert bench.offload.tiers["host"].counts().loaded == 3


@pytest.mark.parametrize("error", [StoreLate("late"), StoreUnavailable("gone")])
def test_blocks_for_which_a_store_does_not_answer_are_computed(error: Exception) -> None:
    bench = compute_and_evict_prompt(TieredBench())
    (store,) = bench.stores.values()
    store.error = error
    result = bench.prefill(PROMPT)
    assert cached_by_tier(result) == (0, 0, 0)
    assert result.miss_reason is MissReason.NOT_LOADED
    assert result.next_token_id == next_token(tokens(PROMPT))


def test_blocks_are_loaded_from_a_store_that_recovers() -> None:
    bench = compute_and_evict_prompt(TieredBench(num_blocks=4))
    (store,) = bench.stores.values()
    store.error = StoreUnavailable("gone")
    bench.prefill(PROMPT)
    bench.evict(4)
    store.error = None
    assert cached_by_tier(bench.prefill(PROMPT)) == (0, 12, 0)


def test_blocks_that_a_store_has_lost_are_computed_and_stored_again() -> None:
    bench = compute_and_evict_prompt(TieredBench())
    (store,) = bench.stores.values()
    keys = list(bench.index.tiers["host"])
    store.memory.delete(keys)
    assert cached_by_tier(bench.prefill(PROMPT)) == (0, 0, 0)
    bench.evict(4)
    assert cached_by_tier(bench.prefill(PROMPT)) == (0, 12, 0)


def test_a_block_evicted_and_stored_in_one_call_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the block was stored before or after its eviction is unknown, so it is deleted."""
    bench = TieredBench()
    (store,) = bench.stores.values()
    put = store.memory.put

    def put_and_report_eviction(objects: Sequence[BlockObject], _: Sequence[bytes]) -> PutResult:
        return PutResult(put(objects).outcomes, evicted=(objects[0].key,))

    monkeypatch.setattr(store.memory, "put", put_and_report_eviction)
    compute_and_evict_prompt(bench)
    bench.run()
    assert len(bench.index.tiers["host"]) == store.memory.size().num_objects == 2


def test_blocks_after_a_gap_are_not_used() -> None:
    bench = compute_and_evict_prompt(TieredBench())
    (store,) = bench.stores.values()
    found = bench.index.find(NAMESPACE, tokens(PROMPT), 0)
    store.memory.delete([found[1].block.key])
    assert cached_by_tier(bench.prefill(PROMPT)) == (0, 4, 0)


def test_a_cancelled_request_releases_its_load() -> None:
    bench = compute_and_evict_prompt(TieredBench())
    (store,) = bench.stores.values()
    bench.submit(PROMPT).cancel()
    bench.run()
    assert store.memory.size().num_objects == 3
    assert all(not entry.num_readers for _, entry in store.memory._table)
    assert cached_by_tier(bench.prefill(PROMPT)) == (0, 12, 0)


def test_a_deadline_ends_a_request_that_waits_for_a_store() -> None:
    bench = compute_and_evict_prompt(TieredBench())
    future = bench.submit(PROMPT, deadline_s=5.0)
    bench.clock.now_s = 6.0
    bench.core.step()
    with pytest.raises(DeadlinePassed):
        future.result(0)
    bench.run()


def test_evicted_blocks_of_a_preempted_generation_are_loaded_and_not_recomputed() -> None:
    bench = TieredBench(num_blocks=8)
    futures = [bench.generate(range(first, first + 9), 16) for first in (0, 100)]
    bench.run()
    num_preemptions = bench.core.stats.load().requests.pauses
    assert num_preemptions
    for first, future in zip((0, 100), futures, strict=True):
        result = future.result(0)
        ids = [*range(first, first + 9), *result.token_ids]
        assert all(ids[end] == next_token(tokens(ids[:end])) for end in range(9, len(ids)))
        assert result.usage.recomputed_tokens <= num_preemptions * BLOCK_SIZE, "only the incomplete last block"
        assert result.usage.host_tokens == 0, "nothing of its prompt was cached when it began"
    assert bench.offload.tiers["host"].counts().loaded


def test_a_preempted_generation_can_be_cancelled_while_its_blocks_are_loaded() -> None:
    bench = TieredBench(num_blocks=8)
    futures = [bench.generate(range(first, first + 9), 16) for first in (0, 100)]
    while not bench.offload._loader._pending:
        for store in bench.stores.values():
            store.run()
        bench.core.step()
    futures[1].cancel()
    bench.run()
    assert futures[0].result(0).usage.generated_tokens == 16
    assert not bench.offload._resuming
    assert not bench.offload._loader._pending


def test_a_request_that_may_not_read_loads_nothing() -> None:
    bench = compute_and_evict_prompt(TieredBench())
    assert cached_by_tier(bench.prefill(PROMPT, read_cache=False)) == (0, 0, 0)


def test_a_request_that_does_not_write_the_cache_publishes_no_loaded_blocks() -> None:
    bench = compute_and_evict_prompt(TieredBench())
    assert cached_by_tier(bench.prefill(PROMPT, write_cache=False)) == (0, 12, 0)
    assert bench.cache.match(NAMESPACE, tokens(PROMPT)).cached_tokens == 0


def test_nothing_of_a_purged_namespace_is_loaded() -> None:
    bench = compute_and_evict_prompt(TieredBench())
    purge_at_once(bench.core, tenant="")
    assert cached_by_tier(bench.prefill(PROMPT)) == (0, 0, 0)
    (store,) = bench.stores.values()
    assert store.memory.size().num_objects == 0


def test_failed_deletions_are_retried_even_without_requests() -> None:
    bench = compute_and_evict_prompt(TieredBench())
    (store,) = bench.stores.values()
    store.error = StoreUnavailable("gone")
    purge_at_once(bench.core, tenant="")
    store.run()
    assert bench.core.seconds_until_due() == 1.0
    store.error = None
    bench.run()
    assert store.memory.size().num_objects == 0
    assert bench.core.seconds_until_due() is None


def test_failed_deletions_are_retried_once_per_second_in_one_call() -> None:
    bench = TieredBench(host=3)
    (store,) = bench.stores.values()
    store.error = StoreUnavailable("gone")
    for first in range(0, 1000, 100):
        bench.submit(range(first, first + 13))
        while bench.core.has_work or store.calls:
            bench.core.step()
            store.run()
    bench.core.step()
    store.run()  # the blocks of the last failed save are deleted, which fails, too
    for _ in range(10):
        bench.core.step()
        assert not store.calls
    bench.clock.now_s += 1.0
    bench.core.step()
    assert len(store.calls) == 1


def test_purged_blocks_that_are_evicted_again_before_the_store_recovers_are_deleted() -> None:
    bench = compute_and_evict_prompt(TieredBench())
    (store,) = bench.stores.values()
    store.error = StorePaused("paused")
    purge_at_once(bench.core, tenant="")
    store.run()
    bench.submit(PROMPT)
    bench.core.step()
    bench.cache.evict(4)
    bench.clock.now_s += 2.0
    bench.core.step()  # retries the deletion, while the blocks are on their way to the store
    store.run()
    store.error = None
    bench.run()
    assert store.memory.size().num_objects == len(bench.index.tiers["host"]) == 0


def test_a_call_that_never_reached_a_store_leaves_nothing_to_delete() -> None:
    bench = TieredBench()
    (store,) = bench.stores.values()
    store.error = StorePaused("paused")
    compute_and_evict_prompt(bench)
    assert len(bench.index.tiers["host"]) == 0
    assert not store.calls
    assert bench.core.seconds_until_due() is None
    assert bench.offload.stats()[0].refused_blocks == 3


def test_a_failed_deletion_is_retried_before_the_stores_are_closed() -> None:
    bench = compute_and_evict_prompt(TieredBench(disk=100))
    (store,) = bench.stores.values()
    store.error = StoreUnavailable("gone")
    purge_at_once(bench.core, tenant="")
    store.run()
    store.error = None

    def call_at_once(call: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(call())
        return answer

    store._later = call_at_once  # type: ignore[method-assign]
    bench.offload.close()
    assert store.memory.size().num_objects == 0
    assert not bench.offload._deleter.has_failed


def test_a_purge_reports_that_the_disk_could_not_be_scanned() -> None:
    bench = compute_and_evict_prompt(TieredBench(disk=100))
    bench.offload._disk_scan = SimpleNamespace(has_failed=True, has_more=False, take=lambda: None)  # type: ignore[assignment]
    indexed, unscanned = bench.offload.purge("", None, None)
    bench.run()
    assert (indexed.tier, indexed.num_deleted.result(0)) == ("disk", 3)
    assert (unscanned.tier, unscanned.num_deleted.result(0)) == ("disk", None)


class SlowCopy(CompleteCopy):
    """A copy to the device that is complete when a test says so."""

    has_ended = False

    def is_complete(self) -> bool:
        return self.has_ended


def test_loans_are_held_until_the_device_has_copied_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = compute_and_evict_prompt(TieredBench(host=3))
    copy = SlowCopy(seconds=7.0)
    write = bench.mover.write
    memory = bench.stores["host"].memory

    def write_slowly(block_ids: Sequence[int], payloads: Sequence[memoryview]) -> Copy:
        write(block_ids, payloads)
        return copy

    monkeypatch.setattr(bench.mover, "write", write_slowly)
    future = bench.submit(PROMPT)
    while not future.done():
        bench.stores["host"].run()
        bench.core.step()
    assert cached_by_tier(future.result(0)) == (0, 12, 0)
    other = BlockObject(bytes(32), bytes(32), 0, bytes(BLOCK_SIZE * 4), memoryview(bytes(PAYLOAD_BYTES)))
    assert memory.put([other]).outcomes == (PutOutcome.NO_ROOM,), "all three blocks are lent"
    assert bench.offload.seconds_until_due() == 1.0
    assert bench.choice.choose(0, ["host"] * 3) == 3
    copy.has_ended = True
    bench.core.step()
    assert memory.put([other]).outcomes == (PutOutcome.STORED,)
    assert bench.offload.seconds_until_due() is None
    assert bench.choice.choose(0, ["host"] * 3) == 0, "the copy took longer than computing the blocks"


def test_evicted_blocks_are_lost_if_there_is_no_memory_to_copy_them(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = TieredBench()
    with monkeypatch.context() as patched:
        patched.setattr(bench.mover, "read", _no_memory)
        compute_and_evict_prompt(bench)
    assert bench.offload.stats()[0].dropped_blocks == 3
    assert cached_by_tier(bench.prefill(PROMPT)) == (0, 0, 0)
    bench.evict(4)
    assert cached_by_tier(bench.prefill(PROMPT)) == (0, 12, 0)


def _no_memory(*_: object) -> list[memoryview]:
    raise MemoryError


def test_a_load_that_ends_while_steps_run_ahead_is_used() -> None:
    """Its wake-up may be consumed before the next step is checked."""
    bench = compute_and_evict_prompt(TieredBench(num_blocks=16))
    (store,) = bench.stores.values()
    long = bench.generate(range(100, 104), 40)
    for _ in range(3):
        bench.core.step()
    short = bench.submit(PROMPT)
    bench.core.step()
    store.run()
    for _ in range(6):
        bench.core.step()
    assert cached_by_tier(short.result(0)) == (0, 12, 0)
    assert not long.done()


def test_a_purge_while_blocks_are_loaded_leaves_nothing_of_them() -> None:
    bench = compute_and_evict_prompt(TieredBench())
    future = bench.submit(PROMPT)
    purge_at_once(bench.core, tenant="")
    bench.run()
    assert cached_by_tier(future.result(0)) == (0, 0, 0)
    assert future.result(0).miss_reason is MissReason.EVICTED
    assert bench.cache.match(NAMESPACE, tokens(PROMPT)).cached_tokens == 0


def test_a_purge_deletes_blocks_that_are_still_being_saved() -> None:
    bench = TieredBench()
    bench.prefill(PROMPT)
    bench.submit(FLOOD)
    bench.core.step()  # the store has received the call, and has done nothing
    purge_at_once(bench.core, tenant="")
    bench.run()
    (store,) = bench.stores.values()
    assert store.memory.size().num_objects == 0
    assert cached_by_tier(bench.prefill(PROMPT)) == (0, 0, 0)


def test_copies_waiting_to_be_stored_are_bounded() -> None:
    bench = TieredBench(max_bytes=2 * PAYLOAD_BYTES)
    bench.prefill(PROMPT)
    bench.submit(FLOOD)
    while bench.core.has_work:
        bench.core.step()
    assert bench.offload.stats()[0].dropped_blocks == 1
    bench.run()
    assert cached_by_tier(bench.prefill(PROMPT)) == (0, 8, 0), "the last block was dropped"


def test_blocks_that_are_being_loaded_are_bounded() -> None:
    bench = compute_and_evict_prompt(TieredBench(max_bytes=4 * PAYLOAD_BYTES))
    bench.offload._loader._num_free_blocks = 2
    result = bench.prefill(PROMPT)
    assert cached_by_tier(result) == (0, 8, 0)
    assert result.miss_reason is MissReason.NOT_LOADED
    assert bench.offload._loader._num_free_blocks == 2


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_reads_only_its_own_blocks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake device raises where a position holds anything but K and V of this prefix."""
    monkeypatch.setattr(offload, "_RETRY_PERIOD_S", 0.0)
    rng = random.Random(seed)
    bench = TieredBench(num_blocks=rng.choice([4, 6, 9]), host=rng.choice([1, 3, 8]), disk=rng.choice([8, 20]))
    futures = []
    generations = []
    num_loaded_tokens = 0
    for _ in range(200):
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
        elif choice < 0.65:
            ids = [*range(rng.choice([0, 4, 8])), rng.randrange(3)]
            generations.append((ids, bench.generate(ids, rng.randrange(1, 10), tenant=rng.choice("ab"))))
        bench.core.step()
        bench.cache.check()
    for store in bench.stores.values():
        store.error = None
    bench.run()
    for ids, future in futures:
        assert future.done()
        if not future.cancelled() and future.exception() is None:
            assert future.result(0).next_token_id == next_token(tokens(ids))
            _, host_tokens, disk_tokens = cached_by_tier(future.result(0))
            num_loaded_tokens += host_tokens + disk_tokens
    for ids, future in generations:
        if future.exception(0) is None:
            answer = [*ids, *future.result(0).token_ids]
            assert all(answer[end] == next_token(tokens(answer[:end])) for end in range(len(ids), len(answer)))
    assert num_loaded_tokens or seed in WITHOUT_LOADS
    purge_at_once(bench.core, tenant=None)
    bench.run()
    assert bench.cache.pool.num_free == bench.cache.pool.num_blocks
    assert [store.memory.size().num_objects for store in bench.stores.values()] == [0, 0]


def test_objects_that_a_store_did_not_take_count_as_refused() -> None:
    bench = TieredBench(num_blocks=12, host=2)
    bench.prefill(range(13))
    (store,) = bench.stores.values()
    store.error = StoreUnavailable("gone")
    bench.evict(12)
    bench.offload._loader.num_computed_blocks["host"] = 5
    (stats,) = bench.offload.stats()
    assert (stats.saved_blocks, stats.refused_blocks) == (0, 3)
    assert (stats.computed_blocks, stats.dropped_blocks) == (5, 0)


def test_an_unused_store_works_and_has_counted_nothing() -> None:
    bench = TieredBench(host=3)
    (stats,) = bench.offload.stats()
    assert (stats.tier, stats.is_working, stats.blocks, stats.missed_blocks) == ("host", True, 0, 0)
    lookup = bench.offload.tiers["host"].exists([bytes(32)])
    bench.stores["host"].run()
    assert lookup.result(PATIENCE_S) == [False]


def test_a_store_that_could_not_be_opened_does_not_work_and_holds_nothing() -> None:
    bench = TieredBench()
    offload = Offload(bench.cache, bench.index, [], bench.mover, 0, BlockKeys(FORMAT), bench.choice, unopened=["disk"])
    (stats,) = offload.stats()
    assert (stats.tier, stats.is_working, stats.blocks, stats.capacity_bytes, stats.saved_blocks) == (
        "disk",
        False,
        0,
        0,
        0,
    )
