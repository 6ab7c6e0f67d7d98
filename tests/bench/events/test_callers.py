"""Subscribers keep their places, and refused ones retry."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from bench.events import callers
from bench.events.callers import ClosedLoopCallers

REFUSED = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), grpc.aio.Metadata())


class Call:
    """Accepts or refuses. A caller that reads gets two batches and then DATA_LOSS."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def initial_metadata(self) -> None:
        if not self.service.accepts:
            raise REFUSED

    def done(self) -> bool:
        return False

    async def wait_for_connection(self) -> None:
        self.service.num_dead += 1

    async def __aiter__(self) -> Any:
        for _ in range(2):
            self.service.num_read += 1
            yield SimpleNamespace()
        raise REFUSED


class Service:
    def __init__(self, accepts: bool) -> None:
        self.accepts = accepts
        self.num_asked = self.num_dead = self.num_read = 0

    def Subscribe(self, request: Any) -> Call:  # noqa: N802
        assert request.start_sequence_number == 0
        self.num_asked += 1
        return Call(self)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "RETRY_S", 0)
    monkeypatch.setattr(callers, "READ_PERIOD_S", 0)


def test_the_refused_ask_again() -> None:
    async def test() -> None:
        service = Service(accepts=False)
        crowd = ClosedLoopCallers([service], 3)
        await crowd.wait_for_answers()
        assert (crowd.num_accepted, crowd.num_refused) == (0, 3)
        while service.num_asked < 9:
            await asyncio.sleep(0)
        await crowd.stop()
        assert (crowd.num_accepted, crowd.num_refused) == (0, 3), "counted once"

    asyncio.run(test())


def test_every_other_client_reads_and_resubscribes_after_falling_behind() -> None:
    async def test() -> None:
        service = Service(accepts=True)
        crowd = ClosedLoopCallers([service], 4)
        await crowd.wait_for_answers()
        assert (crowd.num_accepted, crowd.num_refused) == (4, 0)
        while service.num_read < 8:
            await asyncio.sleep(0)
        await crowd.stop()
        assert service.num_dead == 2
        assert service.num_asked >= 6

    asyncio.run(test())
