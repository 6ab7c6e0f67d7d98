"""The standard health service of gRPC, `grpc.health.v1.Health`.

That of grpcio-health-checking writes to a watcher while it holds a lock: one that reads nothing would keep the status
from everybody, and the server from draining.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import grpc
from grpc_health.v1 import health_pb2

from radixkv.service.server.unfinished_calls import Context

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer:
    """Tells whether the server, and each of its services, takes requests. To be used inside the event loop."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._status = _NOT_SERVING
        self._is_leaving = False
        self._changed = asyncio.Event()

    def set(self, names: Iterable[str], *, is_serving: bool) -> None:
        """Give the services of these names, and the server itself, a status. After `leave` it stays NOT_SERVING."""
        names = frozenset(("", *names))
        status = _SERVING if is_serving and not self._is_leaving else _NOT_SERVING
        if (names, status) != (self._names, self._status):
            self._names, self._status = names, status
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def leave(self) -> None:
        """Say NOT_SERVING from now on."""
        self._is_leaving = True
        self.set(self._names, is_serving=False)

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """Tell the status of a service; NOT_FOUND for one that is not there."""
        status = self._status_of(request.service)
        if status == _UNKNOWN:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, "service: expected the name of a service, got an unknown one"
            )
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Tell the status of a service now and after each change. A watcher that reads slowly misses what is over."""
        told = None
        while True:
            changed, status = self._changed, self._status_of(request.service)
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            await changed.wait()

    def _status_of(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        return self._status if service in self._names else _UNKNOWN
