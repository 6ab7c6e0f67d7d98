"""The gRPC services: protobuf to domain values, the engine's answer to protobuf.

The event loop never touches the cache. It hands a request to the engine and awaits a future; a caller that goes away
cancels its future, and with it the request. `radixkv.service.status` turns what is raised here into statuses.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp

from radixkv.errors import Draining, InvalidRequest
from radixkv.request import HeldLease, PrefillParams, PrefillResult, Retained
from radixkv.retention import Retention
from radixkv.service.token_ids import read_token_ids
from radixkv.v1 import cache_pb2, cache_pb2_grpc, prefill_pb2, prefill_pb2_grpc

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine import Engine

MAX_NAME_CHARS = 256
MAX_TOP_LOGPROBS = 100

Context = grpc.aio.ServicerContext[Any, Any]
Answer = TypeVar("Answer")


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """The data path."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Context) -> prefill_pb2.PrefillResponse:  # noqa: N802
        """Compute the suffix of one prompt."""
        params = _params(request, context)
        result = await _answer_of(self._engine.prefill(params))
        response = _prefill_response(result)
        if result.held_lease is not None:
            self._add_lease(response, result.held_lease)
        if result.retained is not None:
            response.retained.CopyFrom(_grant(result.retained))
        return response

    async def Probe(self, request: prefill_pb2.ProbeRequest, context: Context) -> prefill_pb2.ProbeResponse:  # noqa: N802
        """Say what a prefill would reuse."""
        _require_names(tenant=request.tenant, adapter=request.adapter, salt=request.salt)
        result = await _answer_of(
            self._engine.probe(
                read_token_ids(request), tenant=request.tenant, adapter=request.adapter, salt=request.salt
            )
        )
        return prefill_pb2.ProbeResponse(
            cached_tokens=result.cached_tokens,
            prompt_tokens=result.prompt_tokens,
            miss_reason=result.miss_reason.value,
        )

    async def Release(self, request: prefill_pb2.ReleaseRequest, context: Context) -> prefill_pb2.ReleaseResponse:  # noqa: N802
        """Give back a held lease."""
        _require_names(tenant=request.tenant, lease_id=request.lease_id)
        await _answer_of(self._engine.release(request.lease_id, tenant=request.tenant))
        return prefill_pb2.ReleaseResponse()

    def _add_lease(self, response: prefill_pb2.PrefillResponse, held: HeldLease) -> None:
        response.lease_id = held.lease_id
        response.lease_expires_at.CopyFrom(_timestamp(held.expires_at_s))
        response.block_table.extend(held.block_table.tolist())
        response.block_size = self._engine.limits.block_size
        response.epoch = self._engine.limits.epoch


