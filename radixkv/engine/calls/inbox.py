"""Brings functions from other threads to the engine's thread."""

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

from radixkv.engine.calls.lanes import RETRY_S, Lanes
from radixkv.errors import Draining, QueueFull, RadixKVError

# Calls run this long between two steps, and one call more: 2 ms, or this share of a step that takes longer than 40 ms.
_MAX_CALLS_S = 0.002
_STEP_SHARE = 0.05


class Asker(Enum):
    """Kinds of callers, which take turns."""

    SERVICE = "the service itself: metrics, events"
    ADMIN = "those who look at the cache of all, and purge it"
    TENANT = "those who use it, and look at or purge what is one tenant's"

    @classmethod
    def of_scope(cls, tenant: str | None) -> Asker:
        """Return whose business it is to look at or purge the cache of one tenant, or of all (None)."""
        return cls.ADMIN if tenant is None else cls.TENANT


class Lane(NamedTuple):
    """A line of calls that wait behind each other: one for each kind of caller and tenant."""

    asker: Asker = Asker.SERVICE
    tenant: str = ""


_OWN = Lane()


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
        except Exception as error:  # noqa: BLE001 - the caller gets it, and the engine goes on
            self.future.set_exception(error)
        else:
            return True
        return False

    def refuse(self) -> None:
        """Tell the caller of a call that is not begun that another one took its place."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(
                QueueFull(
                    "engine: expected fewer waiting calls of this tenant while others have no room, got the most",
                    retry_after_s=RETRY_S,
                )
            )


class Inbox:
    """Functions and calls that the engine's thread runs between two steps: all functions, then calls for a short time.

        put   ─▶ [ function, function ... ]                       ─▶ run_some: all functions,
        call  ─▶ lanes of the service, of admins, of tenants      ─▶           some calls, in turn

    Functions have an order, and each is run before the calls that came after it. Calls keep theirs within a lane. A
    call may be cut into slices, between which others have their turns.

    Every call that was accepted is run, or cancelled, or makes room for one of a shorter lane and gets QueueFull:
    `close` lets no more in, and `run_all` after it empties the inbox. If that raises, `abandon` answers the others.

    Args:
        max_waiting_calls: calls of each kind of asker that may wait.
        max_tenant_calls: calls of one lane that may wait.
        clock: seconds, never going back.
    """

    def __init__(
        self, max_waiting_calls: int, max_tenant_calls: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._functions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards `_is_closed`, the lanes, and additions to `_unfinished`
        self._is_closed = False
        self._lanes: dict[Asker, Lanes[_Call]] = {each: Lanes(max_waiting_calls, max_tenant_calls) for each in Asker}
        self._turns = deque(Asker)
        self._unfinished: set[Future[Any]] = set()
        self._left_s = clock()  # when the engine went on to its next step

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be run."""
        return self._functions.empty() and not self._has_calls

    @property
    def _has_calls(self) -> bool:
        return any(self._lanes.values())

    def put(self, function: Callable[[], None]) -> None:
        """Have the engine's thread run a function that raises nothing. It is never refused."""
        self._functions.put(function)

    def call(self, function: Callable[[], Any], lane: Lane = _OWN) -> Future[Any]:
        """Have the engine's thread call a short function.

        If the function returns a generator, that is run from one `yield` to the next at a time.

        Returns:
            Its result, or what it raised; of a generator what that returns or raises.

        Raises:
            Draining: the inbox is closed.
            QueueFull: too many calls wait. Also later, through the future: see `Lanes`.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._is_closed:
                raise Draining("engine: stopped")
            had_calls = self._has_calls
            removed = self._lanes[lane.asker].add(lane.tenant, _Call(_slices(function), future))
            self._unfinished.add(future)
        if not had_calls:
            self._functions.put(_wake_up)
        future.add_done_callback(self._unfinished.discard)
        if removed is not None:
            removed.refuse()
        return future

    def run_next(self, timeout_s: float | None) -> None:
        """Wait for something to run, `timeout_s` seconds at most, None for ever. Run it if it is a function."""
        if not self._has_calls:
            with contextlib.suppress(queue.Empty):
                self._functions.get(timeout=timeout_s)()
        self._left_s = self._clock()  # what was waited for is no step

    def run_some(self) -> None:
        """Run the functions that are in the inbox now, and calls for 2 ms, or longer after a long step."""
        step_s = self._clock() - self._left_s
        self._run_functions()
        end_s = self._clock() + max(_MAX_CALLS_S, _STEP_SHARE * step_s)
        while self._run_call() and self._clock() < end_s:
            pass
        self._left_s = self._clock()

    def run_all(self) -> None:
        """Run everything."""
        self._run_functions()
        while self._run_call():
            pass

    def _run_functions(self) -> None:
        for _ in range(self._functions.qsize()):
            self._functions.get()()

    def _run_call(self) -> bool:
        """Run the next call, or a slice of it, after the functions that came before it. Returns whether there was one.

        A purge reaches every request that came before it.
        """
        with self._lock:
            taken = self._take()
        if taken is None:
            return False
        self._run_functions()
        lanes, tenant, call = taken
        if call.run():
            with self._lock:
                lanes.put_back(tenant, call)
        return True

    def _take(self) -> tuple[Lanes[_Call], str, _Call] | None:
        for _ in range(len(self._turns)):
            self._turns.rotate(-1)
            lanes = self._lanes[self._turns[-1]]
            taken = lanes.take()
            if taken is not None:
                return lanes, *taken
        return None

    def cancel_calls(self) -> None:
        """Cancel the calls that are not begun. From any thread."""
        with self._lock:
            unfinished = list(self._unfinished)
        for future in unfinished:
            future.cancel()

    def abandon(self, error: RadixKVError) -> None:
        """Cancel all calls that are not begun, and raise `error` for the others. To be called after `close`."""
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


def _wake_up() -> None:
    """Do nothing: the engine's thread waits for functions alone."""
