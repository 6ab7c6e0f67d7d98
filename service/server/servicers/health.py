"""The standard health service of gRPC, `grpc.health.v1.Health`. Needs grpcio-health-checking.

The servicer of grpcio-health-checking writes to a watcher while it holds a lock, so a watcher that does not read would
block changes of the status, and with them the drain.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from grpc_health.v1 import health_pb2, health_pb2_grpc

from radixkv.service.server.calls import Context
from radixkv.service.server.guarded_server import GuardedServer
from radixkv.service.server.servicers.health_status import HealthStatus

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


# The messages of `Health/List` in gRPC's health.proto, for versions of grpcio-health-checking that lack them.
_MESSAGES = """
name: "radixkv/health_list.proto"
package: "grpc.health.v1"
syntax: "proto3"
message_type { name: "HealthListRequest" }
message_type {
  name: "HealthListResponse"
  field {
    name: "statuses" number: 1 label: LABEL_REPEATED
    type: TYPE_MESSAGE type_name: ".grpc.health.v1.HealthListResponse.StatusesEntry"
  }
  nested_type {
    name: "StatusesEntry"
    options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field {
      name: "value" number: 2 label: LABEL_OPTIONAL
      type: TYPE_MESSAGE type_name: ".grpc.health.v1.HealthCheckResponse"
    }
  }
}
"""


def _add_list_messages() -> tuple[Any, Any]:
    """Add the messages of `Health/List` to protobuf's default pool, and return the classes of request and response."""
    file = text_format.Parse(_MESSAGES, descriptor_pb2.FileDescriptorProto(dependency=[health_pb2.DESCRIPTOR.name]))
    pool = descriptor_pool.Default()
    pool.Add(file)
    request, response = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{message.name}"))
        for message in file.message_type
    )
    return request, response


HealthListRequest: Any
HealthListResponse: Any
if hasattr(health_pb2, "HealthListResponse"):
    HealthListRequest = health_pb2.HealthListRequest
    HealthListResponse = health_pb2.HealthListResponse
else:
    HealthListRequest, HealthListResponse = _add_list_messages()


def add_health(server: GuardedServer, health: HealthStatus) -> None:
    """Add the health service to a server."""
    servicer = HealthServicer(health)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if not hasattr(health_pb2_grpc.HealthServicer, "List"):  # grpcio-health-checking is too old to add it
        handler = grpc.unary_unary_rpc_method_handler(
            servicer.List,
            request_deserializer=HealthListRequest.FromString,
            response_serializer=HealthListResponse.SerializeToString,
        )
        server.add_service(SERVICE, {"List": handler})


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # not typed
    """Reports whether the server, and each of its services, accepts requests. For use on one event loop.

    Args:
        health: the status to report.
    """

    def __init__(self, health: HealthStatus) -> None:
        self._health = health

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """Return the status of a service; NOT_FOUND for an unknown one."""
        status = self._status_of(request.service)
        if status == _UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "service: this server has no service of that name")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Return the status of every service, and of the server under the empty name."""
        return HealthListResponse(
            statuses={name: health_pb2.HealthCheckResponse(status=self._status_of(name)) for name in self._health.names}
        )

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Stream the status of a service, now and after each change. A slow reader skips intermediate states."""
        sent_status = None
        while True:
            changed, status = self._health.changed, self._status_of(request.service)
            if status != sent_status:
                sent_status = status
                yield health_pb2.HealthCheckResponse(status=status)
            await changed.wait()

    def _status_of(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if service not in self._health.names:
            return _UNKNOWN
        return _SERVING if self._health.is_serving else _NOT_SERVING
