"""The event stream of one gateway: batches of the event log, and load records between them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

import numpy as np

from radixkv.api.events import AllCleared, BlocksRemoved, BlocksStored, Event, EventBatch
from radixkv.errors import LifecycleError
from radixkv.gateway import engine_common_pb2
from radixkv.gateway.vllm_engine_pb2 import SchedulerLoad
from radixkv.service.server.gateway.descriptions import load_record

HEARTBEAT_S = 1.0  # the gateway sends nothing to servers that have been silent for 15 s

_DEVICE = engine_common_pb2.KV_CACHE_TIER_DEVICE


class GatewayEvents:
    """Batches of the event log for one gateway, with periodic load records.

    Args:
        batches: batches of the event log, from the requested sequence number on. The caller closes this iterator.
        first_number: sequence number of load records before the first batch; None to send no load records before it.
        load: returns the engine's current load.
    """

    def __init__(
        self,
        batches: AsyncIterator[EventBatch],
        first_number: int | None,
        load: Callable[[], Awaitable[SchedulerLoad]],
    ) -> None:
        self._batches = batches
        self._sequence_number = first_number
        self._load = load
        self._event_ids = itertools.count(1)
        self._samples = itertools.count(1)

    async def messages(self) -> AsyncGenerator[engine_common_pb2.KvEventBatch, None]:
        """Yield batches as they arrive, and load records: one at first, then one per second. Raises as `batches`.

        A load record is skipped before a sequence number is known, and while the engine accepts no calls.
        """
        clock = asyncio.get_running_loop().time
        next_load_s = clock()
        next_batch = asyncio.ensure_future(anext(self._batches))
        try:
            while True:
                await asyncio.wait([next_batch], timeout=max(0.0, next_load_s - clock()))
                if next_batch.done():
                    batch = next_batch.result()
                    self._sequence_number = batch.sequence_number
                    yield batch_message(batch, self._event_ids)
                    next_batch = asyncio.ensure_future(anext(self._batches))
                if clock() >= next_load_s:
                    next_load_s = clock() + HEARTBEAT_S
                    message = await self._load_message()
                    if message is not None:
                        yield message
        finally:
            next_batch.cancel()
            with contextlib.suppress(Exception, asyncio.CancelledError):  # its result is no longer needed
                await next_batch

    async def _load_message(self) -> engine_common_pb2.KvEventBatch | None:
        """Return a load record; None before a sequence number is known, and while the engine accepts no calls."""
        if self._sequence_number is None:
            return None
        try:
            load = await self._load()
        except LifecycleError:
            return None
        return engine_common_pb2.KvEventBatch(
            sequence_number=self._sequence_number,
            timestamp=time.time(),
            dp_rank=0,
            load=load_record(load, next(self._samples)),
        )


def batch_message(batch: EventBatch, event_ids: itertools.count[int]) -> engine_common_pb2.KvEventBatch:
    """Write a batch with the blocks on the device that can be matched by tokens alone.

    These are the blocks of the gateway's tenant without an adapter and a salt.

    A batch without such blocks is written as well, because the gateway expects consecutive sequence numbers.
    """
    message = engine_common_pb2.KvEventBatch(
        sequence_number=batch.sequence_number,
        timestamp=batch.time_s,
        dp_rank=0,
        events=[
            _event_message(event, next(event_ids)) for event in batch.device_events if _is_visible_to_gateway(event)
        ],
    )
    if batch.snapshot is not None:
        chunk = batch.snapshot
        message.snapshot.CopyFrom(
            engine_common_pb2.KvSnapshotChunk(index=chunk.index, count=chunk.count, blocks=chunk.num_blocks)
        )
    return message


def _is_visible_to_gateway(event: Event) -> bool:
    return isinstance(event, AllCleared) or not event.cache_salt


def _event_message(event: Event, event_id: int) -> engine_common_pb2.KvCacheEvent:
    message = engine_common_pb2.KvCacheEvent(event_id=event_id)
    if isinstance(event, BlocksStored):
        message.stored.CopyFrom(_stored_message(event))
    elif isinstance(event, BlocksRemoved):
        hashes = np.frombuffer(event.block_hashes, "<i8").tolist()
        message.removed.CopyFrom(engine_common_pb2.KvBlocksRemoved(block_hashes=hashes, tier=_DEVICE))
    else:
        message.cleared.SetInParent()
    return message


def _stored_message(event: BlocksStored) -> engine_common_pb2.KvBlocksStored:
    hashes = np.frombuffer(event.block_hashes, "<i8").tolist()
    tokens = np.frombuffer(event.tokens, "<u4").reshape(len(hashes), event.block_size).tolist()
    message = engine_common_pb2.KvBlocksStored(
        tier=_DEVICE,
        blocks=[
            engine_common_pb2.KvBlock(block_hash=block_hash, token_ids=token_ids, block_size=event.block_size)
            for block_hash, token_ids in zip(hashes, tokens, strict=True)
        ],
    )
    if event.parent_hash is not None:
        message.parent_block_hash = _signed(event.parent_hash)
    return message


def _signed(number: int) -> int:
    """Return the int64 with the same bits as a uint64.

    >>> _signed(2**64 - 1)
    -1
    """
    return number - 2**64 if number >= 2**63 else number
