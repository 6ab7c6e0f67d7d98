import threading
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace

from radixkv.namespace import Namespace
from radixkv.offload.deleter import Deleter
from radixkv.offload.index.tier_index import TierIndex
from tests.patience import PATIENCE_S


class FakeTier:
    """Records the keys of its deletions and their futures, which the test completes; the result None is a failure."""

    def __init__(self) -> None:
        self.calls: list[tuple[Sequence[bytes], Future[int | None]]] = []

    def delete(self, keys: Sequence[bytes]) -> Future[int | None]:
        self.calls.append((keys, Future()))
        return self.calls[-1][1]


def test_failed_deletions_are_retried() -> None:
    store = FakeTier()
    tier_index = TierIndex("disk", 10)
    deleter = Deleter(SimpleNamespace(tiers={"disk": tier_index}), {"disk": store})  # type: ignore[arg-type, dict-item]
    deleter.delete("disk", [b"a", b"b"])
    deleter.delete("disk", [b"c", b"a"])
    deleter.retry()
    assert len(store.calls) == 2
    for _, answer in store.calls:
        answer.set_result(None)
    tier_index.add(b"b", Namespace("model"))
    tier_index.note_stored(b"b")  # it was stored again in the meantime
    assert deleter.has_failed
    deleter.retry()
    assert store.calls[2][0] == [b"a", b"c"], "one call for the keys of both failed ones"
    store.calls[2][1].set_result(1)
    assert not deleter.has_failed
    deleter.retry()
    assert len(store.calls) == 3


def test_a_block_that_is_being_saved_again_is_deleted_only_if_the_save_fails() -> None:
    store = FakeTier()
    tier_index = TierIndex("disk", 10)
    deleter = Deleter(SimpleNamespace(tiers={"disk": tier_index}), {"disk": store})  # type: ignore[arg-type, dict-item]
    deleter.delete("disk", [b"a", b"b"]).set_result(None)
    for key in (b"a", b"b"):
        tier_index.add(key, Namespace("model"))
    deleter.retry()
    assert len(store.calls) == 1
    assert deleter.has_failed, "it is not known yet whether the store will have the blocks"
    tier_index.note_stored(b"a")
    tier_index.remove(b"b")
    deleter.retry()
    assert store.calls[1][0] == [b"b"]


def test_blocks_in_the_index_are_not_deleted_as_unknown() -> None:
    store = FakeTier()
    tier_index = TierIndex("disk", 10)
    deleter = Deleter(SimpleNamespace(tiers={"disk": tier_index}), {"disk": store})  # type: ignore[arg-type, dict-item]
    for key in (b"a", b"b"):
        tier_index.add(key, Namespace("model"))
    tier_index.note_stored(b"a")
    deleter.delete_unknown("disk", [b"a", b"b", b"c"])
    assert [keys for keys, _ in store.calls] == [[b"c"]]
    tier_index.remove(b"b")
    deleter.retry()
    assert [keys for keys, _ in store.calls] == [[b"c"], [b"b"]]


def test_the_engine_is_woken_when_a_call_must_be_retried() -> None:
    store = FakeTier()
    tier_index = TierIndex("disk", 10)
    has_failed_at_wake: list[bool] = []
    offload_index = SimpleNamespace(tiers={"disk": tier_index})
    deleter = Deleter(offload_index, {"disk": store}, lambda: has_failed_at_wake.append(deleter.has_failed))  # type: ignore[arg-type, dict-item]
    deleter.delete("disk", [b"a"]).set_result(1)
    assert has_failed_at_wake == []
    deleter.delete("disk", [b"a"]).set_result(None)
    assert has_failed_at_wake == [True]


def test_finish_waits_for_deletions_that_have_not_ended() -> None:
    store = FakeTier()
    tier_index = TierIndex("disk", 10)
    deleter = Deleter(SimpleNamespace(tiers={"disk": tier_index}), {"disk": store})  # type: ignore[arg-type, dict-item]
    assert deleter.finish(0.0)
    deleter.delete("disk", [b"a"]).set_result(None)
    assert not deleter.finish(0.0), "the deletion was retried, and the store has not answered"
    threading.Timer(0.01, store.calls[1][1].set_result, [1]).start()
    assert deleter.finish(PATIENCE_S)
    deleter.delete("disk", [b"b"])
    threading.Timer(0.01, store.calls[2][1].set_result, [None]).start()
    assert not deleter.finish(PATIENCE_S)
