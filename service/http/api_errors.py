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


def _message_of(error: BaseException) -> str:
    """Return what a client may read about an exception. The text of an unexpected one may contain data of others."""
    return str(error) if _may_be_read(error) else "internal error; the server's log has the cause"


def retry_headers_of(error: BaseException) -> dict[str, str]:
    """Return the headers `retry-after` (in seconds) and `retry-after-ms`; none unless the server is at a limit."""
    if not isinstance(error, CapacityError):
        return {}
    seconds = max(0.0, error.retry_after_s)
    return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}


def _field_of(error: BaseException) -> str | None:
    """Return the field that an exception is about: the beginning of its message; None if it is about no field."""
    name, separator, _ = str(error).partition(": ")
    is_field = bool(separator) and _may_be_read(error) and " " not in name.replace(", ", "")
    return name if is_field else None


def message_and_field(error: BaseException, names: Mapping[str, str]) -> tuple[str, str | None]:
    """Return what a client may read about an exception, and the field that it is about, named as in the API.

    Args:
        error: the exception.
        names: the names of fields in the API, by their names in messages of this server.
    """
    message, field = _message_of(error), _field_of(error)
    if field is None:
        return message, None
    name = renamed_fields(field, names)
    return name + message[len(field) :], name


def _may_be_read(error: BaseException) -> bool:
    return isinstance(error, RadixKVError) and http_status_of(error) != 500
