"""Calls about what a fleet has cached, which go to all of its replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from radixkv.api.stats import DEFAULT_MAX_TENANTS
from radixkv.errors import NoReplica
from radixkv.service.fleet.forwarder import ReplicaRefusal
from radixkv.service.fleet.replica_connection import ReplicaConnection, ReplicaLost
from radixkv.service.fleet.servicers import call_options, replica_errors_as_status
from radixkv.service.fleet.stats_sum import summed
from radixkv.service.server.messages import require_names
from radixkv.service.server.unfinished_calls import Context
from radixkv.v1 import cache_pb2

RollCall = Callable[[], Awaitable[Sequence[ReplicaConnection]]]
"""Returns the connections to all replicas."""


class FleetCacheCalls:
    """Asks all replicas that are there, at the same time.

    Args:
        roll_call: tells which these are.
    """

    def __init__(self, roll_call: RollCall) -> None:
        self._roll_call = roll_call

    @property
    def methods(self) -> Mapping[str, Callable[[Any, Context], Awaitable[Any]]]:
        """The calls of CacheService that a fleet takes."""
        return {"Purge": self.purge, "Stats": self.stats}

    async def purge(self, request: cache_pb2.PurgeRequest, context: Context) -> cache_pb2.PurgeResponse:
        """Forget namespaces on all replicas. The call ends well only if each of them has done so."""
        require_names(tenant=request.tenant, adapter=request.adapter, salt=request.salt)
        async with replica_errors_as_status(context):
            answers, failures = await self._ask_all(
                lambda connection: connection.cache.Purge(request, **call_options(connection, context))
            )
            if failures:
                raise _not_all(failures, len(answers))
        response = cache_pb2.PurgeResponse()
        deleted: dict[str, list[cache_pb2.DeletedBlocks]] = {}
        for answer in answers.values():
            response.freed_blocks += answer.freed_blocks
            response.pinned_blocks += answer.pinned_blocks
            for each in answer.stores:
                deleted.setdefault(each.store, []).append(each)
        for store, numbers in deleted.items():
            is_known = all(each.HasField("blocks") for each in numbers)
            blocks = sum(each.blocks for each in numbers) if is_known else None
            response.stores.append(cache_pb2.DeletedBlocks(store=store, blocks=blocks))
        return response

    async def stats(self, request: cache_pb2.StatsRequest, context: Context) -> cache_pb2.StatsResponse:
        """Count what all replicas hold and have done, and tell what each of them said."""
        require_names(tenant=request.tenant)
        async with replica_errors_as_status(context):
            answers, failures = await self._ask_all(
                lambda connection: connection.cache.Stats(request, **call_options(connection, context))
            )
            if not answers:
                raise _not_all(failures, 0)
        max_tenants = request.max_tenants if request.HasField("max_tenants") else DEFAULT_MAX_TENANTS
        response = summed(answers.values(), max_tenants)
        for address, answer in answers.items():
            response.replicas.add(address=address).stats.CopyFrom(answer)
        for address, failure in failures.items():
            response.replicas.add(address=address, error=_told(failure))
        return response

    async def _ask_all(
        self, ask: Callable[[ReplicaConnection], Awaitable[Any]]
    ) -> tuple[dict[str, Any], dict[str, grpc.aio.AioRpcError | ReplicaLost]]:
        """Ask each replica. Returns the answers, and the failures of those that gave none, by their addresses."""
        connections = await self._roll_call()
        if not connections:
            raise NoReplica("replicas: expected at least one, got none")

        async def one(connection: ReplicaConnection) -> Any:
            connection.num_calls += 1
            try:
                return await connection.wait_for(ask(connection))
            except (grpc.aio.AioRpcError, ReplicaLost) as failure:
                return failure
            finally:
                connection.num_calls -= 1

        answers: dict[str, Any] = {}
        failures: dict[str, grpc.aio.AioRpcError | ReplicaLost] = {}
        for connection, answer in zip(connections, await asyncio.gather(*map(one, connections)), strict=True):
            if isinstance(answer, (grpc.aio.AioRpcError, ReplicaLost)):
                failures[connection.facts.address] = answer
            else:
                answers[connection.facts.address] = answer
        return answers, failures


def _not_all(failures: Mapping[str, grpc.aio.AioRpcError | ReplicaLost], num_done: int) -> ReplicaRefusal:
    """Return how a call ends that some replicas did not answer: as they did, if all refused it alike."""
    codes = {each.code() if isinstance(each, grpc.aio.AioRpcError) else None for each in failures.values()}
    code = codes.pop() if len(codes) == 1 and not num_done else None
    told = "; ".join(f"{address} ({_told(failure)})" for address, failure in sorted(failures.items()))
    details = f"replicas: expected an answer of all {len(failures) + num_done}, got none of {told}: ask again"
    return ReplicaRefusal(code or grpc.StatusCode.UNAVAILABLE, details)


def _told(failure: grpc.aio.AioRpcError | ReplicaLost) -> str:
    if isinstance(failure, grpc.aio.AioRpcError):
        return f"{failure.code().name}: {failure.details()}"
    return str(failure)
