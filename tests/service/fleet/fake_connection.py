"""Fake replicas without servers, for tests of routing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace

import grpc
import grpc.aio

from radixkv.errors import Cause
from radixkv.service.client.errors import CAUSE_KEY
from radixkv.service.fleet.replica_connection import ReplicaConnection, ReplicaLost
from radixkv.service.fleet.replica_facts import FleetSecrets, ReplicaFacts

SECRETS = FleetSecrets(bytes(range(32)), "token")


def facts(address: str, epoch: int = 1, fingerprint: str = "fingerprint") -> ReplicaFacts:
    return ReplicaFacts(address, epoch, "fake", fingerprint, 256, 4096, 4, "", 3600.0, SECRETS)


def failure(code: grpc.StatusCode, details: str = "refused", cause: Cause | None = None) -> grpc.aio.AioRpcError:
    """Return the error of a call that a replica refuses; its trailing metadata has the cause and another key."""
    trailing = [("a", "b")] if cause is None else [("a", "b"), (CAUSE_KEY, cause.value)]
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


class FakeConnection:
    """Stands in for a ReplicaConnection: a test sets whether the replica is up or lost, and its calls.

    Attributes:
        num_checks: number of health checks that were requested.
        num_calls: number of calls in progress.
        batches: the event batches that `subscribe` yields.
    """

    in_flight = ReplicaConnection.in_flight
    metadata = (("authorization", "Bearer token"),)

    def __init__(self, replica_facts: ReplicaFacts) -> None:
        self.facts = replica_facts
        self.is_up = True
        self.is_lost = False
        self.num_checks = self.num_calls = 0
        self.is_closed = False
        self.prefill = SimpleNamespace()
        self.batches: asyncio.Queue = asyncio.Queue()

    async def subscribe(self, start_sequence_number: int = 0, *, stores: bool = False):
        while True:
            yield await self.batches.get()

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def check(self) -> None:
        self.num_checks += 1

    async def wait_for(self, awaitable: Awaitable):
        if self.is_lost:
            asyncio.ensure_future(awaitable).cancel()
            raise ReplicaLost("replica: it answers neither the call nor health checks")
        return await awaitable

    async def finish(self) -> None:
        while self.num_calls:
            await asyncio.sleep(0)

    async def close(self) -> None:
        self.is_closed = True
