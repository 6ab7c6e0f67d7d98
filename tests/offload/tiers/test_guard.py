from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from radixkv.errors import StoreBusy, StoreLate, StorePaused, StoreUnavailable
from radixkv.offload.tiers.block_store import Loan, StoreSize
from radixkv.offload.tiers.guard import GuardedStore
from radixkv.offload.tiers.tier import Absence, Tier
from tests.patience import PATIENCE_S

from .blocks import PAYLOAD_BYTES, wanted

LIMIT_S = 0.5
WRITE_LIMIT_S = 10.0


class ManualClock:
    """A clock with timers, like `TimerThread`, that the test advances."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self._timers: list[tuple[float, list[Callable[[], None]]]] = []

    def now_s(self) -> float:
        return self.time_s

    def call_later(self, delay_s: float, function: Callable[[], None]) -> Callable[[], None]:
        timer = [function]  # empty after a cancellation
        self._timers.append((self.time_s + delay_s, timer))
        return timer.clear

    def advance(self, delay_s: float) -> None:
        self.time_s += delay_s
        due = [timer for due_s, timer in self._timers if due_s <= self.time_s]
        self._timers = [(due_s, timer) for due_s, timer in self._timers if due_s > self.time_s]
        for timer in due:
            for function in tuple(timer):
                function()


class SilentStore:
    """A store whose calls complete when the test says so."""

    def __init__(self) -> None:
        self.calls: list[Future[Any]] = []
        self.is_closed = False

    def put(self, *_: object) -> Future[Any]:
        self.calls.append(Future())
        return self.calls[-1]

    get = exists = delete = put

    def size(self) -> StoreSize:
        return StoreSize(1, 2, 3)

    def close(self) -> None:
        self.is_closed = True


class Guarded:
    """A guarded store over a silent one, whose circuit opens after three failures."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.inner = SilentStore()
        limits = {"limit_s": LIMIT_S, "write_limit_s": WRITE_LIMIT_S}
        self.store = GuardedStore("shared", self.inner, self.clock, **limits)

    def time_out(self, num_calls: int) -> None:
        """Make calls, and wait until they have timed out."""
        for _ in range(num_calls):
            self.store.get([b"key"])
        self.clock.advance(LIMIT_S)


@pytest.fixture
def guarded() -> Guarded:
    return Guarded()


def test_an_answer_within_the_limit_is_passed_on(guarded: Guarded) -> None:
    calls = [guarded.store.get([]), guarded.store.exists([]), guarded.store.put([]), guarded.store.delete([])]
    for number, call in enumerate(guarded.inner.calls):
        call.set_result(number)
    assert [call.result(0) for call in calls] == [0, 1, 2, 3]
    guarded.clock.advance(100)
    assert guarded.store.is_working()
    assert guarded.store.size() == StoreSize(1, 2, 3)
    guarded.store.close()
    assert guarded.inner.is_closed


def test_a_call_without_answer_ends_at_its_limit(guarded: Guarded) -> None:
    loading = guarded.store.get([])
    saving = guarded.store.put([])
    guarded.clock.advance(LIMIT_S - 0.01)
    assert not loading.done()
    guarded.clock.advance(0.01)
    error = loading.exception(0)
    assert isinstance(error, StoreLate)
    assert str(error) == "store: expected an answer within 0.5 s, got none"
    assert guarded.inner.calls[0].cancelled()
    assert not saving.done()
    guarded.clock.advance(WRITE_LIMIT_S)
    assert isinstance(saving.exception(0), StoreLate)


def test_a_late_answer_releases_its_loans(guarded: Guarded) -> None:
    loading = guarded.store.get([])
    released = []
    (call,) = guarded.inner.calls
    call.set_running_or_notify_cancel()
    guarded.clock.advance(LIMIT_S)
    assert isinstance(loading.exception(0), StoreLate)
    call.set_result([None, Loan(memoryview(b"x"), lambda: released.append(1))])
    assert released == [1]


def test_an_error_of_the_store_is_passed_on(guarded: Guarded) -> None:
    error = StoreUnavailable("down")
    loading = guarded.store.get([])
    guarded.inner.calls[0].set_exception(error)
    assert loading.exception(0) is error


