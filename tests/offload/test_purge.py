import gc
import threading
import weakref
from concurrent.futures import Future

import pytest

from radixkv.cache.purge import Purged
from radixkv.errors import Draining
from radixkv.offload.purge import Deletion, PendingPurge, when_deleted
from tests.patience import PATIENCE_S, wait_until


def begin_purge(*stores: str) -> tuple[Future[PendingPurge], list[Future[int | None]]]:
    """Return a purge of the device that is complete, and the futures of one deletion in each of these stores."""
    futures: list[Future[int | None]] = [Future() for _ in stores]
    purge: Future[PendingPurge] = Future()
    deletions = [Deletion(store, future) for store, future in zip(stores, futures, strict=True)]
    purge.set_result(PendingPurge(Purged(2, 1), deletions))
    return purge, futures


def test_without_stores_a_purge_ends_at_once() -> None:
    assert when_deleted(begin_purge()[0]).result(0) == Purged(2, 1, {})


def test_a_purge_ends_when_the_last_store_has_answered() -> None:
    purge, (first, second, third) = begin_purge("host", "disk", "host")
    purged = when_deleted(purge)
    third.set_result(3)
    first.set_result(4)
    assert not purged.done()
    second.set_result(0)
    assert purged.result(PATIENCE_S) == Purged(2, 1, {"host": 7, "disk": 0})


def test_a_purge_reports_stores_that_could_not_be_called() -> None:
    purge, (first, second, third) = begin_purge("host", "host", "disk")
    purged = when_deleted(purge)
    first.set_result(None)
    second.set_result(5)
    third.cancel()
    assert purged.result(PATIENCE_S).stored_blocks == {"host": None, "disk": None}


def test_a_purge_that_gets_no_thread_reports_the_answers_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    purge, (first, _) = begin_purge("host", "disk")
    first.set_result(4)
    monkeypatch.setattr(threading.Thread, "start", fail)
    assert when_deleted(purge).result(0) == Purged(2, 1, {"host": 4, "disk": None})


def test_the_failure_of_a_purge_is_passed_on() -> None:
    purge: Future[PendingPurge] = Future()
    purge.set_exception(Draining("engine: stopped"))
    with pytest.raises(Draining):
        when_deleted(purge).result(0)


def test_cancelling_a_purge_cancels_its_result() -> None:
    purge: Future[PendingPurge] = Future()
    purged = when_deleted(purge)
    purge.cancel()
    assert purged.cancelled()


def test_a_store_that_does_not_answer_delays_a_purge_for_a_limited_time() -> None:
    purge, (first, second) = begin_purge("host", "redis")
    purged = when_deleted(purge, limit_s=0.05)
    first.set_result(4)
    assert purged.result(PATIENCE_S) == Purged(2, 1, {"host": 4, "redis": None})
    second.set_result(5)  # too late, which has no effect


def test_a_purge_that_has_ended_is_freed_without_a_garbage_collection() -> None:
    gc.collect()
    gc.disable()
    try:
        purge, (first, second) = begin_purge("host", "disk")
        purged = when_deleted(purge)
        references = [weakref.ref(purged), weakref.ref(first)]
        first.set_result(4)
        second.set_result(3)
        assert purged.result(PATIENCE_S).stored_blocks == {"host": 4, "disk": 3}
        wait_until(lambda: not any(thread.name == "radixkv-purge" for thread in threading.enumerate()))
        del purge, purged, first, second
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()
