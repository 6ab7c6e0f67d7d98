"""Statistics of a fleet: those of its replicas, added up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from radixkv.v1 import cache_pb2

_NAME_OF = {"tenants": "tenant", "tiers": "tier"}
# The same on all replicas.
_ALIKE = ("model", "device", "block_size", "block_bytes", "kv_dtype", "model_fingerprint", "bounds_s", "tenant", "tier")
_LARGEST = ("uptime_s", "known_tenants")


def summed(answers: Iterable[cache_pb2.StatsResponse], max_tenants: int) -> cache_pb2.StatsResponse:
    """Add up what replicas tell.

    What several replicas have counts several times, such as a namespace or a segment. A fleet has no epoch. A number
    that one of them does not tell, such as the bytes of a store, is not told.

    Args:
        answers: of the replicas, at least one.
        max_tenants: to list: those that hold most blocks.
    """
    parts = list(answers)
    total = cache_pb2.StatsResponse()
    _add(total, parts)
    total.ClearField("epoch")
    largest = sorted(total.tenants, key=lambda each: (-each.cached_blocks, each.tenant))[:max_tenants]
    kept = cache_pb2.StatsResponse(tenants=largest)
    del total.tenants[:]
    total.MergeFrom(kept)
    return total


def _add(total: Message, parts: Sequence[Message]) -> None:
    """Add up messages of one type in an empty one, field by field."""
    for field in total.DESCRIPTOR.fields:
        name, values = field.name, [getattr(part, field.name) for part in parts]
        if name == "replicas":
            continue
        if name in _NAME_OF:
            _add_by_name(getattr(total, name), values, _NAME_OF[name])
        elif name in _ALIKE:
            _copy_first(total, parts[0], field.name, is_list=field.is_repeated)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            for each in values:
                for key, number in each.items():
                    getattr(total, name)[key] += number
        elif field.message_type is not None:
            there = [getattr(part, name) for part in parts if part.HasField(name)]
            if there:
                getattr(total, name).SetInParent()
                _add(getattr(total, name), there)
        elif field.is_repeated:
            getattr(total, name).extend(map(sum, zip(*(each for each in values if each), strict=True)))
        elif field.type == FieldDescriptor.TYPE_BOOL:
            setattr(total, name, all(values))
        elif name in _LARGEST:
            setattr(total, name, max(values))
        elif not field.has_presence or all(part.HasField(name) for part in parts):
            setattr(total, name, sum(values))


def _add_by_name(total: Any, values: Sequence[Any], name: str) -> None:
    """Add up the messages in lists that have the same name."""
    named: dict[str, list[Message]] = {}
    for each in values:
        for message in each:
            named.setdefault(getattr(message, name), []).append(message)
    for messages in named.values():
        _add(total.add(), messages)


def _copy_first(total: Message, first: Message, name: str, *, is_list: bool) -> None:
    if is_list:
        getattr(total, name).extend(getattr(first, name))
    else:
        setattr(total, name, getattr(first, name))
