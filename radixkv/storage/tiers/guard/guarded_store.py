"""Bounds the wait for a store that is slow, full, gone or broken."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from radixkv.errors import StoreBusy, StoreClosed, StoreLate, StorePaused
from radixkv.storage.tiers.block_key import KEY_BYTES, KeyScope
from radixkv.storage.tiers.block_object import BlockObject
from radixkv.storage.tiers.block_store import BlockStore, Loan, PutResult, StoreSize
from radixkv.storage.tiers.guard.alarm_clock import Alarms
from radixkv.storage.tiers.guard.circuit import Circuit, CircuitState

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class GuardCounts:
    """Counts since the start.

    Attributes:
        answered: calls with an answer in time.
        late: calls without one.
        failed: calls that ended with another error.
        busy: calls that the store's full queue refused.
        refused: calls that did not go to the store, because its circuit is open.
        cancelled: calls that their caller cancelled.
        opened: times that the circuit opened.
        state: of the circuit.
    """

    answered: int
    late: int
    failed: int
    busy: int
    refused: int
    cancelled: int
    opened: int
    state: CircuitState


class GuardedStore:
    """A store around another one: each call ends within a time limit, and one that fails is left alone for a while.

    A late answer goes nowhere: what it lends is given back. The payloads of a late put may still be read, which is why
    they must never change. Closing and `size` go straight to the store.

    Args:
        name: for the log.
        store: the one that is guarded.
        alarms: the time.
        circuit: decides when the store is left alone; it has the same time.
        limit_s: time limit of a load and of a question.
        write_limit_s: time limit of a put and of a deletion, which nobody waits for.
        purge_limit_s: time limit of a purge, for which a store may look at all its keys.
    """

    def __init__(
        self,
        name: str,
        store: BlockStore,
        alarms: Alarms,
        circuit: Circuit,
        *,
        limit_s: float = 0.5,
        write_limit_s: float = 10.0,
        purge_limit_s: float = 60.0,
    ) -> None:
        self._name, self._store, self._alarms, self._circuit = name, store, alarms, circuit
        self._limit_s, self._write_limit_s, self._purge_limit_s = limit_s, write_limit_s, purge_limit_s
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("answered", "late", "failed", "busy", "refused", "cancelled"), 0)

    def put(self, objects: Sequence[BlockObject], give_up: Sequence[bytes] = ()) -> Future[PutResult]:
        """Store objects; see `BlockStore`."""
        return self._call(lambda: self._store.put(objects, give_up), self._write_limit_s)

    def get(self, keys: Sequence[bytes]) -> Future[list[Loan | None]]:
        """Return the object under each key, or None."""
        return self._call(lambda: self._store.get(keys), self._limit_s)

    def exists(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """Return whether there is an object under each key."""
        return self._call(lambda: self._store.exists(keys), self._limit_s)

    def delete(self, keys: Sequence[bytes]) -> Future[int]:
        """Forget objects. Return the number of those that were there."""
        return self._call(lambda: self._store.delete(keys), self._write_limit_s)

    def purge(self, scope: KeyScope) -> Future[int]:
        """Forget the objects that have such keys."""
        return self._call(lambda: self._store.purge(scope), self._purge_limit_s)

    def greet(self) -> None:
        """Ask for a block that nobody has, to learn whether the store answers; nobody waits for it."""
        self._call(lambda: self._store.exists([bytes(KEY_BYTES)]), self._write_limit_s)

    def size(self) -> StoreSize:
        """Return what the store holds, without waiting."""
        return self._store.size()

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def counts(self) -> GuardCounts:
        """Return the counts."""
        with self._lock:
            return GuardCounts(**self._counts, opened=self._circuit.num_opened, state=self._circuit.state)

    def note_end(self, error: BaseException | None) -> None:
        """Count the end of a call, and tell the circuit."""
        if error is None:
            self._count("answered")
            if self._circuit.succeed():
                _log.warning("store %s: works again", self._name)
        elif isinstance(error, CancelledError):
            self._count("cancelled")
            self._circuit.give_back()
        elif isinstance(error, StoreBusy):  # the queue is this process's own: the store may well work
            self._count("busy")
            self._circuit.give_back()
        else:
            self._count("late" if isinstance(error, StoreLate) else "failed")
            if self._circuit.fail():
                _log.error("store %s: switched off for a while after failures, the last one: %s", self._name, error)

    def _call(self, start: Callable[[], Future[_T]], limit_s: float) -> Future[_T]:
        outer: Future[_T] = Future()
        if not self._circuit.lets_through():
            self._count("refused")
            outer.set_exception(StorePaused(f"store {self._name}: expected one that works, got a pause"))
            return outer
        _GuardedCall(self, outer, start()).begin(self._alarms, limit_s)
        return outer

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


class _GuardedCall(Generic[_T]):
    """One call: the first of answer, time limit and cancellation ends it."""

    def __init__(self, guard: GuardedStore, outer: Future[_T], inner: Future[_T]) -> None:
        self._guard, self._lock = guard, threading.Lock()
        self._futures: tuple[Future[_T], Future[_T]] | None = (outer, inner)
        self._cancel_alarm: Callable[[], None] = lambda: None

    def begin(self, alarms: Alarms, limit_s: float) -> None:
        """Start to wait."""
        assert self._futures is not None
        outer, inner = self._futures
        self._cancel_alarm = alarms.call_later(limit_s, lambda: self._give_up(limit_s))
        outer.add_done_callback(self._see_cancelled)
        inner.add_done_callback(self._answer)

    def _end(self) -> tuple[Future[_T], Future[_T]] | None:
        """Return the futures the first time, then None: they must leave the collector no circle."""
        with self._lock:
            futures, self._futures = self._futures, None
        return futures

    def _answer(self, inner: Future[_T]) -> None:
        futures = self._end()
        self._cancel_alarm()
        error = StoreClosed("store: the call was cancelled") if inner.cancelled() else inner.exception()
        if futures is None:
            if error is None:
                _give_back(inner.result())
            return
        self._guard.note_end(error)
        outer, _ = futures
        if not outer.set_running_or_notify_cancel():
            if error is None:
                _give_back(inner.result())
        elif error is None:
            outer.set_result(inner.result())
        else:
            outer.set_exception(error)

    def _give_up(self, limit_s: float) -> None:
        if (futures := self._end()) is None:
            return
        outer, inner = futures
        error = StoreLate(f"store: expected an answer within {limit_s:g} s, got none")
        self._guard.note_end(error)
        if outer.set_running_or_notify_cancel():
            outer.set_exception(error)
        inner.cancel()

    def _see_cancelled(self, outer: Future[_T]) -> None:
        if not outer.cancelled() or (futures := self._end()) is None:
            return
        self._cancel_alarm()
        self._guard.note_end(CancelledError())
        futures[1].cancel()


def _give_back(answer: object) -> None:
    """Release the loans in an answer that nobody waits for."""
    for each in answer if isinstance(answer, list) else ():
        if isinstance(each, Loan):
            each.release()
