"""Saves what tenants used, and makes statements from it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

from radixkv.api.statement import DAY_S, DayRange, DayUse, Statement, StatementLine, Use, day_name, month_name
from radixkv.cache.purge import all_slices
from radixkv.cache.tenant_ledger import TenantLedger
from radixkv.errors import InvalidRequest, RadixKVError
from radixkv.statements.day_files import DayFiles
from radixkv.statements.quota_shadow import QuotaShadows

MAX_LINES = 10_000

_log = logging.getLogger(__name__)

CallEngine = Callable[[Callable[[], Any]], Future[Any]]
"""Calls a function on the engine's thread, in slices if it returns a generator."""


class StatementBook:
    """Saves a ledger to files periodically, on a thread of its own, and makes statements from the ledger and the files.

    Args:
        ledger: accounts the present day. Only the engine's thread touches it.
        files: the saved days, including the present one as of the last save.
        interval_s: seconds between two saves.
        shadows: estimate what twice the ceilings would have saved; None without estimates.
        unix_time: Unix time in seconds.
    """

    def __init__(
        self,
        ledger: TenantLedger,
        files: DayFiles,
        interval_s: float,
        shadows: QuotaShadows | None = None,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._ledger = ledger
        self._files = files
        self._interval_s = interval_s
        self._shadows = shadows
        self._unix_time = unix_time
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_failing = False
        self._pruned_day: int | None = None

    def start(self, call_engine: CallEngine) -> None:
        """Start periodic saving."""
        self._thread = threading.Thread(target=self._run, args=(call_engine,), name="radixkv-statements", daemon=True)
        self._thread.start()

    def close(self, *, has_engine_ended: bool) -> None:
        """Save for the last time, and release the files.

        If the engine's thread has not ended, it may still use the ledger, and a call on it may never return. In this
        case, `close` only stops periodic saving, without waiting, and the files are released when the process ends.
        """
        self._is_closing.set()
        if not has_engine_ended:
            return
        if self._thread is not None:
            self._thread.join()
        if self._shadows is not None:
            self._shadows.close()
        self._write(all_slices(self.days_in_memory(None)))
        self._files.close()

    def save(self, call_engine: CallEngine) -> None:
        """Write the present day, and the closed days, which the ledger then forgets."""
        try:
            days: Mapping[int, DayUse] = call_engine(partial(self.days_in_memory, None)).result()
            if self._write(days):
                call_engine(partial(self._ledger.forget, sorted(days)[:-1])).result()
        except (RadixKVError, CancelledError) as error:  # the engine stops, stalls, or has too many calls
            _log.debug("statements: not saved now: %s", error)

    def today(self) -> int:
        """Return the present day, as days since 1970-01-01."""
        return int(self._unix_time() // DAY_S)

    def days_in_memory(self, tenant: str | None) -> Generator[None, None, dict[int, DayUse]]:
        """Return the days that are in memory; for the engine's thread. See `TenantLedger.days`."""
        if self._shadows is not None:
            self._shadows.settle(self._ledger)
        return self._ledger.days(tenant)

    def statement(
        self, days: DayRange, present: Mapping[int, DayUse], tenant: str | None, *, is_daily: bool
    ) -> Statement:
        """Add up days, reading their files. Any thread may call this.

        Args:
            days: the range.
            present: the result of `days_in_memory`, which replaces files of the same days.
            tenant: the tenant; None for all.
            is_daily: whether a period is a day instead of a month.

        Raises:
            InvalidRequest: the statement would have more than 10,000 lines.
            StoreUnavailable: a file cannot be read.
        """
        period_of = day_name if is_daily else month_name
        covered_s = 0.0
        uses: dict[tuple[str, str], Use] = {}
        for day in range(days.first, days.end):
            day_use = present[day] if day in present else self._files.read(day)
            if day_use is None:
                continue
            covered_s += day_use.covered_s
            names = day_use.tenants.keys() if tenant is None else day_use.tenants.keys() & {tenant}
            for name in names:
                key = period_of(day), name
                uses[key] = uses.get(key, Use()).plus(day_use.tenants[name])
            if len(uses) > MAX_LINES:
                raise InvalidRequest(
                    f"statement: expected at most {MAX_LINES} lines, got more in {len(days)} days; request fewer days, "
                    "months instead of days, or one tenant"
                )
        lines = (StatementLine(period, name, use) for (period, name), use in sorted(uses.items()))
        return Statement(days, covered_s, tuple(lines))

    def _run(self, call_engine: CallEngine) -> None:
        while not self._is_closing.wait(self._interval_s):
            self.save(call_engine)

    def _write(self, days: Mapping[int, DayUse]) -> bool:
        """Write days, and delete the files of days that are too old. Returns whether both succeeded."""
        try:
            for day, use in days.items():
                self._files.write(day, use)
            latest_day = max(days, default=None)
            if latest_day is not None and latest_day != self._pruned_day:
                self._files.prune(latest_day)
                self._pruned_day = latest_day
        except OSError as error:
            if not self._is_failing:
                _log.error("statements: writing failed: %s; it is tried again every %g s", error, self._interval_s)
            self._is_failing = True
            return False
        if self._is_failing:
            _log.info("statements: writing works again")
        self._is_failing = False
        return True
