"""Responses as JSON for scripts, and those to prompts as a short table to read."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from radixkv.service.cli.terminal import align_columns, percent
from radixkv.v1.cache_pb2 import StatsResponse
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
# Full 64-bit numbers: a reader that parses numbers as doubles, such as jq, would round them.
_STRINGS = frozenset({"epoch"})
# Fields of `StatsResponse` that a single tenant may not see.
_GLOBAL_FIELDS = frozenset(
    {"namespaces", "segments", "held_leases", "evicted_blocks", "evicted_probation_blocks", "known_tenants", "tiers"}
)


def json_of(message: Message, *, indent: int | None = 2, **texts: str | None) -> str:
    """Return a response as JSON, with the field names of the .proto files, all scalar fields, and numbers as numbers.

    An `epoch` is a string. Statistics that a tenant may not see are left out.

    Args:
        message: the response.
        indent: spaces per level; None for a single line.
        texts: further fields; a field whose value is None is left out.
    """
    tree = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    _make_numbers(tree, message.DESCRIPTOR)
    if isinstance(message, StatsResponse):
        _remove_hidden(tree, message)
    tree.update({name: text for name, text in texts.items() if text is not None})
    return json.dumps(tree, indent=indent)


def prefill_table(response: PrefillResponse, next_token_text: str | None = None) -> str:
    """Return a table of what was reused and computed, the miss reason, and the times."""
    quoted = "" if next_token_text is None else " " + json.dumps(next_token_text, ensure_ascii=False)
    usage, timing = response.usage, response.timing
    rows = [
        ("request", response.request_id),
        ("next token", f"{response.next_token_id}{quoted}"),
        ("prompt", f"{usage.prompt_tokens} tokens"),
        ("  cached", _cached_text(usage)),
        ("  computed", f"{usage.computed_tokens} tokens"),
        ("written", f"{usage.written_tokens} tokens"),
        ("miss reason", MissReason.Name(response.miss_reason)),
        *_time_rows(timing),
    ]
    if response.HasField("retained"):
        refused = f" ({response.retained.refused_tokens} refused)" if response.retained.refused_tokens else ""
        rows += [("retained", f"{response.retained.granted_tokens} tokens{refused}")]
    rows += [(f"logprob of {top.token_id}", f"{top.logprob:.4f}") for top in response.top_logprobs]
    return "\n".join(align_columns(rows))


def generate_table(response: GenerateResponse) -> str:
    """Return a table of what was reused, computed and generated, the finish reason, and the times."""
    usage, timing = response.usage, response.timing
    rows = [
        ("request", response.request_id),
        ("prompt", f"{usage.prompt_tokens} tokens"),
        ("  cached", _cached_text(usage)),
        ("  computed", f"{usage.computed_tokens} tokens"),
        ("generated", f"{usage.generated_tokens} tokens, {FinishReason.Name(response.finish_reason)}"),
        ("written", f"{usage.written_tokens} tokens"),
        ("miss reason", MissReason.Name(response.miss_reason)),
        *_time_rows(timing),
        ("  decode", f"{timing.decode_us / 1000:.2f} ms"),
    ]
    return "\n".join(align_columns(rows))


def _cached_text(usage: Usage) -> str:
    """Return the number of reused tokens, and how many of them were loaded from each tier."""
    tiers = {"host memory": usage.host_tokens, "disk": usage.disk_tokens, "shared stores": usage.remote_tokens}
    loaded = "".join(f", {number} from {tier}" for tier, number in tiers.items() if number)
    return f"{usage.cached_tokens} tokens{percent(usage.cached_tokens, usage.prompt_tokens)}{loaded}"


def _remove_hidden(tree: dict[str, Any], stats: StatsResponse) -> None:
    """Remove the fields that a tenant may not see from JSON, in which they would be 0."""
    if not stats.HasField("requests"):  # the response has only what one tenant may see
        for name in _GLOBAL_FIELDS:
            del tree[name]
        if stats.HasField("blocks"):
            tree["blocks"] = {"total": stats.blocks.total}
    for replica_tree, replica in zip(tree["replicas"], stats.replicas, strict=True):
        if replica.HasField("stats"):
            _remove_hidden(replica_tree["stats"], replica.stats)


def _make_numbers(tree: dict[str, Any], descriptor: Any) -> None:  # a Descriptor of either protobuf implementation
    """Replace 64-bit numbers, which protobuf's JSON writes as strings, by numbers."""
    for field in descriptor.fields:
        value = tree.get(field.name)
        if value is None:
            continue
        if field.type in _64_BIT and field.name not in _STRINGS:
            tree[field.name] = [int(item) for item in value] if isinstance(value, list) else int(value)
        elif field.message_type is not None:
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, dict):  # a Timestamp has become a string
                    _make_numbers(item, field.message_type)


def _time_rows(timing: Timing) -> list[tuple[str, str]]:
    return [
        ("time", f"{timing.total_us / 1000:.2f} ms"),
        ("  queue", f"{timing.queue_us / 1000:.2f} ms"),
        ("  prefill", f"{timing.prefill_us / 1000:.2f} ms"),
    ]
