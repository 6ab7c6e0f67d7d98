"""Batches as the messages that vLLM publishes over ZMQ: msgpack, with events as arrays or as maps.

    array       ["BlockStored", hashes, parent, tokens, block size, lora id, medium, lora name, extra keys]
    map         {"type": "BlockStored", "block_hashes": hashes, ...}, also called plain_map

Source: vLLM's `KVEventBatch`. Blocks that must not be matched by tokens alone, such as those of salted prompts, are
omitted, because readers over ZMQ have no credentials.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from radixkv.api.events import AllCleared, BlocksStored, Event, EventBatch

_MEDIUM = "GPU"  # vLLM's name for the pool that attention reads, on any device
_RANK = 0  # of data parallelism


def array_payload(batch: EventBatch) -> bytes:
    """Write the events of a batch that need no isolation as arrays. The payload may have no events."""
    return _payload(batch, [_as_array(event) for event in batch.device_events if _is_plain(event)])


def map_payload(batch: EventBatch) -> bytes:
    """Write the events of a batch that need no isolation as maps. The payload may have no events."""
    return _payload(batch, [_as_map(event) for event in batch.device_events if _is_plain(event)])


PAYLOADS: dict[str, Callable[[EventBatch], bytes]] = {
    "array": array_payload,
    "map": map_payload,
    "plain_map": map_payload,
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
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": event.parent_hash,
        "token_ids": _numbers(event.tokens, "<u4"),
        "block_size": event.block_size,
        "lora_id": None,
        "medium": _MEDIUM,
        "lora_name": None,
    }


def _numbers(packed: bytes, dtype: str) -> list[int]:
    numbers: list[int] = np.frombuffer(packed, dtype).tolist()
    return numbers
