"""The watchdog reports a step that takes too long once, and nothing else."""

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


def look(watchdog: Watchdog, times: int = 1) -> None:
    """Run one check on this thread instead of the watchdog's own."""
    is_stopped = iter([False] * times + [True])
    watchdog._stopped = SimpleNamespace(wait=lambda _: next(is_stopped))  # type: ignore[assignment]
    watchdog._watch()


def test_it_reports_each_step_that_hangs_once(clock: FakeClock) -> None:
    reported: list[float] = []
    watchdog = Watchdog(30, lambda: reported.append(clock.now_s))
    for _ in range(20):
        watchdog.step_begins()
        clock.now_s += 29
        look(watchdog)
        assert not watchdog.is_hanging
        watchdog.step_ends()
    assert reported == []
    for hangs in (1, 2):
        watchdog.step_begins()
        look(watchdog)
        clock.now_s += 30
        look(watchdog, times=3)
        assert watchdog.is_hanging
        assert len(reported) == hangs
        watchdog.step_ends()
        assert not watchdog.is_hanging


def test_an_idle_engine_does_not_hang(clock: FakeClock) -> None:
    reported: list[None] = []
    watchdog = Watchdog(30, lambda: reported.append(None))
    clock.now_s += 100
    look(watchdog, times=3)
    assert reported == []


def test_steps_that_fail_longer_than_a_step_may_take_keep_failing(clock: FakeClock) -> None:
    watchdog = Watchdog(30, lambda: None)
    seen = []
    for is_failing, seconds in ((True, 29), (True, 1), (False, 0), (True, 29), (False, 29), (True, 29)):
        watchdog.step_ends(is_failing=is_failing)
        clock.now_s += seconds
        seen.append(watchdog.keeps_failing)
    assert seen == [False, True, False, False, False, False]


def test_it_watches_from_its_own_thread() -> None:
    is_called = threading.Event()
    watchdog = Watchdog(0.01, is_called.set)
    watchdog.start()
    watchdog.step_begins()
    assert is_called.wait(PATIENCE_S)
    watchdog.stop()
    watchdog._thread.join(PATIENCE_S)
    assert not watchdog._thread.is_alive()
