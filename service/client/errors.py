"""The exceptions of the clients.

    grpc.RpcError
    └── ServiceError                 a call failed
        ├── InvalidArgument          the request is wrong, and would be wrong again
        │   └── OutOfRange           an event number that the service no longer knows, or never gave
        ├── FailedPrecondition       the request is valid, but not with the configuration or the K/V format there
        ├── NotFound                 no such adapter, lease, public prefix or tokenizer
        ├── Unimplemented            the service does not offer this call, or its configuration leaves it out
        ├── Unauthenticated          no credential, or none that the service knows
        ├── PermissionDenied         the credential does not allow this call, or not for this tenant
        ├── ResourceExhausted        the service is full; `retry_after_s` says when to try again
        │   └── MessageTooLarge      a request or an answer exceeds a limit in bytes; trying again does not help
        ├── Unavailable              the service can't take or finish the call now; try again, or elsewhere
        │   └── ConnectError         no connection was made, so the call has not reached the service
        ├── DeadlineExceeded         the call was not answered within its deadline
        ├── Cancelled                the call was cancelled
        ├── DataLoss                 a reader of events fell behind; begin again from 0
        └── InternalError            the service failed; its log has the cause

Each class stands for one gRPC status, and a status without a class of its own is a plain `ServiceError`. The text of
an exception is one line that says what happened and what to do. Each is a `grpc.RpcError`, a `grpc.aio.AioRpcError` and
a `grpc.Call`, so code that is written for gRPC keeps working: `code()`, `details()`, `trailing_metadata()`.

    try:
        answer = client.prefill(token_ids, timeout_s=30)
    except ResourceExhausted as error:
        time.sleep(error.retry_after_s or 1)
    except Unavailable:
        ...  # another replica

Not in this tree: arguments that can't be sent raise a `ValueError` or a `TypeError`, files that can't be read an
`OSError`, and a task that is cancelled while it awaits an `AsyncClient` gets its `asyncio.CancelledError`.
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

RETRY_AFTER = "retry-after-ms"
CAUSE = "radixkv-cause"


class ServiceError(grpc.aio.AioRpcError):
    """A call failed; the root of this tree.

    Args:
        message: one line: what happened and what to do.
        code: the gRPC status; None for that of the class.
        details: what the service or gRPC said.
        initial_metadata, trailing_metadata: of the call.
        debug_error_string: gRPC's own report.
        address: where the call went.
        call: its name in the .proto files, such as `Prefill`.
        timeout_s: its deadline; None without one.

    Attributes:
        address, call, timeout_s: see above.
        retry_after_s: seconds after which to try again, if the service said so; else None.
        cause: `radixkv-cause` of the trailing metadata, such as `kv_source`; None where class and text say enough.
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
        sent = {str(key): str(value) for key, value in trailing_metadata or ()}
        milliseconds = sent.get(RETRY_AFTER, "")
        self.retry_after_s = int(milliseconds) / 1000 if milliseconds.isdecimal() else None
        self.cause = sent.get(CAUSE)

    def __str__(self) -> str:
        message = str(self.args[0])
        return message if self.retry_after_s is None else f"{message}; try again in {self.retry_after_s:g} s"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.args[0]!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # gRPC's own entries of metadata can't be pickled.
        sent = {
            name: tuple((key, value) for key, value in self.__dict__[name] or ())
            for name in ("_initial_metadata", "_trailing_metadata")
        }
        return type(self), self.args, {**self.__dict__, **sent}


# Code for the blocking API asks `isinstance(error, grpc.Call)` before it reads a status. gRPC's own exceptions are such
# calls, and have no more of its methods than these.
grpc.Call.register(ServiceError)  # type: ignore[attr-defined]  # an ABC, which its stubs don't say


class InvalidArgument(ServiceError):
    """The request is wrong, and would be wrong again: the text names the field, what was expected and what came."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class OutOfRange(InvalidArgument):
    """No event batches follow this number: it is of another life of the service, or they are forgotten."""

    status = grpc.StatusCode.OUT_OF_RANGE


class FailedPrecondition(ServiceError):
    """The request is valid, but not with the tenant's ceiling, the configuration or the K/V format there."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class NotFound(ServiceError):
    """No adapter, lease or public prefix of this name is there, or the model has no tokenizer."""

    status = grpc.StatusCode.NOT_FOUND


class Unimplemented(ServiceError):
    """The service does not offer this call, or its configuration leaves out what the request needs."""

    status = grpc.StatusCode.UNIMPLEMENTED


class Unauthenticated(ServiceError):
    """The call has no credential, or none that the service knows."""

    status = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(ServiceError):
    """The credential does not allow this call, or not for this tenant."""

    status = grpc.StatusCode.PERMISSION_DENIED


class ResourceExhausted(ServiceError):
    """The service is full, or a tenant at its limit; `retry_after_s` says when to try again."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class MessageTooLarge(ResourceExhausted):
    """A request or an answer exceeds a limit in bytes, which the text names. Trying again does not help."""


class Unavailable(ServiceError):
    """The service can't take the call now, or ended in the middle of it. Try again, or elsewhere."""

    status = grpc.StatusCode.UNAVAILABLE


class ConnectError(Unavailable):
    """No connection was made: nothing listens, an unknown host, or TLS that fails. Nothing was sent."""


class DeadlineExceeded(ServiceError):
    """The call was not answered within `timeout_s`, or within the service's own deadline if that is None."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(ServiceError):
    """The call was cancelled: by the service, or here, by another thread or by closing the client."""

    status = grpc.StatusCode.CANCELLED


class DataLoss(ServiceError):
    """A reader of events fell behind, and the next batch is forgotten: begin again from 0."""

    status = grpc.StatusCode.DATA_LOSS


class InternalError(ServiceError):
    """The service failed. Its log has the cause."""

    status = grpc.StatusCode.INTERNAL
