"""The gRPC service of cache events. Recent batches are kept in serialized form for all subscribers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import lru_cache

from radixkv.api.events import DEVICE, AllCleared, BlocksStored, Event, EventBatch
from radixkv.events.readers import EventReaders
from radixkv.service.server.calls import Context
from radixkv.service.token_ids import write_packed
from radixkv.v1 import events_pb2, events_pb2_grpc

SERVICE = events_pb2.DESCRIPTOR.services_by_name["EventService"].full_name
_MAX_SERIALIZED = 256  # batches whose serialized form is kept for other subscribers


class EventServicer(events_pb2_grpc.EventServiceServicer):
    """Streams the event log as serialized batches.

    Args:
        readers: subscriptions to the event log.
        epoch: changes with each start of the service.
    """

    def __init__(self, readers: EventReaders, epoch: int) -> None:
        self._readers = readers
        self._epoch = epoch
        self._serialize = lru_cache(maxsize=_MAX_SERIALIZED)(self._write)

    async def Subscribe(self, request: events_pb2.SubscribeRequest, context: Context) -> AsyncIterator[bytes]:  # noqa: N802
        """Stream batches until the caller cancels or the service stops."""
        async with contextlib.aclosing(self._readers.subscribe(request.start_sequence_number)) as batches:
            await context.send_initial_metadata(())  # so that the client knows that its sequence number was accepted
            async for batch in batches:
                yield self._serialize(batch, request.stores)

    def _write(self, batch: EventBatch, has_stores: bool) -> bytes:
        """Serialize a batch. Events of the tiers below the device are included only with `has_stores`."""
        snapshot_part = batch.snapshot
        events = batch.events if has_stores else batch.device_events
        message = events_pb2.EventBatch(
            sequence_number=batch.sequence_number,
            epoch=self._epoch,
            events=[_event_message(event) for event in events],
            time_s=batch.time_s,
        )
        if snapshot_part is not None:
            message.snapshot.CopyFrom(
                events_pb2.SnapshotPart(
                    index=snapshot_part.index, count=snapshot_part.count, blocks=snapshot_part.num_blocks
                )
            )
        return message.SerializeToString()


def _event_message(event: Event) -> events_pb2.CacheEvent:
    if isinstance(event, AllCleared):
        return events_pb2.CacheEvent(cleared=events_pb2.AllCleared())
    tier = "" if event.tier == DEVICE else event.tier
    if isinstance(event, BlocksStored):
        stored = events_pb2.BlocksStored(
            parent_block_hash=event.parent_hash, block_size=event.block_size, cache_salt=event.cache_salt, tier=tier
        )
        write_packed(stored, events_pb2.BlocksStored.TOKEN_IDS_FIELD_NUMBER, event.tokens)
        write_packed(stored, events_pb2.BlocksStored.BLOCK_HASHES_FIELD_NUMBER, event.block_hashes)
        return events_pb2.CacheEvent(stored=stored)
    removed = events_pb2.BlocksRemoved(cache_salt=event.cache_salt, tier=tier)
    write_packed(removed, events_pb2.BlocksRemoved.BLOCK_HASHES_FIELD_NUMBER, event.block_hashes)
    return events_pb2.CacheEvent(removed=removed)
