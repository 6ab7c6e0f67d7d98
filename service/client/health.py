"""Health checks by `grpc.health.v1.Health`, for clients without the package grpcio-health-checking."""

from __future__ import annotations

import enum
from typing import Any

import grpc
import grpc.aio
from google.protobuf.wrappers_pb2 import Int32Value, StringValue


class ServingStatus(enum.Enum):
    """Whether a server accepts requests; the values are those of `HealthCheckResponse`."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


def health_check(channel: grpc.Channel | grpc.aio.Channel) -> Any:
    """Return a stub of `Check`: it takes `StringValue(value=SERVICE)` and returns a `ServingStatus`.

    `HealthCheckRequest` is one string and `HealthCheckResponse` is one enum, both with number 1. On the wire they equal
    these wrappers, which every installation of protobuf has.
    """
    return channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=StringValue.SerializeToString,
        response_deserializer=lambda data: ServingStatus(Int32Value.FromString(data).value),
    )
