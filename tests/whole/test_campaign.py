"""Real calls, some of them cancelled, timed out or killed. `make campaign` makes fifty thousand."""

from __future__ import annotations

import asyncio
import time
from typing import cast

import grpc
import pytest

from radixkv.service.client import AsyncClient
from radixkv.v1.prefill_pb2 import PrefillResponse
from tests.whole.campaign import NUM_WORKERS, Caller, Known, run_campaign


class ClientWithoutLeases:
    """Grants leases until a time, and then knows none of them."""

    def __init__(self, expires_s: float) -> None:
        self._expires_s = expires_s

    async def prefill(self, *_: object, **__: object) -> PrefillResponse:
        response = PrefillResponse(lease_id="lease")
        response.lease_expires_at.FromNanoseconds(int(1e9 * self._expires_s))
        return response

    async def release(self, *_: object, **__: object) -> None:
        metadata = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, metadata, metadata, "lease_id: gone")


@pytest.mark.parametrize(("seconds_left", "outcome"), [(3600, "UNEXPECTED NOT_FOUND"), (-1, "held too long")])
def test_a_lease_may_be_unknown_only_after_its_expiry(seconds_left: float, outcome: str) -> None:
    client = cast("AsyncClient", ClientWithoutLeases(time.time() + seconds_left))
    caller = Caller(client, [Known([1], 2, "", [])], seed=0)

    async def outcomes() -> set[str]:
        return {await caller._outcome(caller._hold) for _ in range(50)}

    assert {each.partition(" lease_id")[0] for each in asyncio.run(outcomes())} == {"held", outcome}


@pytest.mark.parametrize("num_calls", [250, pytest.param(1000, marks=pytest.mark.long)])
def test_no_call_leaks_and_no_answer_is_wrong(num_calls: int) -> None:
    report = run_campaign(num_calls, calls_per_kill=num_calls // 5)
    assert report.mistakes == []
    assert report.num_killed >= 4 + NUM_WORKERS
    happened = {
        "prefilled",
        "generated",
        "stopped reading",
        "held",
        "cancelled by us",
        "too late",
        "probed",
        "retained",
    }
    assert {event for event in happened if not report.outcomes[event]} == set()
    assert report.pressure["evicted blocks"] > 0
    assert report.resident_mb[-1] < 1.1 * report.resident_mb[2]