def test_the_circuit_opens_after_repeated_failures(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    guarded.time_out(3)
    assert isinstance(guarded.store.get([]).exception(0), StorePaused)
    assert len(guarded.inner.calls) == 3
    assert not guarded.store.is_working()
    assert caplog.text.count("store shared: switched off for a while after failures") == 1


def test_a_failed_probe_opens_the_circuit_of_an_unknown_store(guarded: Guarded) -> None:
    store = GuardedStore("shared", guarded.inner, guarded.clock, is_known=False)
    store.probe()
    assert store.is_working()
    guarded.inner.calls[0].set_exception(StoreUnavailable("down"))
    assert not store.is_working()
    guarded.clock.advance(1.0)
    store.get([])
    guarded.inner.calls[1].set_result([])
    assert store.is_working()


def test_one_trial_call_follows_each_pause_and_pauses_grow(guarded: Guarded) -> None:
    guarded.time_out(3)
    for pause_s in (1.0, 2.0, 4.0):
        num_before = len(guarded.inner.calls)
        guarded.clock.advance(pause_s - 0.125)
        guarded.store.get([])
        assert len(guarded.inner.calls) == num_before
        guarded.clock.advance(0.125)
        guarded.time_out(5)
        assert len(guarded.inner.calls) == num_before + 1


def test_a_store_that_answers_again_is_used_again(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    guarded.time_out(3)
    guarded.clock.advance(1.0)
    guarded.store.get([])
    guarded.inner.calls[-1].set_result([])
    assert guarded.store.is_working()
    guarded.store.get([])
    guarded.store.get([])
    assert len(guarded.inner.calls) == 6
    assert "store shared: works again" in caplog.text


def test_a_full_queue_is_no_failure_of_the_store(guarded: Guarded) -> None:
    for _ in range(10):
        guarded.store.get([])
        guarded.inner.calls[-1].set_exception(StoreBusy("full"))
    assert guarded.store.is_working()


def test_a_cancelled_call_is_passed_on_and_is_no_failure(guarded: Guarded) -> None:
    for _ in range(10):
        assert guarded.store.get([]).cancel()
    assert all(call.cancelled() for call in guarded.inner.calls)
    guarded.clock.advance(100)
    assert guarded.store.is_working()


def test_a_cancelled_trial_is_followed_by_another(guarded: Guarded) -> None:
    guarded.time_out(3)
    guarded.clock.advance(1.0)
    guarded.store.get([]).cancel()
    guarded.store.get([])
    guarded.inner.calls[-1].set_result([])
    assert guarded.store.is_working()


def test_an_earlier_call_that_times_out_during_a_trial_does_not_end_the_trial(guarded: Guarded) -> None:
    saving = guarded.store.put([])
    guarded.clock.advance(WRITE_LIMIT_S - 1.75)
    guarded.time_out(3)
    guarded.clock.advance(1.0)
    trial = guarded.store.get([])
    guarded.clock.advance(0.25)
    assert isinstance(saving.exception(0), StoreLate)
    assert trial.cancel()
    guarded.store.get([])  # a new trial, without another pause
    guarded.inner.calls[-1].set_result([])
    assert guarded.store.is_working()


def test_a_tier_over_a_blocked_store_misses_after_the_limit_and_then_at_once(guarded: Guarded) -> None:
    tier = Tier("shared", guarded.store, PAYLOAD_BYTES)
    loads = [tier.load([wanted(1)]) for _ in range(3)]
    guarded.clock.advance(LIMIT_S)
    assert [load.result(0) for load in loads] == [[Absence.LATE]] * 3
    assert tier.load([wanted(1)]).result(PATIENCE_S) == [Absence.UNAVAILABLE]


def test_calls_leave_no_reference_cycle(guarded: Guarded) -> None:
    tier = Tier("shared", guarded.store, PAYLOAD_BYTES)
    gc.disable()
    try:
        loading = tier.load([wanted(1)])
        call = guarded.inner.calls.pop()
        call.set_result([None])
        references = [weakref.ref(loading), weakref.ref(call)]
        assert loading.result(0) == [Absence.ABSENT]
        del loading, call
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()
