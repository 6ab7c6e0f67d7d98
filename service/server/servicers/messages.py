"""Converts protobuf messages to values of `radixkv.api` and back."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from google.protobuf.json_format import MessageToDict
from google.protobuf.timestamp_pb2 import Timestamp

from radixkv.api.adapters import Adapter
from radixkv.api.awaits import Awaits
from radixkv.api.caller import Caller
from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.api.hints import MAX_HINT_ACTIONS, HintAction, HintOutcome
from radixkv.api.limits import Limits
from radixkv.api.params import DEFAULT_URGENCY, PrefillParams
from radixkv.api.public_prefixes import PublicPrefixStatus
from radixkv.api.result import GenerateResult, PrefillResult, Retained, Timing, Usage
from radixkv.api.retention import MAX_TTL_S, Retention
from radixkv.api.sampling import (
    DEFAULT_MAX_NEW_TOKENS,
    MAX_ANSWERS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    Sampling,
    random_seed,
)
from radixkv.api.stats import EngineStats, SessionStats, TenantStats, TierStats
from radixkv.cache.purge import Purged
from radixkv.errors import InvalidRequest
from radixkv.service.structured.grammar_text import GrammarText
from radixkv.service.token_ids import read_token_ids
from radixkv.v1 import cache_pb2, hints_pb2, prefill_pb2

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.adapters.adapters import Adapters

MAX_NAME_CHARS = 256


def require_names(**names: str) -> None:
    """Refuse names that are too long.

    Raises:
        InvalidRequest: the message names the field.
    """
    for field, name in names.items():
        if len(name) > MAX_NAME_CHARS:
            raise InvalidRequest(f"{field}: expected at most {MAX_NAME_CHARS} characters, got {len(name)}")


def new_request_id() -> str:
    """Return a random id for a request without one. Ids of requests are not secrets."""
    return f"{random.getrandbits(128):032x}"


def read_caller(
    request: prefill_pb2.PrefillRequest
    | prefill_pb2.ProbeRequest
    | cache_pb2.RetainRequest
    | cache_pb2.HintRequest
    | cache_pb2.ExplainRequest,
) -> Caller:
    """Read the names that select the namespace of a request.

    Raises:
        InvalidRequest: a name is too long.
    """
    tenant, adapter, salt = request.tenant, request.adapter, request.salt
    require_names(tenant=tenant, adapter=adapter, salt=salt)
    return Caller(tenant, adapter, salt)


def read_params(request: prefill_pb2.PrefillRequest, remaining_s: float | None, traceparent: str = "") -> PrefillParams:
    """Read a prompt and its options.

    Args:
        request: the message.
        remaining_s: seconds until the caller's deadline; None without one.
        traceparent: the caller's span; empty without one.

    Raises:
        InvalidRequest: a field is out of range.
    """
    require_names(request_id=request.request_id, session_id=request.session_id)
    if request.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"top_logprobs: expected at most {MAX_TOP_LOGPROBS}, got {request.top_logprobs}")
    if request.return_block_table and not request.hold_lease:
        raise InvalidRequest("return_block_table: requires hold_lease")
    return PrefillParams(
        tokens=read_token_ids(request),
        caller=read_caller(request),
        request_id=request.request_id or new_request_id(),
        read_cache=request.read_cache if request.HasField("read_cache") else True,
        write_cache=request.write_cache if request.HasField("write_cache") else True,
        retention=read_retention(request),
        urgency=request.priority if request.HasField("priority") else DEFAULT_URGENCY,
        top_logprobs=request.top_logprobs,
        return_logits=request.return_logits,
        hold_lease=request.hold_lease,
        session_id=request.session_id,
        awaits=read_awaits(request),
        hints=read_hints(request.kv_hints) if request.HasField("kv_hints") else (),
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
    retention = request.retention
    if not retention.HasField("priority"):
        raise InvalidRequest("retention.priority: it is required, 0 to 100")
    ttl = retention.ttl
    if not 0 <= ttl.nanos < 1_000_000_000:
        raise InvalidRequest(f"retention.ttl.nanos: expected 0 to 999999999, got {ttl.nanos}")
    if ttl.seconds == MAX_TTL_S and ttl.nanos:  # a float of seconds would not hold the nanoseconds
        raise InvalidRequest(f"retention.ttl: expected at most {MAX_TTL_S:.0f} s, got {ttl.nanos} ns more")
    return Retention(
        priority=retention.priority,
        ttl_s=ttl.seconds + ttl.nanos / 1e9 if retention.HasField("ttl") else None,
        start=retention.start_token,
        end=retention.end_token if retention.HasField("end_token") else None,
        renew=retention.renew,
    )


def read_awaits(request: prefill_pb2.PrefillRequest) -> Awaits:
    """Read what the session of a request waits for afterwards.

    Raises:
        InvalidRequest: the value is unknown.
    """
    try:
        return Awaits(request.awaits)
    except ValueError:
        raise InvalidRequest(f"awaits: expected 0 to {max(Awaits).value}, got {request.awaits}") from None


def read_hints(envelope: hints_pb2.KvHintsEnvelope) -> tuple[HintAction, ...]:
    """Read the actions of hints. Their types and payloads are checked when they are applied.

    Raises:
        InvalidRequest: the version is unknown, there are too many actions, or an id or a type is too long.
    """
    if envelope.protocol_version.split(".")[0] not in ("0", "1"):
        got = envelope.protocol_version[:MAX_NAME_CHARS]
        raise InvalidRequest(f"kv_hints.protocol_version: expected 1.x or 0.x, got {got!r}")
    if len(envelope.actions) > MAX_HINT_ACTIONS:
        raise InvalidRequest(f"kv_hints.actions: expected at most {MAX_HINT_ACTIONS}, got {len(envelope.actions)}")
    actions = []
    for index, action in enumerate(envelope.actions):
        field = f"kv_hints.actions[{index}]"
        require_names(**{f"{field}.action_id": action.action_id, f"{field}.action_type": action.action_type})
        payload = MessageToDict(action.payload)
        actions.append(HintAction(action.action_id, action.action_type, action.action_version, payload))
    return tuple(actions)


def hint_message(outcome: HintOutcome) -> hints_pb2.HintOutcome:
    """Write what was done with an action."""
    return hints_pb2.HintOutcome(
        action_id=outcome.action_id,
        status=hints_pb2.HintStatus.Name(outcome.status.value),
        reason=outcome.reason,
        tokens=outcome.tokens,
        is_missing=outcome.is_missing,
    )


def session_message(stats: SessionStats) -> cache_pb2.SessionStats:
    """Write the statistics of one session."""
    return cache_pb2.SessionStats(**dataclasses.asdict(stats))


def prefill_response(
    result: PrefillResult, block_size: int, epoch: int, *, has_block_table: bool = False
) -> prefill_pb2.PrefillResponse:
    """Write the response to a prefill. Block size and epoch are written only with a held lease.

    Physical block ids are written only with `has_block_table`: they reveal how many blocks other tenants allocate.
    """
    response = prefill_pb2.PrefillResponse(
        request_id=result.request_id,
        usage=usage_message(result.usage),
        next_token_id=result.next_token_id,
        top_logprobs=_top_messages(result.top_logprobs),
        logits=b"" if result.logits is None else result.logits.astype("<f4", copy=False).tobytes(),
        miss_reason=result.miss_reason.value,
        timing=_timing_message(result.timing),
        retained=None if result.retained is None else grant_message(result.retained),
        hints=map(hint_message, result.hints),
    )
    held = result.held_lease
    if held is not None:
        response.lease_id = held.lease_id
        response.lease_expires_at.CopyFrom(timestamp(held.expires_at_s))
        if has_block_table:
            response.block_table.extend(held.block_table.tolist())
        response.block_size = block_size
        response.epoch = epoch
    return response


def last_response(
    result: GenerateResult, num_sent: int, index: int, matched_stop: str = ""
) -> prefill_pb2.GenerateResponse:
    """Write the last response of a completion, after `num_sent` tokens were sent, without log probabilities."""
    return prefill_pb2.GenerateResponse(
        token_ids=result.token_ids[num_sent:],
        index=index,
        matched_stop=matched_stop,
        finished=True,
        finish_reason=prefill_pb2.FinishReason.Name(result.finish_reason.value),
        usage=usage_message(result.usage),
        request_id=result.request_id,
        miss_reason=result.miss_reason.value,
        timing=_timing_message(result.timing),
        retained=None if result.retained is None else grant_message(result.retained),
        hints=map(hint_message, result.hints),
    )


def _top_messages(top: Iterable[tuple[int, float]]) -> list[prefill_pb2.TokenLogprob]:
    return [prefill_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in top]


# Counts that are 0, the default on the wire, for most requests.
_RARE_COUNTS = (
    "generated_tokens",
    "recomputed_tokens",
    "public_tokens",
    "host_tokens",
    "disk_tokens",
    "remote_tokens",
)


def usage_message(usage: Usage) -> prefill_pb2.Usage:
    """Write the token counts of one request."""
    message = prefill_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        computed_tokens=usage.computed_tokens,
        written_tokens=usage.written_tokens,
        device_tokens=usage.device_tokens,
    )
    for name in _RARE_COUNTS:
        count = getattr(usage, name)
        if count:
            setattr(message, name, count)
    return message


def purge_message(purged: Purged) -> cache_pb2.PurgeResponse:
    """Write the result of a purge."""
    stores = [cache_pb2.DeletedBlocks(store=name, blocks=deleted) for name, deleted in purged.stored_blocks.items()]
    return cache_pb2.PurgeResponse(freed_blocks=purged.freed_blocks, pinned_blocks=purged.pinned_blocks, stores=stores)


def grant_message(retained: Retained) -> prefill_pb2.Grant:
    """Write the result of a retention."""
    expires_at_s = retained.expires_at_s
    return prefill_pb2.Grant(
        granted_tokens=retained.grant.granted_tokens,
        refused_tokens=retained.grant.refused_tokens,
        uncached_tokens=retained.grant.uncached_tokens,
        expires_at=None if expires_at_s is None else timestamp(expires_at_s),
    )


def stats_response(limits: Limits, stats: EngineStats, tiers: Iterable[TierStats] = ()) -> cache_pb2.StatsResponse:
    """Write the statistics of an engine and its stores. `EngineStats` and the message have the same field names."""
    tenants = [_tenant_message(each) for each in stats.tenants]
    stats_fields = dataclasses.asdict(dataclasses.replace(stats, tenants=()))  # `tenants` is converted above, faster
    del stats_fields["tenants"]
    load_fields = stats_fields.pop("load")
    return cache_pb2.StatsResponse(
        model=limits.model,
        model_fingerprint=limits.model_fingerprint,
        device=limits.device,
        epoch=limits.epoch,
        block_size=limits.block_size,
        tenants=tenants,
        tiers=[cache_pb2.TierStats(**dataclasses.asdict(each)) for each in tiers],
        **load_fields,
        **stats_fields,
    )


def tenant_stats_response(limits: Limits, stats: EngineStats, tenant: str) -> cache_pb2.StatsResponse:
    """Write what one tenant may see: its own statistics, the model and the size of the pool.

    Sums over all tenants are left out, because a tenant could subtract its own numbers to learn the sum of the others.
    """
    own = [each for each in stats.tenants if each.tenant == tenant]
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
        tenants=[_tenant_message(each) for each in own] or [cache_pb2.TenantStats(tenant=tenant)],
    )


def _tenant_message(stats: TenantStats) -> cache_pb2.TenantStats:
    """Write the statistics of one tenant; `asdict` would take five times as long."""
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


def read_sampling(request: prefill_pb2.GenerateRequest) -> Sampling:
    """Read the options of a generation.

    Raises:
        InvalidRequest: there are too many stop tokens, or the policy of the compression is missing or unknown.
    """
    if len(request.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids: expected at most {MAX_STOP_TOKEN_IDS} of them, got {len(request.stop_token_ids)}"
        )
    return Sampling(
        max_new_tokens=request.max_new_tokens if request.HasField("max_new_tokens") else DEFAULT_MAX_NEW_TOKENS,
        temperature=request.temperature,
        top_p=request.top_p if request.HasField("top_p") else 1.0,
        seed=request.seed if request.HasField("seed") else random_seed(),
        stop_token_ids=frozenset(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        top_k=request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty if request.HasField("repetition_penalty") else 1.0,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        min_tokens=request.min_tokens,
        logprobs=request.logprobs if request.HasField("logprobs") else None,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        logit_bias=tuple(sorted(request.logit_bias.items())),
        compression=read_compression(request),
        write_generated=request.write_generated if request.HasField("write_generated") else True,
    )


def read_compression(request: prefill_pb2.GenerateRequest) -> Compression | None:
    """Read the K/V compression of a generation; None without one.

    Raises:
        InvalidRequest: the policy is missing or unknown.
    """
    if not request.HasField("compression"):
        return None
    compression = request.compression
    policies = {prefill_pb2.CompressionPolicy.Value(policy.name): policy for policy in CompressionPolicy}
    if compression.policy not in policies:
        raise InvalidRequest(
            f"compression.policy: expected one of {', '.join(each.name for each in policies.values())}, got "
            f"{compression.policy}"
        )
    return Compression(
        policy=policies[compression.policy],
        max_tokens=compression.max_tokens,
        num_sinks=compression.num_sinks if compression.HasField("num_sinks") else None,
        window=compression.window if compression.HasField("window") else None,
    )


def read_grammar(request: prefill_pb2.GenerateRequest) -> GrammarText | None:
    """Read the grammar that constrains the completions; None without one."""
    field = request.WhichOneof("constraint")
    if field is None:
        return None
    if field == "json_object":
        return GrammarText.of_json_object(field) if request.json_object else None
    return GrammarText(field, field, getattr(request, field))


def read_num_completions(request: prefill_pb2.GenerateRequest) -> int:
    """Read the number of completions.

    Raises:
        InvalidRequest: it is out of range.
    """
    if not request.HasField("n"):
        return 1
    if not 1 <= request.n <= MAX_ANSWERS:
        raise InvalidRequest(f"n: expected 1 to {MAX_ANSWERS}, got {request.n}")
    return request.n


def adapter_message(adapter: Adapter) -> cache_pb2.Adapter:
    """Write an adapter."""
    return cache_pb2.Adapter(
        name=adapter.name,
        digest=adapter.digest,
        rank=adapter.rank,
        num_bytes=adapter.num_bytes,
        is_on_device=adapter.is_on_device,
        is_draining=adapter.is_draining,
        unfinished_requests=adapter.num_unfinished,
        cached_tokens=adapter.cached_tokens,
    )


def public_prefix_message(status: PublicPrefixStatus, adapters: Adapters) -> cache_pb2.PublicPrefix:
    """Write the state of a public prefix. `adapters` has the names of the prefix's adapter."""
    return cache_pb2.PublicPrefix(
        name=status.name,
        tokens=status.num_tokens,
        blocks=status.num_blocks,
        is_computed=status.is_computed,
        users=status.num_users,
        uses=status.num_uses,
        adapter_digest=status.adapter,
        adapter_names=adapters.names_of(status.adapter),
    )
