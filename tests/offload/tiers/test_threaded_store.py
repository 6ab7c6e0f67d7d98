from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest

from radixkv.errors import StoreBusy, StoreClosed, StoreUnavailable
from radixkv.offload.tiers import threaded_store
from radixkv.offload.tiers.block_object import BlockObject
from radixkv.offload.tiers.block_store import Loan, PutResult, StoreBackend, StoreSize
from radixkv.offload.tiers.threaded_store import ThreadedStore
from tests.patience import PATIENCE_S, wait_until


class GatedBackend(StoreBackend):
    """A backend whose calls wait until the test sets `gate`.

    Attributes:
        calls: names of the calls that have reached the backend.
        error: what the calls raise after they have waited; None to return.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.calls: list[str] = []
        self.is_closed = False
        self.error: Exception | None = None

    def _record_and_wait(self, name: str) -> None:
        self.calls.append(name)
        assert self.gate.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error

    def put(self, objects: Sequence[BlockObject], victims: Sequence[bytes] = ()) -> PutResult:
        self._record_and_wait("put")
        return PutResult(())

    def get(self, keys: Sequence[bytes]) -> list[Loan | None]:
        self._record_and_wait("get")
        return [None] * len(keys)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self._record_and_wait("exists")
        return [False] * len(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        self._record_and_wait("delete")
        return 0

    def size(self) -> StoreSize:
        return StoreSize(0, 0, None)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def backend() -> Iterator[GatedBackend]:
    backend = GatedBackend()
    yield backend
    backend.gate.set()


def has_calls(backend: GatedBackend, *calls: str) -> Callable[[], bool]:
    """Return a condition: exactly these calls have reached the backend."""
    return lambda: sorted(backend.calls) == sorted(calls)


def test_a_call_returns_while_the_store_works(backend: GatedBackend) -> None:
    store = ThreadedStore(backend)
    answer = store.get([b"key"])
    wait_until(has_calls(backend, "get"))
    assert not answer.done()
    backend.gate.set()
    assert answer.result(PATIENCE_S) == [None]
    store.close()


@pytest.mark.parametrize("num_readers", [1, 3])
def test_num_readers_bounds_concurrent_reads(backend: GatedBackend, num_readers: int) -> None:
    backend.num_readers = num_readers
    store = ThreadedStore(backend)
    loads = [store.get([]) for _ in range(4)]
    wait_until(has_calls(backend, *["get"] * num_readers))
    assert [each.running() for each in loads] == [True] * num_readers + [False] * (4 - num_readers)
    backend.gate.set()
    for each in loads:
        each.result(PATIENCE_S)
    store.close()


def test_writes_do_not_make_loads_wait(backend: GatedBackend) -> None:
    backend.num_readers = 1
    store = ThreadedStore(backend)
    writes = [store.put([]), store.put([])]
    store.get([])
    wait_until(has_calls(backend, "put", "get"))
    assert not any(each.done() for each in writes)
    backend.gate.set()
    store.close()


def test_a_deletion_comes_after_the_writes_before_it(backend: GatedBackend) -> None:
    store = ThreadedStore(backend)
    store.put([])
    last = store.delete([])
    backend.gate.set()
    last.result(PATIENCE_S)
    assert backend.calls == ["put", "delete"]
    store.close()


def test_a_cancelled_call_is_never_started(backend: GatedBackend) -> None:
    backend.num_readers = 1
    store = ThreadedStore(backend)
    first = store.get([])
    second = store.exists([])
    wait_until(has_calls(backend, "get"))
    assert second.cancel()
    assert not first.cancel()
    backend.gate.set()
    store.close()
    assert backend.calls == ["get"]


def test_a_full_queue_refuses_at_once_and_still_counts_cancelled_calls(backend: GatedBackend) -> None:
    backend.num_readers = 1
    store = ThreadedStore(backend, max_waiting=2)
    store.get([])
    wait_until(has_calls(backend, "get"))
    waiting = [store.get([]), store.get([])]
    waiting[0].cancel()
    assert isinstance(store.get([]).exception(0), StoreBusy)
    backend.gate.set()
    assert waiting[1].result(PATIENCE_S) == []
    assert store.get([]).result(PATIENCE_S) == []
    store.close()


def test_calls_that_wait_when_a_store_closes_fail(backend: GatedBackend) -> None:
    backend.num_readers = 1
    store = ThreadedStore(backend)
    running = store.get([])
    waiting = store.get([])
    wait_until(has_calls(backend, "get"))
    closing = threading.Thread(target=store.close)
    closing.start()
    wait_until(lambda: isinstance(store.get([]).exception(PATIENCE_S), StoreClosed))
    backend.gate.set()
    closing.join(PATIENCE_S)
    assert running.result(PATIENCE_S) == []
    assert isinstance(waiting.exception(PATIENCE_S), StoreClosed)
    assert backend.is_closed


def test_a_blocked_call_does_not_block_close(
    backend: GatedBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threaded_store, "_CLOSE_PATIENCE_S", 0.0)
    store = ThreadedStore(backend)
    store.get([])
    wait_until(has_calls(backend, "get"))
    store.close()
    assert not backend.is_closed
    assert "a call is blocked" in caplog.text


def test_all_blocked_calls_together_have_one_time_limit(backend: GatedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def join(_: threading.Thread, timeout: float) -> None:
        nonlocal now_s
        now_s += timeout

    store = ThreadedStore(backend)
    for call in (store.get, store.get, store.put):
        call([])
    wait_until(has_calls(backend, "get", "get", "put"))
    monkeypatch.setattr(threaded_store, "time", SimpleNamespace(monotonic=lambda: now_s))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", join)
        store.close()
    assert now_s == threaded_store._CLOSE_PATIENCE_S
    assert not backend.is_closed


def test_an_error_of_a_store_is_the_answer(backend: GatedBackend) -> None:
    backend.error = StoreUnavailable("down")
    backend.gate.set()
    store = ThreadedStore(backend)
    assert store.get([]).exception(PATIENCE_S) is backend.error
    store.close()


def test_any_other_error_is_reported_without_its_message_and_ends_no_thread(backend: GatedBackend) -> None:
    backend.error = ValueError("password")
    backend.gate.set()
    backend.num_readers = 1
    store = ThreadedStore(backend)
    error = store.get([]).exception(PATIENCE_S)
    assert isinstance(error, StoreUnavailable)
    assert str(error) == "store: expected an answer, got ValueError"
    backend.error = None
    assert store.get([]).result(PATIENCE_S) == []
    store.close()
