"""Batches of events, from messages to values."""

from __future__ import annotations

import numpy as np

from radixkv.api.events import DEVICE, AllCleared, BlocksRemoved, BlocksStored, Event, EventBatch, SnapshotPart
from radixkv.v1 import events_pb2


def batch_of(message: events_pb2.EventBatch) -> EventBatch:
    """Turn a message into what was published."""
    part = None
    if message.HasField("snapshot"):
        part = SnapshotPart(message.snapshot.index, message.snapshot.count, message.snapshot.blocks)
    events = tuple(_event_of(event) for event in message.events)
    return EventBatch(message.sequence_number, message.time_s, events, part)


def _event_of(message: events_pb2.CacheEvent) -> Event:
    kind = message.WhichOneof("event")
    if kind == "stored":
        stored = message.stored
        return BlocksStored(
            stored.parent_block_hash if stored.HasField("parent_block_hash") else None,
            np.asarray(stored.block_hashes, "<u8").tobytes(),
            np.asarray(stored.token_ids, "<u4").tobytes(),
            stored.block_size,
            stored.cache_salt,
            stored.tier or DEVICE,
        )
    if kind == "removed":
        removed = message.removed
        hashes = np.asarray(removed.block_hashes, "<u8").tobytes()
        return BlocksRemoved(hashes, removed.cache_salt, removed.tier or DEVICE)
    return AllCleared()
