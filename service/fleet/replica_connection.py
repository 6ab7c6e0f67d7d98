"""The connection of the ingress to one replica, with its health checks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.wrappers_pb2 import StringValue

from radixkv.service.client.connection import (
    channel_options,
    open_async_channel,
    server_name_options,
    tls_credentials,
)
from radixkv.service.client.methods import HEALTH_CHECK, ServingStatus
from radixkv.service.client.response_stream import AsyncResponseStream
from radixkv.service.fleet.replica_facts import ReplicaFacts
from radixkv.v1 import events_pb2
from radixkv.v1.cache_pb2_grpc import CacheServiceStub
from radixkv.v1.events_pb2_grpc import EventServiceStub
from radixkv.v1.model_pb2_grpc import ModelServiceStub
from radixkv.v1.prefill_pb2_grpc import PrefillServiceStub

_FINISH_POLL_S = 0.05  # between two checks whether a call is in flight
# A replica whose health check fails with any other status counts as alive.
_NO_RESPONSE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
# A channel that is idle for this time closes its connection, because middleboxes may drop one that is idle for minutes.
_IDLE_MS = 60_000

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class ReplicaLost(Exception):
    """A replica no longer answers health checks."""


@dataclass(frozen=True, slots=True)
class HealthCheckTimes:
    """The times of health checks.

    Attributes:
        period_s: seconds between two checks.
        timeout_s: timeout of a check in seconds, after which the replica counts as lost until it responds again.
    """

    period_s: float = 0.5
    timeout_s: float = 3.0


class ReplicaConnection:
    """The connection to one replica: its calls, and whether it is alive.

        calls of clients ───── one channel ────▶ replica
        health, events ─────── another ────────▶

    If the machine of a replica fails, or its process is suspended, no connection is closed. So the replica is checked
    periodically, and calls that wait for a replica that no longer responds are abandoned. Health checks and events have
    their own channel, so that calls do not delay them, however many or large they are.

    Create it inside the event loop that uses it.

    Args:
        facts: properties of the replica.
        health_checks: times of health checks.
        sleep: sleeps for a number of seconds.
        tls_ca: PEM file with the authorities of the replica's certificate; None for no TLS.
        tls_name: name in the replica's certificate; empty for the replica's address.

    Raises:
        OSError, ValueError: `tls_ca` can't be used.

    Attributes:
        facts: see above.
        is_up: whether the replica accepted requests at its last health check.
        num_calls: number of calls in flight, which callers count with `in_flight`.
        prefill, cache, model: stubs of the replica's services.
        metadata: the fleet's token, for each call except health checks.
    """

    def __init__(
        self,
        facts: ReplicaFacts,
        health_checks: HealthCheckTimes = HealthCheckTimes(),
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        tls_ca: str | None = None,
        tls_name: str = "",
    ) -> None:
        self.facts = facts
        self.is_up = True  # until the first health check, since Ray reports the replica as started
        self.num_calls = 0
        self._health_checks = health_checks
        self._sleep = sleep
        self._lost = asyncio.Event()
        credentials = None if tls_ca is None else tls_credentials(tls_ca)
        options = channel_options(server_name_options(tls_name), 0)
        call_options = (*options, ("grpc.client_idle_timeout_ms", _IDLE_MS))
        call_channel = open_async_channel(facts.address, credentials, call_options)
        # Without a subchannel pool of their own, channels to one address share a connection.
        watch_options = (*options, ("grpc.use_local_subchannel_pool", 1))
        watch_channel = open_async_channel(facts.address, credentials, watch_options)
        self._channels = call_channel, watch_channel
        self.prefill = PrefillServiceStub(call_channel)  # type: ignore[no-untyped-call]
        self.cache = CacheServiceStub(call_channel)  # type: ignore[no-untyped-call]
        self.model = ModelServiceStub(call_channel)  # type: ignore[no-untyped-call]
        self._events = EventServiceStub(watch_channel)  # type: ignore[no-untyped-call]
        self._check_health = HEALTH_CHECK.bind(watch_channel)
        self.metadata = (("authorization", f"Bearer {facts.secrets.token}"),)

    def subscribe(
        self, start_sequence_number: int = 0, *, stores: bool = False
    ) -> AsyncGenerator[events_pb2.EventBatch, None]:
        """Subscribe to the cache events of the replica, and with `stores` to those of its tiers."""
        request = events_pb2.SubscribeRequest(start_sequence_number=start_sequence_number, stores=stores)
        return AsyncResponseStream(self._events.Subscribe(request, metadata=self.metadata))

    async def watch(self) -> None:
        """Check the health of the replica until cancelled."""
        while True:
            await self.check()
            await self._sleep(self._health_checks.period_s)

    async def check(self) -> None:
        """Check the health of the replica once. If the replica refuses the check, `is_up` does not change."""
        try:
            response = await self._check_health(StringValue(), timeout=self._health_checks.timeout_s)
            self.is_up = ServingStatus(response.value) is ServingStatus.SERVING
        except grpc.aio.AioRpcError as error:
            if error.code() in _NO_RESPONSE:
                if self.is_up:
                    _log.warning("replica %s: it did not answer a health check", self.facts.address)
                self.is_up = False
                self._lost.set()
                return
        if self._lost.is_set():
            self._lost = asyncio.Event()  # calls that wait for the previous event still see that the replica was lost

    async def wait_for(self, awaitable: Awaitable[Answer]) -> Answer:
        """Wait for a response while the replica answers health checks.

        Raises:
            ReplicaLost: the replica no longer answers health checks; the awaited call is cancelled.
        """
        lost = asyncio.ensure_future(self._lost.wait())
        call = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait((lost, call), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise ReplicaLost(f"replica {self.facts.address}: it answers neither the call nor health checks")
            return call.result()
        finally:
            lost.cancel()
            if not call.done():
                call.cancel()
                with contextlib.suppress(asyncio.CancelledError, grpc.RpcError, StopAsyncIteration):
                    await call

    @contextlib.contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count a call as in flight inside the `with` block."""
        self.num_calls += 1
        try:
            yield
        finally:
            self.num_calls -= 1

    async def finish(self) -> None:
        """Wait until no call is in flight. Ray removes a draining replica before it has sent its last response."""
        while self.num_calls:
            await self._sleep(_FINISH_POLL_S)

    async def close(self) -> None:
        """Close both channels. Calls in flight end."""
        self._lost.set()
        await asyncio.gather(*(channel.close(None) for channel in self._channels))
