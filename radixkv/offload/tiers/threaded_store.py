"""Runs a store's calls on threads of its own, in bounded queues."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from radixkv.errors import StoreBusy, StoreClosed, StoreError, StoreUnavailable
from radixkv.offload.block_keys import KeyScope
from radixkv.offload.tiers.block_object import BlockObject
from radixkv.offload.tiers.block_store import Loan, PutResult, StoreBackend, StoreSize

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_CLOSE_PATIENCE_S = 5.0  # for all calls together; those that block longer are abandoned


class ThreadedStore:
    """Adapts a backend with blocking calls to the interface `BlockStore`, whose calls return futures.

    Reads have their own threads, so that they do not wait for writes. Writes, touches and deletions run one at a time,
    in the order of their calls, so a deletion also covers earlier writes.

    Args:
        backend: does the work, with `num_readers` concurrent reads. It is closed with this store.
        max_waiting: maximum number of queued reads, and of queued writes.
        name: name of the store, for its threads and the log.
    """

    def __init__(self, backend: StoreBackend, *, max_waiting: int = 64, name: str = "store") -> None:
        self._backend = backend
        self._name = name
        self._reads = _Executor(f"{name}-read", backend.num_readers, max_waiting)
        self._writes = _Executor(f"{name}-write", 1, max_waiting)
        self._is_closed = False

    def put(self, objects: Sequence[BlockObject], victims: Sequence[bytes] = ()) -> Future[PutResult]:
        """Store objects; see `BlockStore`."""
        return self._writes.submit(lambda: self._backend.put(objects, victims))

    def get(self, keys: Sequence[bytes]) -> Future[list[Loan | None]]:
        """Return the object under each key, or None."""
        return self._reads.submit(lambda: self._backend.get(keys))

    def exists(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """Return whether there is an object under each key."""
        return self._reads.submit(lambda: self._backend.exists(keys))

    def touch(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """Mark objects as used, after earlier writes."""
        return self._writes.submit(lambda: self._backend.touch(keys))

    def delete(self, keys: Sequence[bytes]) -> Future[int]:
        """Delete objects. Return the number of those that existed."""
        return self._writes.submit(lambda: self._backend.delete(keys))

    def purge(self, scope: KeyScope) -> Future[int]:
        """Delete all objects whose keys are in a scope."""
        return self._writes.submit(lambda: self._backend.purge(scope))

    def size(self) -> StoreSize:
        """Return the contents and the capacity, without waiting."""
        return self._backend.size()

    def close(self) -> None:
        """Close the store; see `BlockStore`. If a call blocks, its thread and the backend stay open."""
        if self._is_closed:
            return
        self._is_closed = True
        executors = (self._reads, self._writes)
        for executor in executors:
            executor.close()
        end_s = time.monotonic() + _CLOSE_PATIENCE_S
        if all(executor.join(end_s) for executor in executors):
            self._backend.close()
        else:
            _log.warning(
                "store %s: a call is blocked for more than %g s, so the store stays open until the process ends",
                self._name,
                _CLOSE_PATIENCE_S,
            )


class _Executor:
    """Threads that run calls from one queue."""

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._max_waiting = max_waiting
        self._is_closed = False
        # Daemon threads, so that a blocked store does not keep the process alive.
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{n}", daemon=True) for n in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], _T]) -> Future[_T]:
        """Queue a call. If the queue is full, its future fails immediately with `StoreBusy`."""
        future: Future[_T] = Future()
        with self._lock:
            if self._is_closed:
                future.set_exception(StoreClosed("store: closed before the call"))
            elif self._num_waiting >= self._max_waiting:  # cancelled calls count until a thread dequeues them
                future.set_exception(StoreBusy(f"store: the queue is full, with {self._num_waiting} calls"))
            else:
                self._num_waiting += 1
                self._calls.put(lambda: self._execute(future, call))
        return future

    def close(self) -> None:
        """Fail queued calls, and stop each thread after its current call."""
        with self._lock:
            self._is_closed = True
        for _ in self._threads:
            self._calls.put(None)

    def join(self, end_s: float) -> bool:
        """Wait for the threads until a monotonic time. Returns whether all have stopped."""
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (execute := self._calls.get()) is not None:
            execute()
            del execute  # it would hold the result, or the objects of a put, until the next call comes

    def _execute(self, future: Future[_T], call: Callable[[], _T]) -> None:
        with self._lock:
            self._num_waiting -= 1
            is_closed = self._is_closed
        if not future.set_running_or_notify_cancel():
            return
        try:
            if is_closed:
                raise StoreClosed("store: closed before the call")
            result = call()
        except StoreError as error:
            future.set_exception(error)
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything, and must not end the thread
            _log.exception("store: expected an answer or a StoreError")
            future.set_exception(StoreUnavailable(f"store: expected an answer, got {type(error).__name__}"))
        else:
            future.set_result(result)
