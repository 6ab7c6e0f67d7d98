"""Log lines of a startup, with a clock that tests set. Threads run only where a test says so."""

import logging
from collections.abc import Iterator

import pytest

from radixkv.startup.progress import StartProgress
from tests.fakes import FakeClock
from tests.patience import wait_until


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def progress(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> Iterator[StartProgress]:
    with caplog.at_level(logging.INFO, logger="radixkv"):
        yield StartProgress(reminder_s=4.0, now=clock)


def test_a_phase_is_logged_when_it_begins(progress: StartProgress, caplog: pytest.LogCaptureFixture) -> None:
    progress.begin("loading the model")
    progress.begin("checking the model")
    assert caplog.messages == ["loading the model", "checking the model"]


def test_a_phase_is_logged_again_only_after_a_time_without_a_line(
    progress: StartProgress, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """`remind` returns the seconds until the next reminder."""
    progress.begin("loading the model")
    clock.now_s += 3.0
    assert progress.remind() == 1.0
    assert caplog.messages == ["loading the model"]
    clock.now_s += 1.0
    assert progress.remind() == 4.0
    clock.now_s += 2.5
    assert progress.remind() == 1.5
    clock.now_s += 1.5
    progress.remind()
    assert caplog.messages[1:] == ["still loading the model after 4 s", "still loading the model after 8 s"]


def test_a_new_phase_has_its_own_time_and_details(
    progress: StartProgress, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    progress.begin("loading the model")
    progress.report("reading the weights")
    clock.now_s += 5.0
    progress.remind()
    progress.begin("checking the model")
    clock.now_s += 4.0
    progress.remind()
    progress.report("part 1 of 4")
    progress.report("part 2 of 4")
    clock.now_s += 4.0
    progress.remind()
    assert caplog.messages == [
        "loading the model",
        "still loading the model after 5 s: reading the weights",
        "checking the model",
        "still checking the model after 4 s",
        "still checking the model after 8 s: part 2 of 4",
    ]


def test_the_last_line_has_the_total_time_and_the_notes(
    progress: StartProgress, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    progress.note("model tiny on cpu")
    clock.now_s += 2.0
    progress.begin("checking the model")
    progress.note("native attention")
    clock.now_s += 1.25
    progress.ready()
    assert caplog.messages[-1] == "ready after 3.2 s: model tiny on cpu, native attention"


@pytest.mark.parametrize("is_ready", [True, False])
def test_reminders_come_from_a_thread_that_ends_with_the_start(
    caplog: pytest.LogCaptureFixture, *, is_ready: bool
) -> None:
    with caplog.at_level(logging.INFO, logger="radixkv"):
        with StartProgress(reminder_s=0.01) as progress:
            progress.begin("loading the model")
            wait_until(lambda: "still loading the model after 0 s" in caplog.messages)
            thread = progress._thread
            assert thread is not None
            if is_ready:
                progress.ready()
                assert caplog.messages[-1].startswith("ready after ")
                assert not thread.is_alive()
        assert not thread.is_alive()
