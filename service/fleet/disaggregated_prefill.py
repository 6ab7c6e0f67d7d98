"""Disaggregated prefill: one replica prefills the prompt, another one fetches its K/V and decodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
import grpc.aio

from radixkv.errors import Cause, NoReplica
from radixkv.service.fleet.forwarder import Forwarder, ReplicaRefusal
from radixkv.service.fleet.replica_connection import ReplicaConnection, ReplicaLost
from radixkv.service.fleet.routing_request import RoutedRequest, RoutingRequest
from radixkv.v1 import prefill_pb2

CallOptions = Callable[[ReplicaConnection], dict[str, Any]]
"""Returns the deadline and the metadata of a call to a replica."""

_MAX_SOURCES = 3  # number of replicas that prefill the prompt, one after the other, before the decode replica does
_RELEASE_S = 5.0
_PROMPT_FIELDS = (
    "prompt_tokens",
    "cached_tokens",
    "computed_tokens",
    "public_tokens",
    "device_tokens",
    "host_tokens",
    "disk_tokens",
    "remote_tokens",
)


class SourceLost(Exception):
    """The replica that holds the K/V of the prompt no longer answers health checks."""


class DisaggregatedPrefill:
    """Prefills a prompt on one replica, and generates its completion on another.

        prompt ─▶ Prefill, hold_lease ─▶ prefill replica ◀── FetchKV ─┐
        response ◀───── Generate, kv_source ◀── decode replica ───────┘
                           └ first response: Release

    Failures before the first response are retried: if the decode replica is lost, another one decodes from the same
    lease; if the lease is lost, another replica prefills the prompt. After three lost leases, or if there is no prefill
    replica, the decode replica prefills the prompt itself. In exact mode, all of these cases give bitwise identical
    results.

    Args:
        prefill_forwarder: forwards calls to prefill replicas.
        decode_forwarder: forwards calls to decode replicas.

    Attributes:
        decode_forwarder: see above.
    """

    def __init__(self, prefill_forwarder: Forwarder, decode_forwarder: Forwarder) -> None:
        self._prefill_forwarder = prefill_forwarder
        self.decode_forwarder = decode_forwarder
        self._release_tasks: set[asyncio.Task[None]] = set()

    async def stream(
        self, request: prefill_pb2.GenerateRequest, new_prompt: Callable[[], RoutingRequest], call_options: CallOptions
    ) -> AsyncGenerator[tuple[RoutedRequest, prefill_pb2.GenerateResponse], None]:
        """Generate the completions of a request. Yields each response with the decode replica.

        Args:
            request: the request, which has no `kv_source`.
            new_prompt: returns a new routing request for the prompt.
            call_options: returns the deadline and the metadata of a call to a replica.

        Raises:
            ReplicaRefusal: a replica refused the call, or no replica can be reached.
            NoReplica: there is no decode replica.
        """
        prefill_prompt = new_prompt()
        decode_prompt = new_prompt()
        for num_sources_left in range(_MAX_SOURCES, -1, -1):
            lease = None
            if num_sources_left and _can_disaggregate(request):
                lease = await self._prefill(request, prefill_prompt, call_options)
            has_begun = False
            try:
                async with contextlib.aclosing(self._decode(request, decode_prompt, lease, call_options)) as responses:
                    async for routed, response in responses:
                        if lease is not None and not has_begun:
                            self._release(lease)
                        has_begun = True
                        yield routed, with_prefill_usage(response, None if lease is None else lease.response)
                return
            except (ReplicaRefusal, SourceLost) as failure:
                if lease is None or has_begun or not _is_source_failure(failure):
                    raise
                prefill_prompt.avoid.add(lease.connection.facts.address)
            finally:
                if lease is not None and not has_begun:
                    self._release(lease)

    async def finish(self) -> None:
        """Wait until the release of each lease has succeeded or failed."""
        await asyncio.gather(*self._release_tasks)

    async def _prefill(
        self, request: prefill_pb2.GenerateRequest, prompt: RoutingRequest, call_options: CallOptions
    ) -> _SourceLease | None:
        """Prefill a prompt and hold its lease. Returns None if no replica can, or if the K/V were purged."""
        prefill_request = prefill_pb2.PrefillRequest()
        prefill_request.CopyFrom(request.prefill)
        prefill_request.hold_lease = True
        try:
            routed, response = await self._prefill_forwarder.call(
                prompt, lambda connection: connection.prefill.Prefill(prefill_request, **call_options(connection))
            )
        except NoReplica:
            return None
        except ReplicaRefusal as refusal:
            if refusal.code is grpc.StatusCode.UNAVAILABLE or refusal.is_of(Cause.HOLD_LEASE):
                return None
            raise
        routed.finish(response.usage.computed_tokens)
        return _SourceLease(routed.connection, request.prefill.tenant, response) if response.lease_id else None

    def _decode(
        self,
        request: prefill_pb2.GenerateRequest,
        prompt: RoutingRequest,
        lease: _SourceLease | None,
        call_options: CallOptions,
    ) -> AsyncGenerator[tuple[RoutedRequest, prefill_pb2.GenerateResponse], None]:
        decode_request = prefill_pb2.GenerateRequest()
        decode_request.CopyFrom(request)
        if lease is not None:
            decode_request.kv_source.CopyFrom(lease.source)
            decode_request.prefill.explain = False  # the prefill replica has explained the prompt

        def make_call(connection: ReplicaConnection) -> _WatchedCall:
            return _WatchedCall(
                connection.prefill.Generate(decode_request, **call_options(connection)),
                None if lease is None else lease.connection,
            )

        return self.decode_forwarder.stream(prompt, make_call)

    def _release(self, lease: _SourceLease) -> None:
        """Release a lease in the background. If that fails, the lease expires."""
        task = asyncio.ensure_future(lease.release())
        self._release_tasks.add(task)
        task.add_done_callback(self._release_tasks.discard)


class _SourceLease:
    """A lease on the K/V of a prompt, held on a replica.

    Attributes:
        connection: the connection to the replica.
        response: the response that returned the lease.
    """

    def __init__(self, connection: ReplicaConnection, tenant: str, response: prefill_pb2.PrefillResponse) -> None:
        self.connection = connection
        self.response = response
        self._tenant = tenant

    @property
    def source(self) -> prefill_pb2.KVSource:
        """The lease as the `kv_source` of a request."""
        address = self.connection.facts.address
        return prefill_pb2.KVSource(address=address, lease_id=self.response.lease_id, epoch=self.response.epoch)

    async def release(self) -> None:
        """Release the lease."""
        request = prefill_pb2.ReleaseRequest(lease_id=self.response.lease_id, tenant=self._tenant)
        with self.connection.in_flight(), contextlib.suppress(grpc.aio.AioRpcError, ReplicaLost):
            await self.connection.wait_for(
                self.connection.prefill.Release(request, timeout=_RELEASE_S, metadata=self.connection.metadata)
            )


class _WatchedCall:
    """A call to a decode replica. Until its first response has arrived, it fails if the source is lost.

    Args:
        call: the call, made by a stub of `grpc.aio`.
        source: connection to the replica that has the K/V of the prompt; None if there is none.
    """

    def __init__(self, call: Any, source: ReplicaConnection | None) -> None:
        self._call = call
        self._source = source

    async def read(self) -> Any:
        """Read the next response.

        Raises:
            SourceLost: the source no longer answers health checks, and no response has arrived yet.
        """
        if self._source is None:
            return await self._call.read()
        try:
            response = await self._source.wait_for(self._call.read())
        except ReplicaLost as error:
            raise SourceLost(str(error)) from error
        self._source = None
        return response

    def cancel(self) -> None:
        """End the call."""
        self._call.cancel()


def with_prefill_usage(
    response: prefill_pb2.GenerateResponse, prefill: prefill_pb2.PrefillResponse | None
) -> prefill_pb2.GenerateResponse:
    """Attach the prefill usage and times to a response of the decode replica.

    The client sees the fleet as one server: the prompt's tokens are counted as on the prefill replica, and written
    tokens and times are the sums of both replicas, except that the decode replica's queue time counts as prefill time.

    The first response also gets the explanation of the prefill replica, if there is one.

    Args:
        response: response of the decode replica; changed in place if it is of completion 0 and has a usage.
        prefill: response of the prefill replica, from which the explanation is removed; None if the decode replica
            computed the prompt.

    Returns:
        The response.
    """
    if prefill is None or response.index or not response.HasField("usage"):
        return response
    if prefill.HasField("explanation"):
        response.explanation.CopyFrom(prefill.explanation)
        prefill.ClearField("explanation")
    for name in _PROMPT_FIELDS:
        setattr(response.usage, name, getattr(prefill.usage, name))
    response.usage.written_tokens += prefill.usage.written_tokens
    if response.finished:
        response.miss_reason = prefill.miss_reason
        response.timing.prefill_us += response.timing.queue_us + prefill.timing.prefill_us
        response.timing.queue_us = prefill.timing.queue_us
        response.timing.total_us += prefill.timing.total_us
    return response


def _can_disaggregate(request: prefill_pb2.GenerateRequest) -> bool:
    """Return whether another replica may prefill the prompt.

    The request must read and write the cache, through which the K/V of the prompt are fetched, and must not ask for log
    probabilities of the prompt.
    """
    prompt = request.prefill
    reads = not prompt.HasField("read_cache") or prompt.read_cache
    writes = not prompt.HasField("write_cache") or prompt.write_cache
    return reads and writes and not request.HasField("prompt_logprobs")


def _is_source_failure(failure: ReplicaRefusal | SourceLost) -> bool:
    return isinstance(failure, SourceLost) or failure.is_of(Cause.KV_SOURCE)
