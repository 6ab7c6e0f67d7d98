"""The exceptions of the clients.

    grpc.RpcError
    └── ServiceError                 a call failed
        ├── InvalidArgument          the request is wrong, and would be wrong again
        │   └── OutOfRange           the service has restarted since this event number, or the events were dropped
        ├── FailedPrecondition       the request is valid, but the configuration or the K/V format forbids it
        ├── NotFound                 the adapter, lease, public prefix or tokenizer does not exist
        ├── Unimplemented            the service does not offer this call, or its configuration leaves it out
        ├── Unauthenticated          the call has no valid credential
        ├── PermissionDenied         the credential does not allow this call, or this tenant
        ├── ResourceExhausted        the service or the tenant is at a limit; retry after `retry_after_s`
        │   └── MessageTooLarge      a request or a response exceeds a limit in bytes; a retry does not help
        ├── Unavailable              the service can't take or finish the call now; retry, or use another server
        │   └── ConnectError         no connection was made, so the call did not reach the service
        ├── DeadlineExceeded         the call was not answered within its deadline
        ├── Cancelled                the call was cancelled
        ├── DataLoss                 an event subscriber fell behind; subscribe again from 0
        └── InternalError            the service failed; its log has the cause

Each class maps to one gRPC status, which `code()` returns. `MessageTooLarge` and `ConnectError` share the status of
their base class, and a status without a class of its own is raised as a plain `ServiceError`. The text of an exception
is one line that says what happened and what to do. Each is a `grpc.RpcError`, a `grpc.aio.AioRpcError` and a
`grpc.Call`, so code that is written for gRPC keeps working: `code()`, `details()`, `trailing_metadata()`.

    try:
        answer = client.prefill(token_ids, timeout_s=30)
    except ResourceExhausted as error:
        time.sleep(error.retry_after_s or 1)
    except Unavailable:
        ...  # retry on another replica

Other exceptions are not in this tree: arguments that the client itself rejects raise a `ValueError` or a `TypeError`,
unreadable files an `OSError`, and text without the extra `text` a `MissingPackage`. A task that is cancelled while it
awaits an `AsyncClient` gets `asyncio.CancelledError`.
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

# Keys of the trailing metadata that the server writes.
RETRY_AFTER_KEY = "retry-after-ms"
CAUSE_KEY = "radixkv-cause"


class ServiceError(grpc.aio.AioRpcError):
    """A call failed. This is the base class of the others.

    Args:
        message: one line that says what happened and what to do.
        code: the gRPC status; None for the status of the class.
        details: the details that the service or gRPC sent; None for `message`.
        initial_metadata, trailing_metadata: the metadata of the call.
        debug_error_string: gRPC's own report.
        address: the address that was called.
        call: name of the call in the .proto files, such as `Prefill`.
        timeout_s: deadline of the call in seconds; None if it had none.

    Attributes:
        address, call, timeout_s: see above.
        retry_after_s: seconds to wait before a retry, if the service named a time; else None.
        cause: `radixkv-cause` of the trailing metadata, such as `kv_source`; None if the service sent none.
    """

    status = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        code: grpc.StatusCode | None = None,
        *,
        details: str | None = None,
        initial_metadata: Any = (),
        trailing_metadata: Any = (),
        debug_error_string: str | None = "",
        address: str = "",
        call: str = "",
        timeout_s: float | None = None,
    ) -> None:
        details = message if details is None else details
        super().__init__(code or self.status, initial_metadata, trailing_metadata, details, debug_error_string)
        self.args = (message,)
        self.address = address
        self.call = call
        self.timeout_s = timeout_s
        trailing = {str(key): str(value) for key, value in trailing_metadata or ()}
        milliseconds = trailing.get(RETRY_AFTER_KEY, "")
        self.retry_after_s = int(milliseconds) / 1000 if milliseconds.isdecimal() else None
        self.cause = trailing.get(CAUSE_KEY)

    def __str__(self) -> str:
        message = str(self.args[0])
        return message if self.retry_after_s is None else f"{message}; try again in {self.retry_after_s:g} s"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.args[0]!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The entries of gRPC's own metadata type can't be pickled, unlike tuples.
        picklable_metadata = {
            name: tuple((key, value) for key, value in self.__dict__[name] or ())
            for name in ("_initial_metadata", "_trailing_metadata")
        }
        return type(self), self.args, {**self.__dict__, **picklable_metadata}


# Code for the synchronous API checks `isinstance(error, grpc.Call)` before it reads a status. gRPC's own exceptions
# pass this check as well, although they implement no more methods of `grpc.Call` than `ServiceError` does.
grpc.Call.register(ServiceError)  # type: ignore[attr-defined]  # the stubs don't say that it is an ABC


class InvalidArgument(ServiceError):
    """The request is wrong; a retry fails too. The text names the field, the expected value and the received one."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class OutOfRange(InvalidArgument):
    """The event number is unknown: the service has restarted since, or the events were dropped."""

    status = grpc.StatusCode.OUT_OF_RANGE


class FailedPrecondition(ServiceError):
    """The request is valid, but the tenant's `ceiling_tokens`, the configuration or the K/V format rules it out."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class NotFound(ServiceError):
    """The adapter, lease or public prefix does not exist, or the model has no tokenizer."""

    status = grpc.StatusCode.NOT_FOUND


class Unimplemented(ServiceError):
    """The service does not offer this call, or its configuration leaves out what the request needs."""

    status = grpc.StatusCode.UNIMPLEMENTED


class Unauthenticated(ServiceError):
    """The call has no valid credential: no token or certificate, or one that the service does not know."""

    status = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(ServiceError):
    """The credential does not allow this call, or does not allow it for this tenant."""

    status = grpc.StatusCode.PERMISSION_DENIED


class ResourceExhausted(ServiceError):
    """The service is full, or the tenant is at a limit; retry after `retry_after_s` seconds, if that is not None."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class MessageTooLarge(ResourceExhausted):
    """A request or a response exceeds a limit in bytes, which the text names. A retry does not help."""


class Unavailable(ServiceError):
    """The service can't take the call now, or stopped during the call. Retry, or use another server."""

    status = grpc.StatusCode.UNAVAILABLE


class ConnectError(Unavailable):
    """No connection was made: nothing listens, the host is unknown, or TLS failed. Nothing was sent."""


class DeadlineExceeded(ServiceError):
    """The call was not answered within `timeout_s`, or within the service's own deadline if `timeout_s` is None."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(ServiceError):
    """The call was cancelled by the service, or by this program, which cancelled it or closed the client."""

    status = grpc.StatusCode.CANCELLED


class DataLoss(ServiceError):
    """An event subscriber fell behind, and the next batch was dropped: subscribe again from 0."""

    status = grpc.StatusCode.DATA_LOSS


class InternalError(ServiceError):
    """The service failed. Its log has the cause."""

    status = grpc.StatusCode.INTERNAL
