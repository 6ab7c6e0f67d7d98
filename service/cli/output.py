"""Answers as a short table for people, or as JSON for scripts."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from radixkv.service.cli.terminal import aligned, percent
from radixkv.v1.cache_pb2 import PurgeResponse, StatsResponse
from radixkv.v1.prefill_pb2 import FinishReason, GenerateResponse, MissReason, PrefillResponse, Timing, Usage

# Protobuf's JSON writes these as strings, for languages whose only number is a double.
_64_BIT = frozenset(
    {
        FieldDescriptor.TYPE_INT64,
        FieldDescriptor.TYPE_UINT64,
        FieldDescriptor.TYPE_SINT64,
        FieldDescriptor.TYPE_FIXED64,
        FieldDescriptor.TYPE_SFIXED64,
    }
)
# Numbers of all 64 bits: a reader that takes them for doubles, such as jq, would round them.
_TEXTS = frozenset({"epoch"})
# What `Stats` tells of all tenants, and not of one.
_OF_ALL_TENANTS = frozenset(
    {"namespaces", "segments", "held_leases", "evicted_blocks", "evicted_probation_blocks", "known_tenants", "tiers"}
)


def json_of(message: Message, *, indent: int | None = 2, **texts: str | None) -> str:
    """Return a message as JSON: names as in the .proto files, every plain field present, numbers as numbers.

    An `epoch` is a string. What a tenant is not told of all tenants' statistics is left out.

    Args:
        message: an answer.
        indent: spaces for each level; None puts it all on one line.
        texts: further fields; None leaves one out.
    """
    tree = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    _make_numbers(tree, message.DESCRIPTOR)
    if isinstance(message, StatsResponse):
        _leave_out_hidden(tree, message)
    tree.update({name: text for name, text in texts.items() if text is not None})
    return json.dumps(tree, indent=indent)


def prefill_table(answer: PrefillResponse, next_token_text: str | None = None) -> str:
    """Return a table of what was reused, what was computed, why, and how long it took."""
    quoted = "" if next_token_text is None else " " + json.dumps(next_token_text, ensure_ascii=False)
    usage, timing = answer.usage, answer.timing
    rows = [
        ("request", answer.request_id),
        ("next token", f"{answer.next_token_id}{quoted}"),
        ("prompt", f"{usage.prompt_tokens} tokens"),
        ("  cached", _cached(usage)),
        ("  computed", f"{usage.computed_tokens} tokens"),
        ("written", f"{usage.written_tokens} tokens"),
        ("miss reason", MissReason.Name(answer.miss_reason)),
        *_time_rows(timing),
    ]
    if answer.HasField("retained"):
        refused = f" ({answer.retained.refused_tokens} refused)" if answer.retained.refused_tokens else ""
        rows += [("retained", f"{answer.retained.granted_tokens} tokens{refused}")]
    rows += [(f"logprob of {top.token_id}", f"{top.logprob:.4f}") for top in answer.top_logprobs]
    return _table(rows)


def generate_table(answer: GenerateResponse) -> str:
    """Return a table of what was reused, computed and generated, why it ended, and how long it took."""
    usage, timing = answer.usage, answer.timing
    rows = [
        ("request", answer.request_id),
        ("prompt", f"{usage.prompt_tokens} tokens"),
        ("  cached", _cached(usage)),
        ("  computed", f"{usage.computed_tokens} tokens"),
        ("generated", f"{usage.generated_tokens} tokens, {FinishReason.Name(answer.finish_reason)}"),
        ("written", f"{usage.written_tokens} tokens"),
        ("miss reason", MissReason.Name(answer.miss_reason)),
        *_time_rows(timing),
        ("  decode", f"{timing.decode_us / 1000:.2f} ms"),
    ]
    return _table(rows)


def purge_table(answer: PurgeResponse) -> str:
    """Return a table of the blocks that a purge freed."""
    rows = [("blocks freed", str(answer.freed_blocks)), ("  still in use", str(answer.pinned_blocks))]
    for store in answer.stores:
        deleted = f"{store.blocks} blocks" if store.HasField("blocks") else "could not be asked, and is asked again"
        rows.append((f"deleted in {store.store}", deleted))
    return _table(rows)


def stats_table(stats: StatsResponse) -> str:
    """Return a table of what cache and tiers hold and what the service did; of one tenant if the answer has no more."""
    blocks = stats.blocks
    rows = [
        ("model", f"{stats.model} on {stats.device}"),
        ("  fingerprint", stats.model_fingerprint),
        ("uptime", f"{stats.uptime_s:.1f} s"),
        ("blocks", f"{blocks.total} of {stats.block_size} tokens, {stats.block_bytes} bytes each, {stats.kv_dtype}"),
    ]
    if _is_of_all(stats):
        rows += _whole_process_rows(stats)
    for tier in stats.tiers:
        state = "" if tier.is_working else ", out of use"
        moved = f"{tier.loaded_blocks} loaded, {tier.missed_blocks} missed, {tier.saved_blocks} saved"
        held = f"{tier.blocks} blocks, {tier.used_bytes} bytes; " if tier.HasField("blocks") else ""
        rows.append((f"tier {tier.tier}", f"{held}{moved}{state}"))
    for tenant in stats.tenants:
        reused = percent(tenant.hit_tokens, tenant.hit_tokens + tenant.miss_tokens)
        below = "".join(f", {number} in {name}" for name, number in sorted(tenant.stored_blocks.items()) if number)
        held = f"{tenant.cached_blocks} blocks{below}, {tenant.hit_tokens} cached tokens{reused}"
        rows.append((f"tenant {tenant.tenant or '(none)'}", held))
    if stats.known_tenants > len(stats.tenants):
        rows.append((f"{stats.known_tenants - len(stats.tenants)} smaller tenants", "by name: --tenant"))
    return _table(rows)


def _cached(usage: Usage) -> str:
    """Return how many tokens were reused, and which of them were not on the device."""
    tiers = {"host memory": usage.host_tokens, "disk": usage.disk_tokens, "shared stores": usage.remote_tokens}
    loaded = "".join(f", {number} from {tier}" for tier, number in tiers.items() if number)
    return f"{usage.cached_tokens} tokens{percent(usage.cached_tokens, usage.prompt_tokens)}{loaded}"


def _whole_process_rows(stats: StatsResponse) -> list[tuple[str, str]]:
    blocks, requests, tokens = stats.blocks, stats.requests, stats.tokens
    return [
        ("  free", str(blocks.free)),
        ("  published", f"{blocks.published} ({blocks.pinned} pinned)"),
        ("  leased", str(blocks.leased)),
        ("  retained", f"{blocks.retained} of {blocks.retainable} that may be"),
        ("  on probation", str(blocks.on_probation)),
        ("  evicted", f"{stats.evicted_blocks} so far ({stats.evicted_probation_blocks} on probation)"),
        ("requests", f"{requests.running} running, {requests.following} following, {requests.waiting} waiting"),
        ("  paused", f"{requests.paused} ({requests.pauses} so far)"),
        ("  finished", str(requests.finished)),
        ("  failed", str(requests.failed)),
        ("  cancelled", str(requests.cancelled)),
        ("prompt tokens", str(tokens.prompt)),
        ("  cached", f"{tokens.cached}{percent(tokens.cached, tokens.prompt)}"),
        ("  computed", str(tokens.computed)),
        ("  written", str(tokens.written)),
        ("  computed again", str(tokens.recomputed)),
        ("generated tokens", str(tokens.generated)),
        ("namespaces", str(stats.namespaces)),
        ("segments", str(stats.segments)),
        ("held leases", str(stats.held_leases)),
        *_state_rows(stats),
        *_part_rows(stats),
    ]


def _state_rows(stats: StatsResponse) -> list[tuple[str, str]]:
    states = stats.states
    if not stats.HasField("states"):
        return []
    return [
        ("snapshots of states", f"{states.snapshots} of {states.max_snapshots} that may be"),
        ("  given up", str(states.given_up_snapshots)),
        ("  tokens for want of one", str(states.recomputed_tokens)),
    ]


def _part_rows(stats: StatsResponse) -> list[tuple[str, str]]:
    parts = stats.parts
    if not stats.HasField("parts"):
        return []
    return [
        ("parts for windowed layers", f"{parts.needed} needed, {parts.kept} kept, {parts.free} free"),
        ("  given up", str(parts.given_up)),
        ("  hits shortened", f"{parts.shortened_hits}, by {parts.lost_tokens} tokens"),
    ]


def _is_of_all(stats: StatsResponse) -> bool:
    """Return whether these are the counts of all tenants, and not what one tenant may know."""
    return stats.HasField("requests")


def _leave_out_hidden(tree: dict[str, Any], stats: StatsResponse) -> None:
    """Take out of JSON what a tenant is not told: it would read as 0."""
    if not _is_of_all(stats):
        for name in _OF_ALL_TENANTS:
            del tree[name]
        if stats.HasField("blocks"):
            tree["blocks"] = {"total": stats.blocks.total}
    for part, replica in zip(tree["replicas"], stats.replicas, strict=True):
        if replica.HasField("stats"):
            _leave_out_hidden(part["stats"], replica.stats)


def _make_numbers(tree: dict[str, Any], descriptor: Any) -> None:  # a Descriptor of either implementation
    for field in descriptor.fields:
        value = tree.get(field.name)
        if value is None:
            continue
        if field.type in _64_BIT and field.name not in _TEXTS:
            tree[field.name] = [int(item) for item in value] if isinstance(value, list) else int(value)
        elif field.message_type is not None:
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, dict):  # a Timestamp is a string by now
                    _make_numbers(item, field.message_type)


def _time_rows(timing: Timing) -> list[tuple[str, str]]:
    return [
        ("time", f"{timing.total_us / 1000:.2f} ms"),
        ("  queue", f"{timing.queue_us / 1000:.2f} ms"),
        ("  prefill", f"{timing.prefill_us / 1000:.2f} ms"),
    ]


def _table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(aligned(rows))
