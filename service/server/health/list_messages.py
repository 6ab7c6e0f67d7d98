"""The messages of `Health/List`, also where grpcio-health-checking is too old to have them."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from grpc_health.v1 import health_pb2

# As in health.proto of gRPC, whose newer versions have them.
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


def _added() -> tuple[Any, Any]:
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
    HealthListRequest, HealthListResponse = _added()
