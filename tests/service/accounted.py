"""A fake engine with statements of a fixed day."""

from __future__ import annotations

from pathlib import Path

from radixkv.api.statement import DAY_S, DayUse, Use, day_number
from radixkv.cache.tenant_ledger import TenantLedger
from radixkv.statements.day_files import DayFiles
from radixkv.statements.statement_book import StatementBook
from tests.fakes import FakeClock
from tests.service.fake_engine import FakeEngine

TODAY = day_number("2026-11-28")
ACME = Use(
    requests=3,
    computed_tokens=2_000_000,
    generated_tokens=1000,
    device_hit_tokens=6_000_000,
    host_hit_tokens=500_000,
    device_evicted_by_others_tokens=64,
    host_evicted_by_self_tokens=32,
    device_token_s=3_600_000_000.0,
    host_token_s=1800.4,
)


def accounted_engine(path: Path, **tenants: Use) -> FakeEngine:
    """Return an engine with the given use per tenant today, and use of acme on November 1 and on October 29.

    The keyword `_` is the tenant without a name, and underscores of other keywords are removed.
    """
    engine = FakeEngine()
    files = DayFiles.open(path)
    files.write(TODAY - 27, DayUse(100.0, {"acme": Use(requests=10)}))
    files.write(TODAY - 30, DayUse(100.0, {"acme": Use(requests=100)}))
    files.write(TODAY, DayUse(200.0, {name.replace("_", ""): use for name, use in tenants.items()}))
    clock = FakeClock()

    def unix_time() -> float:
        return TODAY * DAY_S + 1000.0

    ledger = TenantLedger(16, clock=clock, unix_time=unix_time, read_day=files.read)
    engine.statements = StatementBook(ledger, files, 60.0, unix_time=unix_time)
    return engine
