"""Batches as the messages that vLLM publishes over ZMQ: msgpack, with events as arrays or as maps.

    array       ["BlockStored", hashes, parent, tokens, block size, lora id, medium, lora name, extra keys]
    map         {"type": "BlockStored", "block_hashes": hashes, ..., "cache_salt": salt}
    plain_map   the same without "cache_salt"

Source: vLLM's `KVEventBatch`. Readers of arrays take a salt in `extra_keys` for no salt at all, so blocks that may not
be matched by tokens are left out of arrays; in maps they have a `cache_salt`. Some readers of maps (vllm-router 0.1.17)
drop a message with a field that they do not know, and with it all other events of the step, so plain maps leave those
blocks out too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from radixkv.api.events import AllCleared, BlocksStored, Event, EventBatch

_MEDIUM = "GPU"  # the pool that the model attends to, wherever it is
_RANK = 0


def array_payload(batch: EventBatch) -> bytes:
    """Write the events of a batch that need no isolation, as arrays; maybe none."""
    return _payload(batch, [_as_array(event) for event in batch.device_events if _is_plain(event)])


def plain_map_payload(batch: EventBatch) -> bytes:
    """Write the events of a batch that need no isolation, as maps; maybe none."""
    return _payload(batch, [_as_map(event) for event in batch.device_events if _is_plain(event)])


def map_payload(batch: EventBatch) -> bytes:
    """Write the events of a batch as maps."""
    return _payload(batch, [_as_map(event) for event in batch.device_events])


PAYLOADS: dict[str, Callable[[EventBatch], bytes]] = {
    "array": array_payload,
    "map": map_payload,
    "plain_map": plain_map_payload,
}


def _payload(batch: EventBatch, events: list[Any]) -> bytes:
    payload: bytes = msgpack.packb([batch.time_s, events, _RANK])
    return payload


def _is_plain(event: Event) -> bool:
    return isinstance(event, AllCleared) or not event.cache_salt


def _as_array(event: Event) -> list[Any]:
    if isinstance(event, AllCleared):
        return ["AllBlocksCleared"]
    hashes = _numbers(event.block_hashes, "<u8")
    if isinstance(event, BlocksStored):
        tokens = _numbers(event.tokens, "<u4")
        return ["BlockStored", hashes, event.parent_hash, tokens, event.block_size, None, _MEDIUM, None, None]
    return ["BlockRemoved", hashes, _MEDIUM]


def _as_map(event: Event) -> dict[str, Any]:
    if isinstance(event, AllCleared):
        return {"type": "AllBlocksCleared"}
    hashes = _numbers(event.block_hashes, "<u8")
    if not isinstance(event, BlocksStored):
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": _MEDIUM}
    fields = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": event.parent_hash,
        "token_ids": _numbers(event.tokens, "<u4"),
        "block_size": event.block_size,
        "lora_id": None,
        "medium": _MEDIUM,
        "lora_name": None,
    }
    if event.cache_salt:
        fields["cache_salt"] = event.cache_salt
    return fields


def _numbers(packed: bytes, dtype: str) -> list[int]:
    numbers: list[int] = np.frombuffer(packed, dtype).tolist()
    return numbers
