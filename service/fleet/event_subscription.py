"""Keeps a router's view of one live server up to date with the server's event stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol

import grpc
import grpc.aio
import numpy as np

from radixkv.api.events import DEVICE, AllCleared, BlocksRemoved, BlocksStored, Event, EventBatch, SnapshotPart
from radixkv.routing.fleet_view import FleetView
from radixkv.v1 import events_pb2

_MIN_PAUSE_S = 0.05
_MAX_PAUSE_S = 5.0
_FORGET_S = 30.0  # after the last batch, the blocks of a server that can't be reached are removed from the view
_NUMBER_UNKNOWN = (grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.DATA_LOSS)
_PERMANENT = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED)

_log = logging.getLogger(__name__)


class Subscriber(Protocol):
    """Client of a server, such as `AsyncClient`."""

    def subscribe(
        self, start_sequence_number: int = 0, *, stores: bool = False
    ) -> AsyncGenerator[events_pb2.EventBatch, None]:
        """Subscribe to cache events."""


class EventSubscription:
    """Follows the events of one server across disconnections.

        subscribe from the last number ──▶ read ──▶ read ──▶ ...
              ▲      ▲                       │ a batch is missing: from 0
              │      └── from 0 ─────────────┤ OUT_OF_RANGE, DATA_LOSS: the number is too old, or from before a restart
              └── after a pause ─────────────┘ the connection ended

    While the connection is down, the view keeps the blocks of the server, because the server probably still has them.
    The blocks are removed when the stream or an attempt to subscribe fails 30 s or more after the last batch.

    Args:
        name: name of the replica in the view.
        client: client of the server; it is not closed.
        view: view of the fleet, which is used on the same event loop.
        sleep: sleeps for a number of seconds.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        name: str,
        client: Subscriber,
        view: FleetView,
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._client = client
        self._view = view
        self._sleep = sleep
        self._clock = clock
        self._last_batch_s: float | None = None  # None after the blocks were removed
        self._pause_s = _MIN_PAUSE_S

    async def run(self) -> None:
        """Follow the server until it leaves the view, or the task is cancelled.

        Raises:
            grpc.aio.AioRpcError: the server refuses this client, or has no events.
            ConfigError: the event blocks of the server have another size than the view's.
        """
        while self._name in self._view.names:
            try:
                await self._follow()
            except grpc.aio.AioRpcError as error:
                if error.code() in _PERMANENT:
                    raise
                self._handle_error(error.code())
            await self._sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)

    async def _follow(self) -> None:
        """Subscribe after the last number and read until the stream ends or a batch is missing."""
        messages = self._client.subscribe(self._view.number_of(self._name), stores=True)
        async with contextlib.aclosing(messages):  # the server limits the number of subscribers
            async for message in messages:
                if self._name not in self._view.names:
                    return
                is_complete = self._view.read(self._name, batch_of(message))
                if not is_complete:
                    return
                self._last_batch_s = self._clock()
                self._pause_s = _MIN_PAUSE_S

    def _handle_error(self, code: grpc.StatusCode) -> None:
        if self._name not in self._view.names:
            return
        if code in _NUMBER_UNKNOWN:
            self._view.request_snapshot(self._name)
            return
        _log.info("events of %s: the stream ended with %s", self._name, code.name)
        if self._last_batch_s is not None and self._clock() - self._last_batch_s >= _FORGET_S:
            self._view.join(self._name)  # removes the blocks of the replica
            self._last_batch_s = None


def batch_of(message: events_pb2.EventBatch) -> EventBatch:
    """Convert a message to an event batch."""
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
