"""Keeps a router's view of one live server in step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Protocol

import grpc
import grpc.aio

from radixkv.routing.fleet_view import FleetView
from radixkv.service.fleet.event_messages import batch_of
from radixkv.v1 import events_pb2

_LEAST_PAUSE_S = 0.05
_MOST_PAUSE_S = 5.0
_FORGET_S = 30.0
_NUMBER_UNKNOWN = (grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.DATA_LOSS)
_HOPELESS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED)

_log = logging.getLogger(__name__)


class Subscriber(Protocol):
    """Client of a server, such as `AsyncClient`."""

    def subscribe(
        self, start_sequence_number: int = 0, *, stores: bool = False
    ) -> AsyncIterator[events_pb2.EventBatch]:
        """Follow what is cached."""


class EventStream:
    """Follows the events of one server, whatever happens to the connection.

        subscribe from the last number ──▶ read ──▶ read ──▶ ...
              ▲      ▲                       │ a batch is missing: from 0
              │      └── from 0 ─────────────┤ OUT_OF_RANGE, DATA_LOSS: the number is forgotten, or of an earlier life
              └── after a pause ─────────────┘ the connection ended

    What is known stays while a connection is cut: the server has it probably still. After `forget_s` it is forgotten.

    Args:
        name: of the replica in the view.
        client: of the server; not closed.
        view: of the fleet; belongs to the event loop.
        forget_s: seconds without a stream after which the server's blocks are forgotten.
        sleep: waits, in seconds.
        clock: seconds, never going back.

    Attributes:
        num_gaps: times that batches were missing or the number was unknown.
        num_breaks: times that the connection ended.
    """

    def __init__(
        self,
        name: str,
        client: Subscriber,
        view: FleetView,
        *,
        forget_s: float = _FORGET_S,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_gaps = 0
        self.num_breaks = 0
        self._name = name
        self._client = client
        self._view = view
        self._forget_s = forget_s
        self._sleep = sleep
        self._clock = clock
        self._heard_s: float | None = None  # None once all is forgotten
        self._pause_s = _LEAST_PAUSE_S

    async def run(self) -> None:
        """Follow the server until it leaves the view, or this is cancelled.

        Raises:
            grpc.aio.AioRpcError: the server refuses this caller, or has no events.
            ConfigError: its event blocks have another size than the view's.
        """
        while self._name in self._view.names:
            try:
                await self._follow()
            except grpc.aio.AioRpcError as error:
                if error.code() in _HOPELESS:
                    raise
                self._break(error.code())
            await self._sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _MOST_PAUSE_S)

    async def _follow(self) -> None:
        """Read from the last number on, until the stream ends or a batch is missing."""
        async with _closed_after(self._client.subscribe(self._view.number_of(self._name), stores=True)) as messages:
            async for message in messages:
                if self._name not in self._view.names:
                    return
                if not self._view.read(self._name, batch_of(message)):
                    self.num_gaps += 1
                    return
                self._heard_s = self._clock()
                self._pause_s = _LEAST_PAUSE_S

    def _break(self, code: grpc.StatusCode) -> None:
        if self._name not in self._view.names:
            return
        if code in _NUMBER_UNKNOWN:
            self.num_gaps += 1
            self._view.lose(self._name)
            return
        self.num_breaks += 1
        _log.info("events of %s: the stream ended with %s", self._name, code.name)
        if self._heard_s is not None and self._clock() - self._heard_s >= self._forget_s:
            self._view.join(self._name)
            self._heard_s = None


@contextlib.asynccontextmanager
async def _closed_after(
    messages: AsyncIterator[events_pb2.EventBatch],
) -> AsyncGenerator[AsyncIterator[events_pb2.EventBatch], None]:
    """Close a stream that is left before its end: the server keeps a place for each."""
    try:
        yield messages
    finally:
        if isinstance(messages, AsyncGenerator):
            await messages.aclose()
