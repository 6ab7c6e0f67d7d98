"""A server with scripted streams of events, and a clock that advances only during pauses between them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from radixkv.routing.fleet_view import FleetView
from radixkv.service.fleet.event_subscription import EventSubscription
from radixkv.v1 import events_pb2

BLOCK_SIZE = 4


def refusal(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())


def batch(sequence_number: int, *hashes: int) -> events_pb2.EventBatch:
    stored = events_pb2.BlocksStored(
        block_hashes=hashes, token_ids=[0] * BLOCK_SIZE * len(hashes), block_size=BLOCK_SIZE
    )
    return events_pb2.EventBatch(sequence_number=sequence_number, events=[events_pb2.CacheEvent(stored=stored)])


def snapshot(sequence_number: int, *hashes: int) -> events_pb2.EventBatch:
    message = batch(sequence_number, *hashes)
    message.events.insert(0, events_pb2.CacheEvent(cleared=events_pb2.AllCleared()))
    message.snapshot.CopyFrom(events_pb2.SnapshotPart(index=0, count=1, blocks=len(hashes)))
    return message


class ScriptedServer:
    """Answers each subscription with the next of its streams. `run` ends when a further one is requested.

    Attributes:
        view: the view that the subscription updates; the server is its replica `a`.
        starts: the sequence numbers after which subscriptions started.
        pauses_s: the pauses before further subscriptions, in seconds.
        num_closed: number of streams that were read to their end or closed.
    """

    def __init__(self, *streams: list, clock_step_s: float = 1.0) -> None:
        self.view = FleetView(BLOCK_SIZE)
        self.view.join("a")
        self.starts: list[int] = []
        self.pauses_s: list[float] = []
        self.num_closed = 0
        self._streams = list(streams)
        self._clock_step_s = clock_step_s  # by which a pause advances the clock
        self._now_s = 0.0
        self._all_streams_read = asyncio.Event()

    async def subscribe(
        self, start_sequence_number: int = 0, *, stores: bool = False
    ) -> AsyncIterator[events_pb2.EventBatch]:
        assert stores
        self.starts.append(start_sequence_number)
        try:
            if not self._streams:
                self._all_streams_read.set()
                await asyncio.Event().wait()
            for item in self._streams.pop(0):
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.num_closed += 1

    def run(self, holds_before_last_stream=lambda: True) -> None:
        """Follow the server until all streams are read. Before the last one, the given condition must hold."""

        async def follow() -> None:
            subscription = EventSubscription("a", self, self.view, sleep=self._sleep, clock=lambda: self._now_s)
            task = asyncio.create_task(subscription.run())
            over = asyncio.create_task(self._all_streams_read.wait())
            await asyncio.wait((task, over), return_when=asyncio.FIRST_COMPLETED)
            for each in (over, task):
                if not each.done():
                    each.cancel()
            await asyncio.gather(over, return_exceptions=True)
            with contextlib.suppress(asyncio.CancelledError):
                await task

        self._holds_before_last_stream = holds_before_last_stream
        asyncio.run(follow())

    async def _sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        if len(self._streams) == 1:
            assert self._holds_before_last_stream()
        self._now_s += self._clock_step_s
