"""HTTP statuses of errors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import grpc

from radixkv.errors import CapacityError, InvalidRequest, RadixKVError
from radixkv.service.field_names import renamed_fields
from radixkv.service.server.status import status_of

_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


class BodyTooLarge(InvalidRequest):
    """The body of a request is larger than this server accepts."""


def http_status_of(error: BaseException) -> int:
    """Return the HTTP status of an exception; 500 for an internal error, such as an unexpected exception."""
    if isinstance(error, BodyTooLarge):
        return 413
    return _STATUS.get(status_of(error), 500)


def retry_headers_of(error: BaseException) -> dict[str, str]:
    """Return the headers `retry-after` (in seconds) and `retry-after-ms`; none unless the server is at a limit."""
    if not isinstance(error, CapacityError):
        return {}
    seconds = max(0.0, error.retry_after_s)
    return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}


def message_and_field(error: BaseException, names: Mapping[str, str]) -> tuple[str, str | None]:
    """Return what a client may read about an exception, and the field that it is about, named as in the API.

    The field is the beginning of the message; None if the exception is about no field.

    Args:
        error: the exception.
        names: the names of fields in the API, by their names in messages of this server.
    """
    if not isinstance(error, RadixKVError) or http_status_of(error) == 500:  # its text may contain data of others
        return "internal error; the server's log has the cause", None
    message = str(error)
    field, separator, _ = message.partition(": ")
    if not separator or " " in field.replace(", ", ""):
        return message, None
    name = renamed_fields(field, names)
    return name + message[len(field) :], name
