"""A server with scripted streams, and a clock that only pauses advance."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from radixkv.routing.fleet_view import FleetView
from radixkv.service.fleet.event_subscription import EventSubscription
from radixkv.v1 import events_pb2

SIZE = 4


def refusal(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())


def batch(number: int, *hashes: int) -> events_pb2.EventBatch:
    stored = events_pb2.BlocksStored(block_hashes=hashes, token_ids=[0] * SIZE * len(hashes), block_size=SIZE)
    return events_pb2.EventBatch(sequence_number=number, events=[events_pb2.CacheEvent(stored=stored)])


def snapshot(number: int, *hashes: int) -> events_pb2.EventBatch:
    message = batch(number, *hashes)
    message.events.insert(0, events_pb2.CacheEvent(cleared=events_pb2.AllCleared()))
    message.snapshot.CopyFrom(events_pb2.SnapshotPart(index=0, count=1, blocks=len(hashes)))
    return message


class ScriptedServer:
    """Answers each subscription with the next of its streams; after the last one the replica leaves.

    Attributes:
        view: has the replica `a`.
        starts: numbers that were subscribed from.
        pauses: seconds between the streams.
        num_closed: streams that were read to their end or closed.
    """

    def __init__(self, *streams: list, seconds_a_pause: float = 1.0) -> None:
        self.view = FleetView(SIZE)
        self.view.join("a")
        self.starts: list[int] = []
        self.pauses: list[float] = []
        self.num_closed = 0
        self._streams = list(streams)
        self._seconds_a_pause = seconds_a_pause
        self._now_s = 0.0
        self._is_over = asyncio.Event()

    async def subscribe(
        self, start_sequence_number: int = 0, *, stores: bool = False
    ) -> AsyncIterator[events_pb2.EventBatch]:
        assert stores
        self.starts.append(start_sequence_number)
        try:
            if not self._streams:
                self._is_over.set()
                await asyncio.Event().wait()
            for each in self._streams.pop(0):
                if isinstance(each, Exception):
                    raise each
                yield each
        finally:
            self.num_closed += 1

    def run(self, before_the_last=lambda: True) -> None:
        """Follow the server until all streams are read."""

        async def follow() -> None:
            stream = EventSubscription("a", self, self.view, sleep=self._sleep, clock=lambda: self._now_s)
            task = asyncio.create_task(stream.run())
            over = asyncio.create_task(self._is_over.wait())
            await asyncio.wait((task, over), return_when=asyncio.FIRST_COMPLETED)
            for each in (over, task):
                if not each.done():
                    each.cancel()
            await asyncio.gather(over, return_exceptions=True)
            with contextlib.suppress(asyncio.CancelledError):
                await task

        self._check = before_the_last
        asyncio.run(follow())

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if len(self._streams) == 1:
            assert self._check()
        self._now_s += self._seconds_a_pause
