"""The connection of a fleet's ingress to one replica."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.wrappers_pb2 import StringValue

from radixkv.service.client.calls import HEALTH_CHECK, ServingStatus
from radixkv.service.client.connection import (
    channel_options,
    open_async_channel,
    server_name_options,
    tls_credentials,
)
from radixkv.service.client.response_stream import AsyncResponseStream
from radixkv.service.fleet.replica_facts import ReplicaFacts
from radixkv.v1 import events_pb2
from radixkv.v1.cache_pb2_grpc import CacheServiceStub
from radixkv.v1.events_pb2_grpc import EventServiceStub
from radixkv.v1.model_pb2_grpc import ModelServiceStub
from radixkv.v1.prefill_pb2_grpc import PrefillServiceStub

_PERIOD_S = 0.05
# Any other refusal of a health check is an answer.
_SILENCE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
# A line that has been idle for minutes may have been forgotten by what is on its way.
_IDLE_MS = 60_000

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class ReplicaLost(Exception):
    """A replica does not answer its health checks any more."""


@dataclass(frozen=True, slots=True)
class Patience:
    """The times of health checks.

    Attributes:
        period_s: seconds between two of them.
        answer_s: seconds that an answer may take; then the replica counts as lost until it answers again.
    """

    period_s: float = 0.5
    answer_s: float = 3.0


class ReplicaConnection:
    """The connection to one replica: its calls, and whether it still answers.

        calls of callers ───── one line ────▶ replica
        health, events ─────── another ─────▶

    A replica whose machine is gone or whose process is stopped closes no connection. So it is asked for its health all
    the time, and calls that wait for a replica that no longer tells are given up. Health and events have a line of
    their own, so that no number of calls, and no size of their messages, keeps them waiting.

    To be made inside the event loop that uses it.

    Args:
        facts: about the replica.
        patience: of health checks.
        sleep: waits, in seconds.
        tls_ca: PEM file with the authorities of its certificate; None for no TLS.
        tls_name: name in its certificate; empty for its address.

    Raises:
        OSError, ValueError: the file can't be used.

    Attributes:
        facts: see above.
        is_up: whether it may be sent requests, by its last answer.
        num_calls: calls under way, by those who make them.
        prefill, cache, model: stubs of its services.
        metadata: to be sent with each call.
    """

    def __init__(
        self,
        facts: ReplicaFacts,
        patience: Patience = Patience(),
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        tls_ca: str | None = None,
        tls_name: str = "",
    ) -> None:
        self.facts = facts
        self.is_up = True  # Ray says so
        self.num_calls = 0
        self._patience = patience
        self._sleep = sleep
        self._lost = asyncio.Event()
        credentials = None if tls_ca is None else tls_credentials(tls_ca)
        options = channel_options(server_name_options(tls_name), 0)
        calls = open_async_channel(facts.address, credentials, (*options, ("grpc.client_idle_timeout_ms", _IDLE_MS)))
        # Channels to one address would share a line otherwise.
        watch = open_async_channel(facts.address, credentials, (*options, ("grpc.use_local_subchannel_pool", 1)))
        self._channels = calls, watch
        self.prefill = PrefillServiceStub(calls)  # type: ignore[no-untyped-call]
        self.cache = CacheServiceStub(calls)  # type: ignore[no-untyped-call]
        self.model = ModelServiceStub(calls)  # type: ignore[no-untyped-call]
        self._events = EventServiceStub(watch)  # type: ignore[no-untyped-call]
        self._check_health = HEALTH_CHECK.bind(watch)
        self.metadata = (("authorization", f"Bearer {facts.secrets.token}"),)

    def subscribe(
        self, start_sequence_number: int = 0, *, stores: bool = False
    ) -> AsyncIterator[events_pb2.EventBatch]:
        """Follow what the replica has cached, and with `stores` what its stores have."""
        request = events_pb2.SubscribeRequest(start_sequence_number=start_sequence_number, stores=stores)
        return AsyncResponseStream(self._events.Subscribe(request, metadata=self.metadata))

    async def watch(self) -> None:
        """Ask for the replica's health until cancelled."""
        while True:
            await self.look()
            await self._sleep(self._patience.period_s)

    async def look(self) -> None:
        """Ask for the replica's health once. One that refuses to tell it is there, and counts as what it was."""
        try:
            response = await self._check_health(StringValue(), timeout=self._patience.answer_s)
            self.is_up = ServingStatus(response.value) is ServingStatus.SERVING
        except grpc.aio.AioRpcError as error:
            if error.code() in _SILENCE:
                if self.is_up:
                    _log.warning("replica %s: expected an answer to a health check, got none", self._name)
                self.is_up = False
                self._lost.set()
                return
        if self._lost.is_set():
            self._lost = asyncio.Event()

    async def wait_for(self, awaitable: Awaitable[Answer]) -> Answer:
        """Wait for a replica's answer, as long as the replica answers health checks.

        Raises:
            ReplicaLost: it does not any more; what was awaited is cancelled.
        """
        lost = asyncio.ensure_future(self._lost.wait())
        asked = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait((lost, asked), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise ReplicaLost(f"replica {self._name}: expected an answer, got none, nor one to health checks")
            return asked.result()
        finally:
            lost.cancel()
            if not asked.done():
                asked.cancel()
                with contextlib.suppress(asyncio.CancelledError, grpc.RpcError, StopAsyncIteration):
                    await asked

    async def finish(self) -> None:
        """Wait until no call is under way. A replica that drains leaves the fleet before its last answer."""
        while self.num_calls:
            await self._sleep(_PERIOD_S)

    async def close(self) -> None:
        """Close both lines. Calls under way end."""
        self._lost.set()
        await asyncio.gather(*(channel.close(None) for channel in self._channels))

    @property
    def _name(self) -> str:
        return self.facts.address
