"""Makes statements for `CacheService.Statement`, from the days that the engine has in memory and from files."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from radixkv.api.statement import DayRange, Statement, StatementLine, day_name
from radixkv.errors import SwitchedOff
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.receive.fair_shares import FairShares, QuotaKey
from radixkv.service.server.servicers.engine_calls import result_of
from radixkv.service.server.servicers.messages import require_names
from radixkv.service.server.thread_call import call_on_thread
from radixkv.v1 import cache_pb2

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine

MAX_WAITING = 32


class StatementMaker:
    """Makes statements, one at a time, since each may read 400 files. For use on one event loop.

    A cancelled call leaves the queue. If its thread is already running, the next call waits until the thread has ended.

    Args:
        engine: has the use in memory and the files.
        mailbox: returns results of the engine to the event loop.
    """

    def __init__(self, engine: Engine, mailbox: Mailbox) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._turn = asyncio.Lock()
        self._queue_shares = FairShares(MAX_WAITING, "statements")

    async def statement(self, request: cache_pb2.StatementRequest) -> cache_pb2.StatementResponse:
        """Make a statement.

        Raises:
            InvalidRequest: a day or a name is wrong, or the statement would be too long.
            QueueFull: too many statements wait, and this tenant has its share of them.
            SwitchedOff: the server has no statements.
            StoreUnavailable: a file cannot be read.
            Draining, StepHangs: the engine accepts no calls.
        """
        require_names(tenant=request.tenant)
        book = self._engine.statements
        if book is None:
            raise SwitchedOff("Statement: switched off, since server.statement_path is not set")
        days = DayRange.read(request.since, request.until, book.today())
        tenant = request.tenant if request.HasField("tenant") else None
        quota_key = QuotaKey.of_tenant(tenant or "")
        self._queue_shares.take(quota_key, 1)
        try:
            await self._turn.acquire()
            try:
                future = self._engine.statement_days(tenant)
                days_in_memory = await result_of(self._engine, self._mailbox, future)
            except BaseException:
                self._turn.release()
                raise

            def make_response() -> cache_pb2.StatementResponse:  # with 10,000 lines, writing the message takes 80 ms
                return statement_message(book.statement(days, days_in_memory, tenant, is_daily=request.by_day))

            return await call_on_thread(make_response, self._turn.release)
        finally:
            self._queue_shares.release(quota_key, 1)


def statement_message(statement: Statement) -> cache_pb2.StatementResponse:
    """Write a statement."""
    return cache_pb2.StatementResponse(
        since=day_name(statement.days.first),
        until=day_name(statement.days.end - 1),
        covered_s=statement.covered_s,
        lines=map(_line_message, statement.lines),
    )


def _line_message(line: StatementLine) -> cache_pb2.StatementLine:
    return cache_pb2.StatementLine(period=line.period, tenant=line.tenant, **line.use._asdict())
