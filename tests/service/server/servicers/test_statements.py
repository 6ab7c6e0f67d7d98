"""`CacheService.Statement` on the wire: who sees what, ranges, limits."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import pytest

from radixkv.api.statement import Use
from radixkv.service.client import AsyncClient, Client, InvalidArgument, ResourceExhausted, Unimplemented
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.servicers import statements
from radixkv.v1.cache_pb2 import StatementLine, StatementRequest, StatementResponse
from radixkv.v1.cache_pb2_grpc import CacheServiceStub
from tests.patience import PATIENCE_S
from tests.service.accounted import ACME, accounted_engine
from tests.service.fake_engine import FakeEngine
from tests.service.server.auth.certificates import TOKENS, CredentialFiles
from tests.service.serving import serve_and_call, serving


def statement(engine: FakeEngine, **options: Any) -> StatementResponse:
    def call(address: str) -> StatementResponse:
        with Client(address, timeout_s=PATIENCE_S) as client:
            return client.statement(**options)

    return serve_and_call(engine, call)


def test_a_month_is_the_sum_of_its_days(tmp_path: Path) -> None:
    response = statement(accounted_engine(tmp_path, acme=ACME, other=Use(requests=7)))
    assert (response.since, response.until, response.covered_s) == ("2026-11-01", "2026-11-28", 300.0)
    assert [(line.period, line.tenant, line.requests) for line in response.lines] == [
        ("2026-11", "acme", 13),  # 10 on November 1, and 3 on November 28
        ("2026-11", "other", 7),
    ]
    expected = ACME._replace(requests=13)._asdict()
    assert response.lines[0] == StatementLine(period="2026-11", tenant="acme", **expected)


def test_days_are_listed_one_by_one(tmp_path: Path) -> None:
    response = statement(accounted_engine(tmp_path, acme=ACME), since="2026-10", by_day=True)
    assert [(line.period, line.requests) for line in response.lines] == [
        ("2026-10-29", 100),
        ("2026-11-01", 10),
        ("2026-11-28", 3),
    ]


def test_the_fields_on_the_wire_are_those_of_a_use() -> None:
    assert [field.name for field in StatementLine.DESCRIPTOR.fields] == ["period", "tenant", *Use._fields]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"since": "yesterday"},
            "since: expected a day such as 2026-11-28, or a month such as 2026-11, got 'yesterday'",
        ),
        ({"until": "2026-02-30"}, "until: expected a day"),
        ({"since": "2020-01-01"}, "since, until: expected 1 to 400 days"),
        ({"tenant": "x" * 300}, "tenant: "),
    ],
)
def test_a_wrong_request_is_refused(tmp_path: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        statement(accounted_engine(tmp_path), **options)


def test_without_a_directory_statements_are_switched_off() -> None:
    with pytest.raises(Unimplemented, match=r"Statement: switched off, since server\.statement_path is not set"):
        statement(FakeEngine())


def test_a_tenant_sees_its_own_lines_only_and_an_admin_all(tmp_path: Path) -> None:
    files = CredentialFiles(tmp_path)
    credentials = grpc.ssl_channel_credentials(files.ca_file.read_bytes())
    engine = accounted_engine(tmp_path / "statements", acme=ACME, other=Use(requests=7))

    async def tenants_for(address: str, caller: str, request: StatementRequest) -> list[str] | str:
        metadata = (("authorization", f"Bearer {TOKENS[caller]}"),)
        async with grpc.aio.secure_channel(address, credentials) as channel:
            try:
                response = await CacheServiceStub(channel).Statement(request, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
            return [line.tenant for line in response.lines]

    async def run() -> None:
        async with serving(engine, **files.tls) as (_, address):
            of_all, of_other = StatementRequest(), StatementRequest(tenant="other")
            assert await tenants_for(address, "acme", of_all) == ["acme"]
            refused = await tenants_for(address, "acme", of_other)
            assert str(refused).startswith("PERMISSION_DENIED")
            assert "other" not in str(refused), "the refusal repeats the name of another tenant"
            for operator in ("boss", "watcher"):
                assert await tenants_for(address, operator, of_all) == ["acme", "other"]
                assert await tenants_for(address, operator, of_other) == ["other"]
            assert await tenants_for(address, "some", StatementRequest(tenant="acme")) == ["acme"]
            assert str(await tenants_for(address, "some", of_all)).startswith("PERMISSION_DENIED")

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_too_many_statements_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statements, "MAX_WAITING", 1)
    engine = accounted_engine(tmp_path, acme=ACME)
    unsaved_days: Future[Any] = Future()
    is_called = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    def start_statement_days(tenant: str | None) -> Future[Any]:
        loops[0].call_soon_threadsafe(is_called.set)
        return unsaved_days

    engine.statement_days = start_statement_days

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        async with serving(engine) as (_, address), AsyncClient(address, timeout_s=PATIENCE_S) as client:
            first = asyncio.ensure_future(client.statement(tenant="acme"))
            await is_called.wait()
            with pytest.raises(ResourceExhausted, match="statements"):
                await client.statement(tenant="acme")
            unsaved_days.set_result({})
            assert [line.requests for line in (await first).lines] == [13]  # today's file, since nothing is newer
            assert len((await client.statement(tenant="acme")).lines) == 1

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_the_event_loop_does_not_wait_for_a_long_statement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = accounted_engine(tmp_path, acme=ACME)
    engine.statement_days = lambda tenant: done_future({})
    threads: set[int] = set()
    for owner, name in (engine.statements, "statement"), (statements, "statement_message"):
        original = getattr(owner, name)

        def record_thread(*arguments: Any, original: Any = original, **options: Any) -> Any:
            threads.add(threading.get_ident())
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, record_thread)

    async def run() -> StatementResponse:
        return await statements.StatementMaker(engine, Mailbox()).statement(StatementRequest())

    response = asyncio.run(run())
    assert len(response.lines) == 1
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_cancelled_calls_do_not_add_up_on_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = accounted_engine(tmp_path, acme=ACME)
    engine.statement_days = lambda tenant: done_future({})
    may_end, running, running_counts = threading.Event(), [], []
    make_statement = engine.statements.statement

    def slow_statement(*arguments: Any, **options: Any) -> Any:
        running.append(None)
        running_counts.append(len(running))
        may_end.wait(PATIENCE_S)
        running.pop()
        return make_statement(*arguments, **options)

    monkeypatch.setattr(engine.statements, "statement", slow_statement)

    async def run() -> None:
        maker = statements.StatementMaker(engine, Mailbox())
        for _ in range(2):
            calls = [asyncio.ensure_future(maker.statement(StatementRequest(tenant="acme"))) for _ in range(4)]
            while not running_counts:
                await asyncio.sleep(0)
            await asyncio.sleep(0.01)
            for call in calls:
                call.cancel()
            assert all(
                isinstance(each, asyncio.CancelledError)
                for each in await asyncio.gather(*calls, return_exceptions=True)
            )
        last = asyncio.ensure_future(maker.statement(StatementRequest(tenant="acme")))
        await asyncio.sleep(0.01)
        assert max(running_counts) == 1
        may_end.set()
        assert [line.requests for line in (await last).lines] == [13]

    try:
        asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    finally:
        may_end.set()


def test_a_call_that_is_cancelled_in_its_turn_lets_the_next_one_continue(tmp_path: Path) -> None:
    engine = accounted_engine(tmp_path, acme=ACME)
    days: list[Future[Any]] = [Future(), done_future({})]
    engine.statement_days = lambda tenant: days.pop(0)

    async def run() -> None:
        maker = statements.StatementMaker(engine, Mailbox())
        first, second = (asyncio.ensure_future(maker.statement(StatementRequest(tenant="acme"))) for _ in range(2))
        while len(days) > 1:
            await asyncio.sleep(0)
        first.cancel()
        assert [line.requests for line in (await second).lines] == [13]

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def done_future(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