class CacheServicer(cache_pb2_grpc.CacheServiceServicer):
    """The operator's path."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Retain(self, request: cache_pb2.RetainRequest, context: Context) -> cache_pb2.RetainResponse:  # noqa: N802
        """Give a cached range a priority."""
        _require_names(tenant=request.tenant, adapter=request.adapter, salt=request.salt)
        retention = _retention(request)
        if retention is None:
            raise InvalidRequest("retention: expected one, got none")
        retained = await _answer_of(
            self._engine.retain(
                read_token_ids(request), retention, tenant=request.tenant, adapter=request.adapter, salt=request.salt
            )
        )
        return cache_pb2.RetainResponse(retained=_grant(retained))

    async def Purge(self, request: cache_pb2.PurgeRequest, context: Context) -> cache_pb2.PurgeResponse:  # noqa: N802
        """Forget namespaces."""
        _require_names(tenant=request.tenant, adapter=request.adapter, salt=request.salt)
        purged = await _answer_of(
            self._engine.purge(
                tenant=request.tenant if request.HasField("tenant") else None,
                adapter=request.adapter if request.HasField("adapter") else None,
                salt=request.salt if request.HasField("salt") else None,
            )
        )
        return cache_pb2.PurgeResponse(freed_blocks=purged.freed_blocks, pinned_blocks=purged.pinned_blocks)

    async def Stats(self, request: cache_pb2.StatsRequest, context: Context) -> cache_pb2.StatsResponse:  # noqa: N802
        """Say what the cache holds and what it did."""
        limits, stats = self._engine.limits, await _answer_of(self._engine.stats())
        return cache_pb2.StatsResponse(
            model=limits.model,
            device=limits.device,
            epoch=limits.epoch,
            block_size=limits.block_size,
            **dataclasses.asdict(stats),  # the same names on both sides
        )


async def _answer_of(future: Future[Answer]) -> Answer:
    """Await the engine. Cancelling the awaiting task cancels `future`."""
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise  # the caller went away; nobody is there to be answered
        raise Draining("service: stopped before the request was answered") from None


def _params(request: prefill_pb2.PrefillRequest, context: Context) -> PrefillParams:
    _require_names(tenant=request.tenant, adapter=request.adapter, salt=request.salt, request_id=request.request_id)
    if request.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"top_logprobs: expected at most {MAX_TOP_LOGPROBS}, got {request.top_logprobs}")
    remaining_s = context.time_remaining()  # None when the caller set no deadline
    return PrefillParams(
        tokens=read_token_ids(request),
        tenant=request.tenant,
        adapter=request.adapter,
        salt=request.salt,
        request_id=request.request_id or uuid.uuid4().hex,
        read_cache=request.read_cache if request.HasField("read_cache") else True,
        write_cache=request.write_cache if request.HasField("write_cache") else True,
        retention=_retention(request),
        top_logprobs=request.top_logprobs,
        return_logits=request.return_logits,
        hold_lease=request.hold_lease,
        deadline_s=None if remaining_s is None else time.monotonic() + remaining_s,
    )


def _retention(request: prefill_pb2.PrefillRequest | cache_pb2.RetainRequest) -> Retention | None:
    if not request.HasField("retention"):
        return None
    asked = request.retention
    if not asked.HasField("priority"):
        raise InvalidRequest("retention.priority: expected 0 to 100, got none")
    if not 0 <= asked.ttl.nanos < 1_000_000_000:
        raise InvalidRequest(f"retention.ttl.nanos: expected 0 to 999999999, got {asked.ttl.nanos}")
    return Retention(
        priority=asked.priority,
        ttl_s=asked.ttl.seconds + asked.ttl.nanos / 1e9 if asked.HasField("ttl") else None,
        start=asked.start_token,
        end=asked.end_token if asked.HasField("end_token") else None,
    )


def _grant(retained: Retained) -> prefill_pb2.Grant:
    expires_at_s = retained.expires_at_s
    return prefill_pb2.Grant(
        granted_tokens=retained.grant.granted_tokens,
        refused_tokens=retained.grant.refused_tokens,
        uncached_tokens=retained.grant.uncached_tokens,
        expires_at=None if expires_at_s is None else _timestamp(expires_at_s),
    )


def _timestamp(unix_s: float) -> Timestamp:
    seconds, nanos = divmod(round(unix_s * 1e9), 1_000_000_000)
    return Timestamp(seconds=seconds, nanos=nanos)


def _prefill_response(result: PrefillResult) -> prefill_pb2.PrefillResponse:
    usage, timing = result.usage, result.timing
    return prefill_pb2.PrefillResponse(
        request_id=result.request_id,
        usage=prefill_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            computed_tokens=usage.computed_tokens,
            written_tokens=usage.written_tokens,
        ),
        next_token_id=result.next_token_id,
        top_logprobs=[
            prefill_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in result.top_logprobs
        ],
        logits=b"" if result.logits is None else result.logits.astype("<f4", copy=False).tobytes(),
        miss_reason=result.miss_reason.value,
        timing=prefill_pb2.Timing(queue_us=timing.queue_us, prefill_us=timing.prefill_us, total_us=timing.total_us),
    )


def _require_names(**names: str) -> None:
    for field, name in names.items():
        if len(name) > MAX_NAME_CHARS:
            raise InvalidRequest(f"{field}: expected at most {MAX_NAME_CHARS} characters, got {len(name)}")
