from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from radixkv.errors import StoreBusy, StoreError, StoreLate, StorePaused, StoreUnavailable
from radixkv.offload.tiers.block_object import ObjectFault
from radixkv.offload.tiers.block_store import Loan, PutOutcome, PutResult, StoreSize
from radixkv.offload.tiers.sealing import BlockCipher
from radixkv.offload.tiers.threaded_store import ThreadedStore
from radixkv.offload.tiers.tier import Absence, LoadedBlock, Tier
from tests.patience import PATIENCE_S

from .backends import host_memory
from .blocks import PAYLOAD_BYTES, block, key_of, object_of, payload_of, wanted


@pytest.fixture
def tier() -> Iterator[Tier]:
    with host_memory(4) as memory:
        tier = Tier("host", ThreadedStore(memory), PAYLOAD_BYTES)
        yield tier
        tier.close()


class PendingStore:
    """A store that returns the same future from all calls, which the test completes."""

    def __init__(self) -> None:
        self.answer: Future[Any] = Future()
        self.deleted: list[bytes] = []

    def put(self, *_: object) -> Future[Any]:
        return self.answer

    get = exists = put

    def delete(self, keys: list[bytes]) -> Future[Any]:
        self.deleted += keys
        return self.answer

    def size(self) -> StoreSize:
        return StoreSize(None, None, None)

    def close(self) -> None:
        pass


def store_and_tier() -> tuple[PendingStore, Tier]:
    store = PendingStore()
    return store, Tier("shared", store, PAYLOAD_BYTES)


def test_saved_blocks_are_loaded_and_counted(tier: Tier) -> None:
    tier.save([block(1), block(2)]).result(PATIENCE_S)
    first, second, third = tier.load([wanted(2), wanted(3), wanted(1)]).result(PATIENCE_S)
    assert isinstance(first, LoadedBlock)
    assert isinstance(third, LoadedBlock)
    assert (first.payload, second, third.payload) == (payload_of(2), Absence.ABSENT, payload_of(1))
    assert first.payload.readonly
    counts = tier.counts()
    assert (counts.loaded, counts.loaded_bytes) == (2, 2 * PAYLOAD_BYTES)
    assert (counts.misses, counts.saved) == ({Absence.ABSENT: 1}, {PutOutcome.STORED: 2})


def test_evictions_are_reported_and_counted(tier: Tier) -> None:
    tier.save([block(number) for number in range(4)]).result(PATIENCE_S)
    result = tier.save([block(9)], victims=[key_of(2)]).result(PATIENCE_S)
    assert result is not None
    assert result.evicted == (key_of(2),)
    assert tier.counts().evicted == 1
    assert tier.size().num_objects == 4


def test_a_block_of_another_size_is_a_miss_and_deleted(tier: Tier) -> None:
    tier.save([block(1)._replace(payload=memoryview(bytes(PAYLOAD_BYTES - 8)))]).result(PATIENCE_S)
    assert tier.load([wanted(1)]).result(PATIENCE_S) == [ObjectFault.FOREIGN]
    assert tier.delete([]).result(PATIENCE_S) == 0  # waits for the deletions before it
    assert tier.exists([key_of(1)]).result(PATIENCE_S) == [False]


def test_a_damaged_block_is_a_miss_that_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        store, tier = store_and_tier()
        loading = tier.load([wanted(1), wanted(2)])
        store.answer.set_result([Loan(memoryview(object_of(1)[:-1] + b"x")), Loan(memoryview(object_of(2)))])
        damaged, whole = loading.result(PATIENCE_S)
        assert damaged is ObjectFault.DAMAGED
        assert isinstance(whole, LoadedBlock)
        assert store.deleted == [key_of(1)]
        tier.load([wanted(1), wanted(2)])
        assert tier.counts().misses == {ObjectFault.DAMAGED: 2}
    assert caplog.text.count("tier shared: expected unmodified blocks of this model, got one that is damaged") == 2


@pytest.mark.parametrize(("is_shared", "deleted"), [(False, [key_of(1)]), (True, [])])
def test_blocks_that_another_server_encrypted_are_not_deleted(is_shared: bool, deleted: list[bytes]) -> None:
    store = PendingStore()
    tier = Tier("redis", store, PAYLOAD_BYTES, is_shared=is_shared)
    store.answer.set_result([Loan(memoryview(object_of(1, protection=BlockCipher(bytes(32)))))])
    assert tier.load([wanted(1)]).result(PATIENCE_S) == [ObjectFault.UNSEALED]
    assert store.deleted == deleted


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StoreBusy("x"), Absence.BUSY),
        (StoreLate("x"), Absence.LATE),
        (StoreUnavailable("x"), Absence.UNAVAILABLE),
        (StoreError("x"), Absence.UNAVAILABLE),
    ],
)
def test_a_store_that_fails_is_a_miss(error: StoreError, reason: Absence) -> None:
    store, tier = store_and_tier()
    store.answer.set_exception(error)
    assert tier.load([wanted(1), wanted(2)]).result(PATIENCE_S) == [reason, reason]
    assert (tier.save([block(1)]).result(PATIENCE_S) is None) is not isinstance(error, StoreBusy)
    assert tier.exists([key_of(1)]).result(PATIENCE_S) is None
    assert tier.delete([key_of(1)]).result(PATIENCE_S) is None
    assert tier.counts().misses == {reason: 2}
    assert tier.counts().failed_saves == 1


@pytest.mark.parametrize("answer", [[], [None, None], PutResult(())], ids=["too-short", "too-long", "no-list"])
def test_an_answer_that_can_not_be_used_is_a_miss(answer: object, caplog: pytest.LogCaptureFixture) -> None:
    store, tier = store_and_tier()
    loading = tier.load([wanted(1)])
    lookup = tier.exists([key_of(1)])
    saving = tier.save([block(1)])
    store.answer.set_result(answer)
    assert loading.result(PATIENCE_S) == [Absence.UNAVAILABLE]
    assert lookup.result(PATIENCE_S) is None
    assert saving.result(PATIENCE_S) is None
    assert tier.counts().failed_saves == 1
    assert "store" in caplog.text


@pytest.mark.parametrize("error", [StoreBusy("full"), StorePaused("paused")])
def test_blocks_of_a_call_that_was_not_made_are_known_to_be_absent(error: StoreError) -> None:
    store, tier = store_and_tier()
    saving = tier.save([block(1), block(2)])
    store.answer.set_exception(error)
    assert saving.result(PATIENCE_S) == PutResult((PutOutcome.NOT_SENT,) * 2)
    assert (tier.counts().failed_saves, tier.counts().saved) == (2, {})


def test_cancelling_a_load_cancels_the_stores_call() -> None:
    store, tier = store_and_tier()
    assert tier.load([wanted(1)]).cancel()
    assert store.answer.cancelled()


def test_an_answer_after_the_cancellation_releases_its_loans() -> None:
    store, tier = store_and_tier()
    released: list[bool] = []
    store.answer.set_running_or_notify_cancel()
    loading = tier.load([wanted(1)])
    loading.cancel()
    store.answer.set_result([Loan(memoryview(object_of(1)), lambda: released.append(True))])
    assert released == [True]
    assert tier.counts().loaded == 0
