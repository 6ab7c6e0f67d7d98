"""Guards a store that may be slow or fail: a time limit for each call, and a circuit breaker."""

from __future__ import annotations

import enum
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Generic, Protocol, TypeVar

from radixkv.errors import StoreBusy, StoreClosed, StoreLate, StorePaused
from radixkv.offload.block_keys import KEY_BYTES, KeyScope
from radixkv.offload.tiers.block_object import BlockObject
from radixkv.offload.tiers.block_store import BlockStore, Loan, PutResult, StoreSize

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Timers(Protocol):
    """The clock and timers of guarded stores; tests use a fake."""

    def now_s(self) -> float:
        """Return the time, monotonic."""

    def call_later(self, delay_s: float, function: Callable[[], None]) -> Callable[[], None]:
        """Call a function after a delay. Returns a function that cancels the call."""


class TimerThread:
    """A daemon thread that sleeps until the next call is due."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serials = itertools.count()
        self._changed = threading.Condition()
        self._is_closed = False
        threading.Thread(target=self._run, name="store-timers", daemon=True).start()

    def now_s(self) -> float:
        """Return the time, monotonic."""
        return time.monotonic()

    def call_later(self, delay_s: float, function: Callable[[], None]) -> Callable[[], None]:
        """Call a short function after a delay. Returns a function that cancels the call.

        Complexity: O(log n) for n pending calls. A cancelled call stays in the queue without its function.
        """
        serial = next(self._serials)
        holder = [function]
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + delay_s, serial, lambda: holder[0]() if holder else None))
            if self._due[0][1] == serial:
                self._changed.notify()
        return holder.clear

    def close(self) -> None:
        """Stop the thread. Pending calls are dropped."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_closed and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._is_closed:
                    return
                _, _, function = heapq.heappop(self._due)
            function()


class CircuitState(enum.Enum):
    """State of a circuit breaker."""

    CLOSED = "closed"  # calls are allowed
    OPEN = "open"  # calls are refused until the pause is over
    TRYING = "trying"  # one call was allowed after the pause and has not ended


