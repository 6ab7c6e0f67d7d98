"""On shutdown, recently used blocks are saved to the disk, and evicted last by the next process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from radixkv.api.retention import Retention
from radixkv.namespace import Namespace
from radixkv.offload import restart
from radixkv.offload.index.retention import RetentionHint
from radixkv.offload.tiers.block_object import HEAD_BYTES
from radixkv.tokens import TOKEN_BYTES
from tests.fake_runner import tokens

from .tiered_bench import BLOCK_SIZE, PAYLOAD_BYTES, SteppedStore, TieredBench

NAMESPACE = Namespace("fake")


class ImmediateStore(SteppedStore):
    """A store that runs its first `num_calls` calls at once, and no later ones."""

    def __init__(self, num_blocks: int, num_calls: int = 1000) -> None:
        super().__init__(num_blocks)
        self.num_calls = num_calls

    def _later(self, call: Callable[[], Any]) -> Future[Any]:
        future = super()._later(call)
        if self.num_calls:
            self.num_calls -= 1
            self.run()
        return future


class FakeRecord:
    """Fakes a `DiskRecord`: keeps the eviction order and the priorities that it receives."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.hints: list[tuple[bytes, RetentionHint]] = []

    def note(self, namespace: Namespace) -> None:
        pass

    def persist_order(self, keys: Sequence[bytes]) -> None:
        self.keys = list(keys)

    def persist_priorities(self, hints: Sequence[tuple[bytes, RetentionHint]]) -> None:
        self.hints = list(hints)


def save_on_shutdown(bench: TieredBench, limit_s: float = 60.0) -> tuple[bool, list[bytes]]:
    """Return whether all blocks were saved, and the tokens of the blocks on the disk, in eviction order."""
    record: Any = FakeRecord()
    save = restart.ShutdownSave(bench.cache, bench.index, bench.offload._saver, record)
    is_complete = save.run(limit_s)
    assert record.keys == list(bench.index.tiers.get("disk", ()))
    loans = bench.stores["disk"].memory.get(record.keys)
    tokens_end = HEAD_BYTES + TOKEN_BYTES * BLOCK_SIZE
    return is_complete, [bytes(loan.data[HEAD_BYTES:tokens_end]) for loan in loans if loan is not None]


def prefill_each(bench: TieredBench, *firsts: int, num_tokens: int = 13) -> None:
    """Prefill prompts with the tokens from these ones on, a second apart."""
    for first in firsts:
        bench.clock.now_s += 1.0
        bench.prefill(range(first, first + num_tokens))


def tokens_of_blocks(*starts: int) -> list[bytes]:
    """Return the tokens of the blocks that begin with these tokens."""
    return [tokens(range(start, start + 4)) for start in starts]


def test_recently_used_blocks_are_evicted_last_and_ends_before_beginnings() -> None:
    bench = TieredBench(num_blocks=12, disk=ImmediateStore(100))
    prefill_each(bench, 100, 200, 300, 200)
    assert save_on_shutdown(bench) == (True, tokens_of_blocks(108, 104, 100, 308, 304, 300, 208, 204, 200))


def test_a_long_prompt_is_evicted_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "_SAVED_AT_ONCE", 2)
    bench = TieredBench(num_blocks=12, disk=ImmediateStore(100))
    prefill_each(bench, 100, num_tokens=21)
    assert save_on_shutdown(bench) == (True, tokens_of_blocks(116, 112, 108, 104, 100))


def test_blocks_evicted_before_shutdown_are_evicted_first() -> None:
    bench = TieredBench(num_blocks=12, disk=ImmediateStore(100))
    prefill_each(bench, 100)
    bench.evict(4)
    prefill_each(bench, 200)
    assert save_on_shutdown(bench)[1] == tokens_of_blocks(108, 104, 100, 208, 204, 200)


def test_retained_blocks_are_evicted_last() -> None:
    """The cache retains at most a fifth of its twelve blocks, so two of these three."""
    bench = TieredBench(num_blocks=12, disk=ImmediateStore(100))
    prefill_each(bench, 100, 200)
    bench.core.retain(NAMESPACE, tokens(range(100, 112)), Retention(90))
    assert save_on_shutdown(bench)[1] == tokens_of_blocks(108, 208, 204, 200, 104, 100)


def test_priorities_are_recorded_for_the_next_process() -> None:
    bench = TieredBench(num_blocks=12, disk=ImmediateStore(100))
    prefill_each(bench, 100, 200)
    bench.core.retain(NAMESPACE, tokens(range(100, 108)), Retention(90, ttl_s=60.0))
    record: Any = FakeRecord()
    restart.ShutdownSave(bench.cache, bench.index, bench.offload._saver, record).run(60.0)
    assert record.hints == [(key, RetentionHint(90, bench.clock() + 60.0)) for key in record.keys[-2:]]


def test_recorded_priorities_are_kept_if_the_disk_was_not_scanned_completely() -> None:
    bench = TieredBench(num_blocks=12, disk=ImmediateStore(100))
    prefill_each(bench, 100)
    bench.core.retain(NAMESPACE, tokens(range(100, 108)), Retention(90))
    record: Any = FakeRecord()
    record.hints = [(b"earlier", RetentionHint(90, None))]
    save = restart.ShutdownSave(bench.cache, bench.index, bench.offload._saver, record)
    assert save.run(60.0, knows_disk=False)
    assert record.hints == [(b"earlier", RetentionHint(90, None))]
    assert len(record.keys) == 3


def test_a_small_disk_gets_the_most_recently_used_blocks() -> None:
    bench = TieredBench(num_blocks=12, disk=ImmediateStore(4))
    prefill_each(bench, 100, 200)
    assert save_on_shutdown(bench)[1] == tokens_of_blocks(100, 208, 204, 200)


def test_the_shutdown_save_reports_that_time_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "_SAVED_AT_ONCE", 2)
    bench = TieredBench(num_blocks=12, disk=ImmediateStore(100, num_calls=2))
    prefill_each(bench, 100, 200)
    assert save_on_shutdown(bench, limit_s=0.0) == (False, tokens_of_blocks(208, 204, 200)), (
        "no block of the first prompt was saved"
    )


def test_a_small_bound_of_waiting_copies_truncates_no_prompt() -> None:
    bench = TieredBench(num_blocks=12, max_bytes=2 * PAYLOAD_BYTES, disk=ImmediateStore(100))
    prefill_each(bench, 100)
    assert save_on_shutdown(bench) == (True, tokens_of_blocks(108, 104, 100))


def _no_memory(*_: object) -> None:
    raise MemoryError


def test_the_shutdown_save_reports_dropped_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = TieredBench(num_blocks=12, disk=ImmediateStore(100))
    prefill_each(bench, 100)
    monkeypatch.setattr(bench.mover, "read", _no_memory)
    assert save_on_shutdown(bench) == (False, [])


def test_without_a_disk_only_evicted_blocks_are_saved() -> None:
    bench = TieredBench(num_blocks=12, host=ImmediateStore(100))
    prefill_each(bench, 100)
    bench.cache.evict(1)
    save = restart.ShutdownSave(bench.cache, bench.index, bench.offload._saver, None)
    assert save.run(60.0)
    assert bench.stores["host"].memory.size().num_objects == 0, "an incomplete block is not stored"
    bench.cache.evict(1)
    assert save.run(60.0)
    assert bench.stores["host"].memory.size().num_objects == 1
