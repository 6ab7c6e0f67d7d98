"""Accepted callers keep their streams, and refused ones retry."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from bench.events import callers
from bench.events.callers import SubscribeCallers

REFUSED = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), grpc.aio.Metadata())


class Call:
    """A call of `Subscribe` that the service accepts or refuses. It yields two batches and then ends with an error."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def initial_metadata(self) -> None:
        if not self.service.accepts:
            raise REFUSED

    def done(self) -> bool:
        return False

    async def wait_for_connection(self) -> None:
        self.service.num_stalled += 1

    async def __aiter__(self) -> Any:
        for _ in range(2):
            self.service.num_read += 1
            yield SimpleNamespace()
        raise REFUSED


class Service:
    """A stub of the event service that accepts all calls or none, and counts calls, stalled streams and batches."""

    def __init__(self, accepts: bool) -> None:
        self.accepts = accepts
        self.num_calls = self.num_stalled = self.num_read = 0

    def Subscribe(self, request: Any) -> Call:  # noqa: N802
        assert request.start_sequence_number == 0
        self.num_calls += 1
        return Call(self)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "RETRY_S", 0)
    monkeypatch.setattr(callers, "READ_PERIOD_S", 0)


def test_refused_callers_retry() -> None:
    async def test() -> None:
        service = Service(accepts=False)
        subscribers = SubscribeCallers([service], 3)
        await subscribers.wait_for_answers()
        assert (subscribers.num_accepted, subscribers.num_refused) == (0, 3)
        while service.num_calls < 9:
            await asyncio.sleep(0)
        await subscribers.stop()
        assert (subscribers.num_accepted, subscribers.num_refused) == (0, 3), (
            "a refused caller that retries is counted once"
        )

    asyncio.run(test())


def test_every_other_client_reads_and_resubscribes_after_falling_behind() -> None:
    async def test() -> None:
        service = Service(accepts=True)
        subscribers = SubscribeCallers([service], 4)
        await subscribers.wait_for_answers()
        assert (subscribers.num_accepted, subscribers.num_refused) == (4, 0)
        while service.num_read < 8:
            await asyncio.sleep(0)
        await subscribers.stop()
        assert service.num_stalled == 2, "the other two of four clients do not read"
        assert service.num_calls >= 6, "four first calls, and another of each reader after its error"

    asyncio.run(test())