class CircuitBreaker:
    """Opens after consecutive failures, and allows one call after each pause.

    Each pause is twice the previous one, up to `max_pause_s`.

        CLOSED ── failures in a row ──▶ OPEN ── pause ──▶ TRYING ── answer ──▶ CLOSED
                                          ▲── failure ──────┘

    Calls that began before the circuit opened, and end after it, change nothing: only the trial call decides.

    Args:
        clock: seconds, monotonic.
        max_failures: consecutive failures that open it.
        is_known: whether the store is known to work. Otherwise the first failure opens the circuit, until the store has
            answered once.
        first_pause_s, max_pause_s: the first and the longest pause.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        max_failures: int = 3,
        is_known: bool = True,
        first_pause_s: float = 1.0,
        max_pause_s: float = 60.0,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._max_failures = max_failures
        self._first_pause_s = first_pause_s
        self._max_pause_s = max_pause_s
        self._state = CircuitState.CLOSED
        self._num_failures = 0 if is_known else max_failures - 1
        self._pause_s = first_pause_s
        self._pause_end_s = 0.0
        self._num_trials = 0

    @property
    def state(self) -> CircuitState:
        """The current state."""
        return self._state

    def admit_call(self) -> int | None:
        """Admit or refuse a call.

        Returns:
            The number of trial calls so far, to be passed to `succeed`, `fail` or `cancel` when the call ends; None if
            it is refused.
        """
        with self._lock:
            if self._state is CircuitState.OPEN and self._clock() >= self._pause_end_s:
                self._state = CircuitState.TRYING
                self._num_trials += 1
            elif self._state is not CircuitState.CLOSED:
                return None
            return self._num_trials

    def succeed(self, num_trials: int) -> bool:
        """Record a success. Returns whether it closed the circuit."""
        with self._lock:
            if self._is_outdated(num_trials):
                return False
            was_closed = self._state is CircuitState.CLOSED
            self._state = CircuitState.CLOSED
            self._num_failures = 0
            self._pause_s = self._first_pause_s
            return not was_closed

    def fail(self, num_trials: int) -> bool:
        """Record a failure. Returns whether it opened a closed circuit."""
        with self._lock:
            if self._is_outdated(num_trials):
                return False
            self._num_failures += 1
            if self._state is CircuitState.TRYING:
                self._pause_s = min(self._max_pause_s, 2 * self._pause_s)
                self._open()
                return False
            if self._num_failures >= self._max_failures:
                self._open()
                return True
            return False

    def cancel(self, num_trials: int) -> None:
        """Record that a call was cancelled, which is neither a success nor a failure of the store."""
        with self._lock:
            if self._state is CircuitState.TRYING and not self._is_outdated(num_trials):
                self._state = CircuitState.OPEN
                self._pause_end_s = self._clock()

    def _is_outdated(self, num_trials: int) -> bool:
        """Whether a call began before the circuit opened for the last time."""
        return self._state is CircuitState.OPEN or num_trials != self._num_trials

    def _open(self) -> None:
        self._state = CircuitState.OPEN
        self._pause_end_s = self._clock() + self._pause_s


class GuardedStore:
    """Puts a time limit and a circuit breaker around the calls of a store.

    A late answer is dropped, and its loans are released. The store may still read the payloads of a late put, which is
    why they must never change. `close` and `size` are passed on directly.

    Args:
        name: name of the store in the log.
        store: the store to guard.
        timers: clock and timers.
        is_known: whether the store is known to work; see `CircuitBreaker`.
        limit_s: time limit of `get` and `exists`.
        write_limit_s: time limit of `put`, `touch`, `delete` and `probe`, which run in the background.
        purge_limit_s: time limit of `purge`, which may scan all keys.
    """

    def __init__(
        self,
        name: str,
        store: BlockStore,
        timers: Timers,
        *,
        is_known: bool = True,
        limit_s: float = 0.5,
        write_limit_s: float = 10.0,
        purge_limit_s: float = 60.0,
    ) -> None:
        self._name = name
        self._store = store
        self._timers = timers
        self._circuit = CircuitBreaker(timers.now_s, is_known=is_known)
        self._limit_s = limit_s
        self._write_limit_s = write_limit_s
        self._purge_limit_s = purge_limit_s

    def put(self, objects: Sequence[BlockObject], victims: Sequence[bytes] = ()) -> Future[PutResult]:
        """Store objects; see `BlockStore`."""
        return self._call(lambda: self._store.put(objects, victims), self._write_limit_s)

    def get(self, keys: Sequence[bytes]) -> Future[list[Loan | None]]:
        """Return the object under each key, or None."""
        return self._call(lambda: self._store.get(keys), self._limit_s)

    def exists(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """Return whether there is an object under each key."""
        return self._call(lambda: self._store.exists(keys), self._limit_s)

    def touch(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """Mark objects of a shared store as used."""
        return self._call(lambda: self._store.touch(keys), self._write_limit_s)

    def delete(self, keys: Sequence[bytes]) -> Future[int]:
        """Delete objects. Return the number of those that existed."""
        return self._call(lambda: self._store.delete(keys), self._write_limit_s)

    def purge(self, scope: KeyScope) -> Future[int]:
        """Delete all objects whose keys are in a scope."""
        return self._call(lambda: self._store.purge(scope), self._purge_limit_s)

    def is_working(self) -> bool:
        """Whether calls are made as usual; false unless the circuit breaker is closed."""
        return self._circuit.state is CircuitState.CLOSED

    def probe(self) -> None:
        """Probe the store with a key that no block has, without waiting for the answer."""
        self._call(lambda: self._store.exists([bytes(KEY_BYTES)]), self._write_limit_s)

    def size(self) -> StoreSize:
        """Return the contents and the capacity, without waiting."""
        return self._store.size()

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def note_end(self, error: BaseException | None, num_trials: int) -> None:
        """Record the end of a call. `num_trials` is what `CircuitBreaker.admit_call` returned for it."""
        if error is None:
            if self._circuit.succeed(num_trials):
                _log.warning("store %s: works again", self._name)
        elif isinstance(error, CancelledError | StoreBusy):  # a full queue, which is in this process, is no failure
            self._circuit.cancel(num_trials)
        elif self._circuit.fail(num_trials):
            _log.error("store %s: switched off for a while after failures, the last one: %s", self._name, error)

    def _call(self, start: Callable[[], Future[_T]], limit_s: float) -> Future[_T]:
        outer: Future[_T] = Future()
        num_trials = self._circuit.admit_call()
        if num_trials is None:
            outer.set_exception(StorePaused(f"store {self._name}: not called, since it failed recently"))
            return outer
        _GuardedCall(self, num_trials, outer, start()).begin(self._timers, limit_s)
        return outer


class _GuardedCall(Generic[_T]):
    """One call, which ends with an answer, a timeout or a cancellation."""

    def __init__(self, guard: GuardedStore, num_trials: int, outer: Future[_T], inner: Future[_T]) -> None:
        self._guard = guard
        self._num_trials = num_trials
        self._lock = threading.Lock()
        self._futures: tuple[Future[_T], Future[_T]] | None = (outer, inner)
        self._cancel_timer: Callable[[], None] = lambda: None

    def begin(self, timers: Timers, limit_s: float) -> None:
        """Start to wait."""
        assert self._futures is not None
        outer, inner = self._futures
        self._cancel_timer = timers.call_later(limit_s, lambda: self._time_out(limit_s))
        outer.add_done_callback(self._note_cancelled)
        inner.add_done_callback(self._note_answer)

    def _take_futures(self) -> tuple[Future[_T], Future[_T]] | None:
        """Return the futures the first time, and None afterwards, so that no reference cycle remains."""
        with self._lock:
            futures, self._futures = self._futures, None
        return futures

    def _note_answer(self, inner: Future[_T]) -> None:
        futures = self._take_futures()
        self._cancel_timer()
        error = StoreClosed("store: the call was cancelled") if inner.cancelled() else inner.exception()
        if futures is None:
            if error is None:
                _release_loans(inner.result())
            return
        self._guard.note_end(error, self._num_trials)
        outer, _ = futures
        if not outer.set_running_or_notify_cancel():
            if error is None:
                _release_loans(inner.result())
        elif error is None:
            outer.set_result(inner.result())
        else:
            outer.set_exception(error)

    def _time_out(self, limit_s: float) -> None:
        if (futures := self._take_futures()) is None:
            return
        outer, inner = futures
        error = StoreLate(f"store: expected an answer within {limit_s:g} s, got none")
        self._guard.note_end(error, self._num_trials)
        if outer.set_running_or_notify_cancel():
            outer.set_exception(error)
        inner.cancel()

    def _note_cancelled(self, outer: Future[_T]) -> None:
        if not outer.cancelled() or (futures := self._take_futures()) is None:
            return
        _, inner = futures
        self._cancel_timer()
        self._guard.note_end(CancelledError(), self._num_trials)
        inner.cancel()


def _release_loans(answer: object) -> None:
    """Release the loans in an answer that is not used."""
    for each in answer if isinstance(answer, list) else ():
        if isinstance(each, Loan):
            each.release()
