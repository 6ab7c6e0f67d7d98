import gc
import threading
from concurrent.futures import Future

import pytest

from radixkv.cache.purge import Purged
from radixkv.errors import Draining
from radixkv.offload.purge import Deletion, PendingPurge, _PurgeWaiter, when_deleted
from tests.patience import PATIENCE_S, wait_until


def begun(*stores: str) -> tuple[Future[PendingPurge], list[Future[int | None]]]:
    futures: list[Future[int | None]] = [Future() for _ in stores]
    purge: Future[PendingPurge] = Future()
    purge.set_result(PendingPurge(Purged(2, 1), [Deletion(*each) for each in zip(stores, futures, strict=True)]))
    return purge, futures


def test_without_stores_a_purge_is_over_at_once() -> None:
    assert when_deleted(begun()[0]).result(0) == Purged(2, 1, {})


def test_a_purge_is_over_when_the_last_store_has_answered() -> None:
    purge, (first, second, third) = begun("host", "disk", "host")
    whole = when_deleted(purge)
    third.set_result(3)
    first.set_result(4)
    assert not whole.done()
    second.set_result(0)
    assert whole.result(0) == Purged(2, 1, {"host": 7, "disk": 0})


def test_a_purge_reports_stores_that_could_not_be_called() -> None:
    purge, (first, second, third) = begun("host", "host", "disk")
    whole = when_deleted(purge)
    first.set_result(None)
    second.set_result(5)
    third.cancel()
    assert whole.result(0).stored_blocks == {"host": None, "disk": None}


def test_the_failure_of_a_purge_is_passed_on() -> None:
    purge: Future[PendingPurge] = Future()
    purge.set_exception(Draining("engine: stopped"))
    with pytest.raises(Draining):
        when_deleted(purge).result(0)


def test_cancelling_a_purge_cancels_its_result() -> None:
    purge: Future[PendingPurge] = Future()
    whole = when_deleted(purge)
    purge.cancel()
    assert whole.cancelled()


def test_a_store_that_does_not_answer_delays_a_purge_for_a_limited_time() -> None:
    purge, (first, second) = begun("host", "redis")
    whole = when_deleted(purge, limit_s=0.05)
    first.set_result(4)
    assert whole.result(PATIENCE_S) == Purged(2, 1, {"host": 4, "redis": None})
    second.set_result(5)  # later, which changes nothing


def test_a_purge_that_is_over_leaves_no_timer() -> None:
    purge, (first,) = begun("host")
    whole = when_deleted(purge)
    first.set_result(4)
    assert whole.result(0).stored_blocks == {"host": 4}
    wait_until(lambda: not any(isinstance(thread, threading.Timer) for thread in threading.enumerate()))


def test_a_purge_that_is_over_is_freed_without_a_collection() -> None:
    gc.collect()
    gc.disable()
    try:
        purge, (first, second) = begun("host", "disk")
        whole = when_deleted(purge)
        first.set_result(4)
        second.set_result(3)
        assert whole.result(0).stored_blocks == {"host": 4, "disk": 3}
        wait_until(lambda: not any(isinstance(thread, threading.Timer) for thread in threading.enumerate()))
        del purge, whole, first, second
        assert [each for each in gc.get_objects() if type(each) is _PurgeWaiter] == []
    finally:
        gc.enable()
