"""A short campaign of real calls, of which some are cancelled, time out or are killed with their client.

`make campaign` makes fifty thousand calls.
"""

from __future__ import annotations

import asyncio
import time
from typing import cast

import grpc
import pytest

from radixkv.service.client import AsyncClient
from radixkv.v1.prefill_pb2 import PrefillResponse
from tests.whole.campaign import NUM_WORKERS, Caller, ReferenceResult, run_campaign


class ClientWithoutLeases:
    """An `AsyncClient` whose server grants leases with a given expiry, and does not find a lease to release."""

    def __init__(self, expires_at_s: float) -> None:
        self._expires_at_s = expires_at_s

    async def prefill(self, *_: object, **__: object) -> PrefillResponse:
        response = PrefillResponse(lease_id="lease")
        response.lease_expires_at.FromNanoseconds(int(1e9 * self._expires_at_s))
        return response

    async def release(self, *_: object, **__: object) -> None:
        metadata = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, metadata, metadata, "lease_id: gone")


@pytest.mark.parametrize(("seconds_left", "outcome"), [(3600, "UNEXPECTED NOT_FOUND"), (-1, "held too long")])
def test_a_lease_may_be_unknown_only_after_its_expiry(seconds_left: float, outcome: str) -> None:
    client = cast("AsyncClient", ClientWithoutLeases(time.time() + seconds_left))
    caller = Caller(client, [ReferenceResult([1], next_token_id=2, logits_digest="", generated=[])], seed=0)

    async def hold_leases() -> set[str]:
        return {await caller._make_call(caller._hold) for _ in range(50)}  # of which most are released

    assert {outcome_with_details.partition(" lease_id")[0] for outcome_with_details in asyncio.run(hold_leases())} == {
        "held",
        outcome,
    }


@pytest.mark.long
def test_no_call_leaks_and_no_answer_is_wrong() -> None:
    report = run_campaign(num_calls=1250, calls_per_kill=250)
    assert report.mistakes == []
    assert report.num_killed >= 4 + NUM_WORKERS, "four during the calls, and all others at the end"
    required_outcomes = {
        "prefilled",
        "generated",
        "stopped reading",
        "held",
        "cancelled by us",
        "deadline exceeded",
        "probed",
        "retained",
    }
    assert {each for each in required_outcomes if not report.outcomes[each]} == set()
    assert report.pressure["evicted blocks"] > 0
    assert report.resident_mb[-1] < 1.1 * report.resident_mb[2], "memory grew after 30% of the calls"
