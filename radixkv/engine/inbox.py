"""The inbox of the engine's thread: functions and calls that other threads pass to it."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from enum import Enum
from typing import Any, NamedTuple

from radixkv.engine.call_queue import RETRY_AFTER_S, FairCallQueue
from radixkv.errors import Draining, LifecycleError, QueueFull, RadixKVError

# Time for calls between two steps: 2 ms, or this share of the duration of the last step if that is longer. The slice
# of a call that is running at the end of this time is still finished.
_MAX_CALLS_S = 0.002
_STEP_SHARE = 0.05


class CallerKind(Enum):
    """Kinds of callers, which take turns."""

    SERVICE = "the service itself: metrics and K/V events"
    ADMIN = "administrators, who inspect or purge the cache of all tenants"
    TENANT = "tenants, and calls that inspect or purge the cache of one tenant"


class CallOrigin(NamedTuple):
    """The origin of a call. Calls of one origin run in order; different origins take turns."""

    kind: CallerKind = CallerKind.SERVICE
    tenant: str = ""


SERVICE_ORIGIN = CallOrigin()
"""Calls of the service itself."""


class EngineThread(NamedTuple):
    """Ways to run a function on the engine's thread, for parts of the engine that other threads call.

    Attributes:
        call: calls a function between two steps; the future has its result or its exception.
        put: runs a function between two steps. The function must not raise.
        cancellation: returns the error of a `call` whose future the engine cancelled.
    """

    call: Callable[[Callable[[], Any]], Future[Any]]
    put: Callable[[Callable[[], None]], None]
    cancellation: Callable[[], LifecycleError]


class _Call(NamedTuple):
    slices: Generator[None, None, Any]
    future: Future[Any]

    def run(self) -> bool:
        """Run the next slice. Returns whether more follow."""
        if not self.future.running() and not self.future.set_running_or_notify_cancel():
            return False
        try:
            next(self.slices)
        except StopIteration as end:
            self.future.set_result(end.value)
        except Exception as error:  # noqa: BLE001 - raised for the caller; the engine continues
            self.future.set_exception(error)
        else:
            return True
        return False

    def drop(self) -> None:
        """Fail a call that has not started, to make room for a call of another tenant."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(
                QueueFull(
                    "engine: too many calls wait, and this tenant has the most: its newest call was dropped",
                    retry_after_s=RETRY_AFTER_S,
                )
            )


class Inbox:
    """Functions and calls that the engine's thread runs between two steps: all functions, then calls for a short time.

        put   ─▶ [ function, function ... ]                              ─▶ run_some: all functions,
        call  ─▶ a fair queue each for service, administrators, tenants  ─▶           some calls, in turn

    Functions run in order, and before all calls that were made after them. Calls of one origin run in order. A call
    may be split into slices, between which other calls have their turns.

    Every accepted call runs, is cancelled, or is dropped with QueueFull to make room for a tenant with fewer calls.
    After `close` no call is accepted, and `run_all` empties the inbox. If that raises, `abandon` cancels or fails the
    remaining calls.

    Args:
        max_waiting_calls: calls of each kind of caller that may wait.
        max_tenant_calls: calls of one origin that may wait.
        clock: seconds, monotonic.
    """

    def __init__(
        self, max_waiting_calls: int, max_tenant_calls: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._functions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards `_is_closed`, the queues, `_num_calls`, and additions to `_unfinished`
        self._is_closed = False
        self._queues: dict[CallerKind, FairCallQueue[_Call]] = {
            kind: FairCallQueue(max_waiting_calls, max_tenant_calls) for kind in CallerKind
        }
        self._num_calls = 0  # in all queues
        self._turns = deque(CallerKind)
        self._unfinished: set[Future[Any]] = set()
        self._step_start_s = clock()  # when the last calls ended and the next step began

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to run."""
        return not self._num_calls and self._functions.empty()

    def put(self, function: Callable[[], None]) -> None:
        """Run a function on the engine's thread. The function must not raise, and is never refused."""
        self._functions.put(function)

    def wake(self) -> None:
        """Wake the engine's thread, which waits for functions only. Any thread may call this."""
        self.put(lambda: None)

    def call(self, function: Callable[[], Any], origin: CallOrigin = SERVICE_ORIGIN) -> Future[Any]:
        """Call a short function on the engine's thread.

        If the function returns a generator, the engine advances it by one `yield` at a time.

        Returns:
            The future of the result or exception of the function, or of its generator.

        Raises:
            Draining: the inbox is closed.
            QueueFull: too many calls wait. The future may raise it as well; see `FairCallQueue`.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._is_closed:
                raise Draining("engine: stopped")
            had_calls = self._num_calls > 0
            removed = self._queues[origin.kind].add(origin.tenant, _Call(_slices(function), future))
            self._num_calls += removed is None
            self._unfinished.add(future)
        if not had_calls:
            self.wake()
        future.add_done_callback(self._unfinished.discard)
        if removed is not None:
            removed.drop()
        return future

    def run_next(self, timeout_s: float | None) -> None:
        """Wait up to `timeout_s` seconds (None: forever) for something to run. Run it if it is a function."""
        if not self._num_calls:
            with contextlib.suppress(queue.Empty):
                self._functions.get(timeout=timeout_s)()
        self._step_start_s = self._clock()  # time spent waiting is not part of a step

    def run_some(self) -> None:
        """Run the functions that are in the inbox now, and calls for 2 ms, or longer after a long step."""
        start_s = self._clock()
        self._run_functions()
        if self._num_calls:
            end_s = self._clock() + max(_MAX_CALLS_S, _STEP_SHARE * (start_s - self._step_start_s))
            while self._run_call() and self._clock() < end_s:
                pass
        self._step_start_s = self._clock()

    def run_all(self) -> None:
        """Run everything."""
        self._run_functions()
        while self._run_call():
            pass

    def _run_functions(self) -> None:
        for _ in range(self._functions.qsize()):
            self._functions.get()()

    def _run_call(self) -> bool:
        """Run the functions in the inbox, and then the next call or a slice of it. Returns whether there was a call.

        Functions come first so that a purge reaches every request that was submitted before it.
        """
        with self._lock:
            next_call = self._take_call()
        if next_call is None:
            return False
        self._run_functions()
        call_queue, tenant, call = next_call
        if call.run():
            with self._lock:
                call_queue.put_back(tenant, call)
                self._num_calls += 1
        return True

    def _take_call(self) -> tuple[FairCallQueue[_Call], str, _Call] | None:
        for _ in range(len(self._turns)):
            self._turns.rotate(-1)
            call_queue = self._queues[self._turns[-1]]
            next_call = call_queue.take()
            if next_call is not None:
                self._num_calls -= 1
                return call_queue, *next_call
        return None

    def cancel_calls(self) -> None:
        """Cancel the calls that have not started. May be called from any thread."""
        with self._lock:
            unfinished = list(self._unfinished)
        for future in unfinished:
            future.cancel()

    def abandon(self, error: RadixKVError) -> None:
        """Cancel the calls that have not started, and fail all others with `error`. To be called after `close`."""
        self.cancel_calls()
        for future in list(self._unfinished):
            if not future.done():
                future.set_exception(error)

    def close(self) -> None:
        """Accept no more calls."""
        with self._lock:
            self._is_closed = True


def _slices(function: Callable[[], Any]) -> Generator[None, None, Any]:
    result = function()
    return (yield from result) if isinstance(result, Generator) else result
