from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from radixkv.api.statement import DAY_S, DayRange, DayUse, Use, day_number
from radixkv.cache.purge import all_slices
from radixkv.cache.tenant_ledger import DEVICE, TenantLedger
from radixkv.errors import ConfigError, Draining, InvalidRequest
from radixkv.statements import statement_book
from radixkv.statements.day_files import DayFiles
from radixkv.statements.statement_book import StatementBook
from tests.fakes import FakeClock
from tests.patience import PATIENCE_S

DAY = day_number("2026-11-30")


class Desk:
    """A ledger with its book and its files, and an engine that runs calls at once, on the thread of the caller."""

    def __init__(self, path: Path, clock: FakeClock, interval_s: float = 60.0) -> None:
        self.clock = clock
        self.path = path
        self.files = DayFiles.open(path)
        self.ledger = TenantLedger(16, clock=clock, unix_time=self.unix_time, read_day=self.files.read)
        self.book = StatementBook(self.ledger, self.files, interval_s, unix_time=self.unix_time)

    def unix_time(self) -> float:
        return DAY * DAY_S + 100.0 + self.clock.now_s

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function as the engine does: if its result is a generator, all slices are run."""
        future: Future[Any] = Future()
        result = function()
        future.set_result(all_slices(result) if hasattr(result, "send") else result)
        return future

    def save(self) -> None:
        self.book.save(self.call)

    def statement_lines(
        self, since: str = "", until: str = "", tenant: str | None = None, **options: bool
    ) -> list[Any]:
        days = DayRange.read(since, until, self.book.today())
        days_in_memory = all_slices(self.book.days_in_memory(tenant))
        statement = self.book.statement(days, days_in_memory, tenant, **{"is_daily": False, **options})
        return [(line.period, line.tenant, line.use.requests) for line in statement.lines]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path, FakeClock())
    yield desk
    desk.files.close()


def test_a_statement_adds_up_saved_days_and_the_present_one(desk: Desk) -> None:
    desk.files.write(DAY - 1, DayUse(50.0, {"a": Use(requests=1), "b": Use(requests=10)}))
    desk.files.write(DAY - 40, DayUse(50.0, {"a": Use(requests=100)}))
    desk.ledger.count("a", {"requests": 2})
    desk.save()
    desk.ledger.count("a", {"requests": 4})
    assert desk.statement_lines() == [("2026-11", "a", 7), ("2026-11", "b", 10)]
    assert desk.statement_lines(is_daily=True) == [
        ("2026-11-29", "a", 1),
        ("2026-11-29", "b", 10),
        ("2026-11-30", "a", 6),
    ]
    assert desk.statement_lines("2026-10", tenant="a") == [("2026-10", "a", 100), ("2026-11", "a", 7)]
    assert desk.statement_lines("2026-11-29", "2026-11-29", tenant="b") == [("2026-11", "b", 10)]
    assert desk.statement_lines(tenant="c") == []


def test_the_seconds_that_were_accounted_are_reported(desk: Desk) -> None:
    desk.files.write(DAY - 1, DayUse(50.0, {}))
    desk.clock.now_s = 7.0
    days_in_memory = all_slices(desk.book.days_in_memory(None))
    statement = desk.book.statement(DayRange.read("", "", DAY), days_in_memory, None, is_daily=False)
    assert statement.covered_s == 50.0 + 7.0


def test_closed_days_are_saved_once_and_then_read_from_their_files(desk: Desk) -> None:
    desk.ledger.count("a", {"requests": 1})
    desk.clock.now_s = 3 * DAY_S
    desk.ledger.count("a", {"requests": 2})
    desk.save()
    assert set(all_slices(desk.ledger.days())) == {DAY + 3}
    assert desk.statement_lines("2026-11") == [("2026-11", "a", 1), ("2026-12", "a", 2)]


def test_a_killed_process_loses_the_use_since_the_last_save(desk: Desk, tmp_path: Path) -> None:
    desk.ledger.count("a", {"requests": 1})
    desk.ledger.resize("a", DEVICE, 2)
    desk.clock.now_s = 60.0
    desk.save()
    desk.ledger.count("a", {"requests": 1})
    desk.files.close()
    restarted = Desk(tmp_path, desk.clock)
    restarted.clock.now_s += 5.0
    use = restarted.ledger.use_of("a")
    assert use == Use(requests=1, device_token_s=2 * 16 * 60.0)
    assert all_slices(restarted.ledger.days())[DAY].covered_s == 60.0 + 5.0
    desk.files = restarted.files  # which the fixture closes


def test_a_clean_end_loses_nothing(tmp_path: Path) -> None:
    desk = Desk(tmp_path, FakeClock())
    desk.book.start(desk.call)
    desk.ledger.count("a", {"requests": 1})
    desk.book.close(has_engine_ended=True)
    restarted = Desk(tmp_path, desk.clock)
    assert restarted.ledger.use_of("a") == Use(requests=1)
    restarted.book.close(has_engine_ended=True)
    DayFiles.open(tmp_path).close()  # the lock is free


def test_an_engine_that_does_not_end_is_not_waited_for(tmp_path: Path) -> None:
    desk = Desk(tmp_path, FakeClock(), interval_s=0.001)
    desk.ledger.count("a", {"requests": 1})
    is_saving = threading.Event()

    def never_answer(_: Callable[[], Any]) -> Future[Any]:
        is_saving.set()
        return Future()

    desk.book.start(never_answer)
    assert is_saving.wait(PATIENCE_S)
    closing = threading.Thread(target=desk.book.close, kwargs={"has_engine_ended": False}, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert not list(tmp_path.glob("*.json"))
    with pytest.raises(ConfigError, match="another process uses"):  # the thread that saves may still write
        DayFiles.open(tmp_path)
    desk.files.close()


def test_the_book_saves_periodically(tmp_path: Path) -> None:
    desk = Desk(tmp_path, FakeClock(), interval_s=0.001)
    calls: list[Callable[[], Any]] = []
    has_saved_twice: Future[None] = Future()

    def call(function: Callable[[], Any]) -> Future[Any]:
        calls.append(function)
        if len(calls) == 4 and not has_saved_twice.done():
            has_saved_twice.set_result(None)
        return desk.call(function)

    desk.book.start(call)
    has_saved_twice.result(PATIENCE_S)
    desk.book.close(has_engine_ended=True)
    assert desk.files.read(DAY) is not None


def test_a_directory_that_cannot_be_written_is_logged_once_and_tried_again(
    desk: Desk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(day: int, use: DayUse) -> None:
        raise OSError(28, "No space left on device")

    desk.ledger.count("a", {"requests": 1})
    desk.clock.now_s = DAY_S
    with monkeypatch.context() as patched, caplog.at_level(logging.INFO):
        patched.setattr(desk.files, "write", fail)
        desk.save()
        desk.save()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "No space left on device; it is tried again every 60 s" in caplog.text
    assert desk.statement_lines("2026-11") == [("2026-11", "a", 1)]  # nothing is forgotten before it is saved
    with caplog.at_level(logging.INFO):
        desk.save()
    assert caplog.records[-1].getMessage() == "statements: writing works again"
    assert desk.files.read(DAY) == DayUse(DAY_S - 100.0, {"a": Use(requests=1)})


def test_an_engine_that_refuses_calls_is_called_again_later(desk: Desk) -> None:
    def refuse(_: Callable[[], Any]) -> Future[Any]:
        raise Draining("engine: stopped")

    desk.ledger.count("a", {"requests": 1})
    desk.book.save(refuse)
    cancelled: Future[Any] = Future()
    cancelled.cancel()
    desk.book.save(lambda _: cancelled)
    assert not list(desk.path.glob("*.json"))
    desk.save()
    assert desk.files.read(DAY) is not None


def test_a_statement_that_is_too_long_is_refused(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statement_book, "MAX_LINES", 3)
    for day in range(DAY - 3, DAY):
        desk.files.write(day, DayUse(50.0, {"a": Use(requests=1), "b": Use(requests=1)}))
    assert len(desk.statement_lines(is_daily=True, tenant="a")) == 3
    with pytest.raises(InvalidRequest, match="expected at most 3 lines, got more in 30 days; request fewer days, mo"):
        desk.statement_lines(is_daily=True)
