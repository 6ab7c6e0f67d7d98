"""Translates protobuf messages to values of `radixkv.api`, and back."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterable

from google.protobuf.timestamp_pb2 import Timestamp

from radixkv.api.caller import Caller
from radixkv.api.limits import Limits
from radixkv.api.params import DEFAULT_URGENCY, PrefillParams
from radixkv.api.result import GenerateResult, PrefillResult, Retained, Timing, Usage
from radixkv.api.retention import Retention
from radixkv.api.sampling import MAX_TOP_LOGPROBS
from radixkv.api.stats import EngineStats, TenantStats, TierStats
from radixkv.cache.purge import Purged
from radixkv.errors import InvalidRequest
from radixkv.service.token_ids import read_token_ids
from radixkv.v1 import cache_pb2, prefill_pb2

MAX_NAME_CHARS = 256


def require_names(**names: str) -> None:
    """Refuse names that are too long.

    Raises:
        InvalidRequest: the message names the field.
    """
    for field, name in names.items():
        if len(name) > MAX_NAME_CHARS:
            raise InvalidRequest(f"{field}: expected at most {MAX_NAME_CHARS} characters, got {len(name)}")


def read_caller(request: prefill_pb2.PrefillRequest | prefill_pb2.ProbeRequest | cache_pb2.RetainRequest) -> Caller:
    """Read the names of the caller.

    Raises:
        InvalidRequest: a name is too long.
    """
    require_names(tenant=request.tenant, adapter=request.adapter, salt=request.salt)
    return Caller(request.tenant, request.adapter, request.salt)


def read_params(request: prefill_pb2.PrefillRequest, remaining_s: float | None, traceparent: str = "") -> PrefillParams:
    """Read a prompt and its options.

    Args:
        request: the message.
        remaining_s: seconds until the caller's deadline; None without one.
        traceparent: the caller's span; empty without one.

    Raises:
        InvalidRequest: a field can't be read.
    """
    require_names(request_id=request.request_id)
    if request.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"top_logprobs: expected at most {MAX_TOP_LOGPROBS}, got {request.top_logprobs}")
    return PrefillParams(
        tokens=read_token_ids(request),
        caller=read_caller(request),
        request_id=request.request_id or secrets.token_hex(16),
        read_cache=request.read_cache if request.HasField("read_cache") else True,
        write_cache=request.write_cache if request.HasField("write_cache") else True,
        retention=read_retention(request),
        urgency=request.priority if request.HasField("priority") else DEFAULT_URGENCY,
        top_logprobs=request.top_logprobs,
        return_logits=request.return_logits,
        hold_lease=request.hold_lease,
        traceparent=traceparent,
        deadline_s=None if remaining_s is None else time.monotonic() + remaining_s,
    )


def read_retention(request: prefill_pb2.PrefillRequest | cache_pb2.RetainRequest) -> Retention | None:
    """Read a retention; None without one.

    Raises:
        InvalidRequest: a field is missing or out of range.
    """
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


def prefill_response(result: PrefillResult, block_size: int, epoch: int) -> prefill_pb2.PrefillResponse:
    """Write the answer to a prefill. Block size and epoch belong to the block table of a held lease."""
    response = prefill_pb2.PrefillResponse(
        request_id=result.request_id,
        usage=usage_message(result.usage),
        next_token_id=result.next_token_id,
        top_logprobs=_top_messages(result.top_logprobs),
        logits=b"" if result.logits is None else result.logits.astype("<f4", copy=False).tobytes(),
        miss_reason=result.miss_reason.value,
        timing=_timing_message(result.timing),
        retained=None if result.retained is None else grant_message(result.retained),
    )
    held = result.held_lease
    if held is not None:
        response.lease_id = held.lease_id
        response.lease_expires_at.CopyFrom(timestamp(held.expires_at_s))
        response.block_table.extend(held.block_table.tolist())
        response.block_size = block_size
        response.epoch = epoch
    return response


def last_response(
    result: GenerateResult, num_told: int, index: int, matched_stop: str = ""
) -> prefill_pb2.GenerateResponse:
    """Write the last answer to a generation, of which `num_told` tokens were sent before, without log probabilities."""
    return prefill_pb2.GenerateResponse(
        token_ids=result.token_ids[num_told:],
        index=index,
        matched_stop=matched_stop,
        finished=True,
        finish_reason=prefill_pb2.FinishReason.Name(result.finish_reason.value),
        usage=usage_message(result.usage),
        request_id=result.request_id,
        miss_reason=result.miss_reason.value,
        timing=_timing_message(result.timing),
        retained=None if result.retained is None else grant_message(result.retained),
    )


def _top_messages(top: Iterable[tuple[int, float]]) -> list[prefill_pb2.TokenLogprob]:
    return [prefill_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in top]


def usage_message(usage: Usage) -> prefill_pb2.Usage:
    """Write the tokens of one request."""
    counts = {name: getattr(usage, name) for name in Usage.__slots__}
    return prefill_pb2.Usage(**counts, device_tokens=usage.device_tokens)


def purge_message(purged: Purged) -> cache_pb2.PurgeResponse:
    """Write the outcome of a purge."""
    stores = [cache_pb2.DeletedBlocks(store=name, blocks=deleted) for name, deleted in purged.stored_blocks.items()]
    return cache_pb2.PurgeResponse(freed_blocks=purged.freed_blocks, pinned_blocks=purged.pinned_blocks, stores=stores)


def grant_message(retained: Retained) -> prefill_pb2.Grant:
    """Write the answer to a retention."""
    expires_at_s = retained.expires_at_s
    return prefill_pb2.Grant(
        granted_tokens=retained.grant.granted_tokens,
        refused_tokens=retained.grant.refused_tokens,
        uncached_tokens=retained.grant.uncached_tokens,
        expires_at=None if expires_at_s is None else timestamp(expires_at_s),
    )


def stats_response(limits: Limits, stats: EngineStats, tiers: Iterable[TierStats] = ()) -> cache_pb2.StatsResponse:
    """Write the counts of an engine and its stores. Fields have the same names on both sides."""
    tenants = [_tenant_message(each) for each in stats.tenants]
    counts = dataclasses.asdict(dataclasses.replace(stats, tenants=()))
    del counts["tenants"]
    return cache_pb2.StatsResponse(
        model=limits.model,
        model_fingerprint=limits.model_fingerprint,
        device=limits.device,
        epoch=limits.epoch,
        block_size=limits.block_size,
        tenants=tenants,
        tiers=[cache_pb2.TierStats(**dataclasses.asdict(each)) for each in tiers],
        **counts.pop("load"),
        **counts,
    )


def tenant_stats_response(limits: Limits, stats: EngineStats, tenant: str) -> cache_pb2.StatsResponse:
    """Write what one tenant may know: its own counts, the model and the size of the pool.

    Sums over all tenants are left out, since a caller who subtracts its own part would know the others'.
    """
    mine = [each for each in stats.tenants if each.tenant == tenant]
    return cache_pb2.StatsResponse(
        model=limits.model,
        model_fingerprint=limits.model_fingerprint,
        device=limits.device,
        epoch=limits.epoch,
        uptime_s=stats.uptime_s,
        block_size=limits.block_size,
        block_bytes=stats.block_bytes,
        kv_dtype=stats.kv_dtype,
        blocks=cache_pb2.BlockStats(total=stats.load.blocks.total),
        tenants=[_tenant_message(each) for each in mine] or [cache_pb2.TenantStats(tenant=tenant)],
    )


def _tenant_message(stats: TenantStats) -> cache_pb2.TenantStats:
    """Write the counts of one tenant; `asdict` would take five times as long."""
    return cache_pb2.TenantStats(**{name: getattr(stats, name) for name in TenantStats.__slots__})


def _timing_message(timing: Timing) -> prefill_pb2.Timing:
    return prefill_pb2.Timing(
        queue_us=timing.queue_us,
        prefill_us=timing.prefill_us,
        decode_us=timing.decode_us,
        total_us=timing.total_us,
    )


def timestamp(unix_s: float) -> Timestamp:
    """Write a Unix time in seconds."""
    seconds, nanos = divmod(round(unix_s * 1e9), 1_000_000_000)
    return Timestamp(seconds=seconds, nanos=nanos)
