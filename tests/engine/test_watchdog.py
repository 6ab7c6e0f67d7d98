"""The watchdog reports each step that takes too long, once."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from radixkv.engine.watchdog import Watchdog
from tests.fakes import FakeClock
from tests.patience import PATIENCE_S


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr("radixkv.engine.watchdog.time", SimpleNamespace(monotonic=clock))
    return clock


def check(watchdog: Watchdog, times: int = 1) -> None:
    """Run some checks on this thread, instead of the watchdog's own thread."""
    is_stopped = iter([False] * times + [True])
    watchdog._stopped = SimpleNamespace(wait=lambda _: next(is_stopped))  # type: ignore[assignment]
    watchdog._watch()


def test_each_step_that_hangs_is_reported_once(clock: FakeClock) -> None:
    reported: list[float] = []
    watchdog = Watchdog(30, lambda: reported.append(clock.now_s))
    for _ in range(20):
        watchdog.step_begins()
        clock.now_s += 29
        check(watchdog)
        assert not watchdog.is_hanging
        watchdog.step_ends()
    assert reported == []
    for num_hangs in (1, 2):
        watchdog.step_begins()
        check(watchdog)
        clock.now_s += 30
        check(watchdog, times=3)
        assert watchdog.is_hanging
        assert len(reported) == num_hangs
        watchdog.step_ends()
        assert not watchdog.is_hanging


def test_an_idle_engine_does_not_hang(clock: FakeClock) -> None:
    reported: list[None] = []
    watchdog = Watchdog(30, lambda: reported.append(None))
    clock.now_s += 100
    check(watchdog, times=3)
    assert reported == []


def test_steps_keep_failing_when_all_have_failed_for_the_timeout_of_a_step(clock: FakeClock) -> None:
    watchdog = Watchdog(30, lambda: None)
    keeps_failing = []
    for is_failing, seconds in ((True, 29), (True, 1), (False, 0), (True, 29), (False, 29), (True, 29)):
        watchdog.step_ends(is_failing=is_failing)
        clock.now_s += seconds
        keeps_failing.append(watchdog.keeps_failing)
    assert keeps_failing == [False, True, False, False, False, False]


def test_a_hanging_step_is_reported_from_the_watchdogs_own_thread() -> None:
    is_called = threading.Event()
    watchdog = Watchdog(0.01, is_called.set)
    watchdog.start()
    watchdog.step_begins()
    assert is_called.wait(PATIENCE_S)
    watchdog.stop()
    watchdog._thread.join(PATIENCE_S)
    assert not watchdog._thread.is_alive()
