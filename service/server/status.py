"""Answers exceptions with gRPC statuses, by one table."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc
import grpc.aio

from radixkv.errors import (
    BeyondCeiling,
    CapacityError,
    ConfigError,
    DeadlineExceeded,
    Draining,
    EventsLost,
    InvalidCredential,
    InvariantViolation,
    KVFormatDiffers,
    KVSourceError,
    LifecycleError,
    NoReplica,
    NotPermitted,
    RadixKVError,
    RequestError,
    StepFailed,
    StepHangs,
    StoreError,
    SwitchedOff,
    UnknownAdapter,
    UnknownLease,
    UnknownPublicPrefix,
    UnknownSequence,
    UnknownTokenizer,
)
from radixkv.service.server.intake.entry import Entry
from radixkv.service.server.unfinished_calls import Context, when_over

# A class that is not here has the status of its nearest ancestor.
STATUS: dict[type[RadixKVError], grpc.StatusCode] = {
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    BeyondCeiling: grpc.StatusCode.FAILED_PRECONDITION,  # the request is valid, and trying again does not help
    InvalidCredential: grpc.StatusCode.UNAUTHENTICATED,
    NotPermitted: grpc.StatusCode.PERMISSION_DENIED,
    UnknownAdapter: grpc.StatusCode.NOT_FOUND,
    UnknownLease: grpc.StatusCode.NOT_FOUND,
    UnknownPublicPrefix: grpc.StatusCode.NOT_FOUND,
    UnknownSequence: grpc.StatusCode.OUT_OF_RANGE,
    UnknownTokenizer: grpc.StatusCode.NOT_FOUND,
    SwitchedOff: grpc.StatusCode.UNIMPLEMENTED,
    CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NoReplica: grpc.StatusCode.UNAVAILABLE,
    LifecycleError: grpc.StatusCode.INTERNAL,  # the service itself misused something
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Draining: grpc.StatusCode.UNAVAILABLE,
    KVSourceError: grpc.StatusCode.UNAVAILABLE,
    KVFormatDiffers: grpc.StatusCode.FAILED_PRECONDITION,
    EventsLost: grpc.StatusCode.DATA_LOSS,
    StepHangs: grpc.StatusCode.UNAVAILABLE,
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    StepFailed: grpc.StatusCode.INTERNAL,
    StoreError: grpc.StatusCode.UNAVAILABLE,  # a request never fails of one
    InvariantViolation: grpc.StatusCode.INTERNAL,
}

# Streams that end with the service and not before: a drain ends them, and does not wait for callers that read nothing.
ENDLESS = (
    "/grpc.health.v1.Health/Watch",
    "/radixkv.v1.EventService/Subscribe",
    "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents",
)

RETRY_AFTER = "retry-after-ms"
CAUSE = "radixkv-cause"

# `ServicerContext.code` of grpc.aio returns the number, against its annotation.
_UNIMPLEMENTED = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNIMPLEMENTED.value[0])

_logger = logging.getLogger(__name__)

Handler = Callable[[Any, Context], Awaitable[Any]]


def status_of(error: BaseException) -> grpc.StatusCode:
    """Return the gRPC status of an exception: its own line of the table, or that of its nearest ancestor.

    An exception that radixkv does not raise on purpose is INTERNAL.
    """
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    return grpc.StatusCode.INTERNAL


def trailing_metadata_of(error: RadixKVError) -> tuple[tuple[str, str], ...]:
    """Return what goes with the status of an error.

    `retry-after-ms`, in whole milliseconds, rounded up, if the service is full now; `radixkv-cause` if there is one.
    """
    metadata: tuple[tuple[str, str], ...] = ()
    if isinstance(error, CapacityError):
        metadata = ((RETRY_AFTER, str(max(0, math.ceil(error.retry_after_s * 1000)))),)
    return metadata if error.cause is None else (*metadata, (CAUSE, error.cause.value))


class StatusInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Answers exceptions of handlers that take one request with the statuses of the table.

    A request that does not parse is INVALID_ARGUMENT. An exception that radixkv does not raise on purpose is INTERNAL
    without its message, which may contain data of other callers; the log has it. Other requests go on.

    gRPC is told that requests are streams: then handlers read them, and can refuse a call whose message does not come.
    On the wire both are the same.

    Args:
        entry: lets calls begin, and receives their messages.
    """

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}  # by method

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Wrap the handler of one call. gRPC calls this for each call, so wrapped handlers are kept."""
        method = handler_call_details.method
        if method in self._wrapped:
            return self._wrapped[method]
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler  # unknown names are not kept, because callers may invent any number of them
        self._wrapped[method] = _wrapped(handler, method, self._entry)
        return self._wrapped[method]


def _wrapped(handler: grpc.RpcMethodHandler[Any, Any], method: str, entry: Entry) -> grpc.RpcMethodHandler[Any, Any]:
    if handler.unary_unary is not None:
        return grpc.stream_unary_rpc_method_handler(_answering(handler, method, entry))
    if handler.unary_stream is None:
        return grpc.stream_stream_rpc_method_handler(
            _conversing(handler, method, entry), response_serializer=handler.response_serializer
        )
    wrap = _streaming if inspect.isasyncgenfunction(handler.unary_stream) else _writing
    return grpc.stream_stream_rpc_method_handler(
        wrap(handler, method, entry), response_serializer=_written_once(handler.response_serializer)
    )


def _written_once(serialize: Any) -> Callable[[Any], bytes]:
    """Return what writes the parts of a streamed answer; a large one may come as the bytes that its handler wrote."""
    return lambda part: part if isinstance(part, bytes) else serialize(part)


def _answering(handler: grpc.RpcMethodHandler[Any, Any], method: str, entry: Entry) -> Any:
    call: Any = handler.unary_unary
    parse: Any = handler.request_deserializer
    serialize: Any = handler.response_serializer

    async def answer(_: object, context: Context) -> Any:
        try:
            received = await entry.receive(method, parse, context)
            response = await call(received.message, context)
            return entry.send(context, received, serialize(response))
        except Exception as error:  # noqa: BLE001 - the table has a status for every one
            await _refuse(error, context, method)

    return answer


def _streaming(handler: grpc.RpcMethodHandler[Any, Any], method: str, entry: Entry) -> Any:
    call: Any = handler.unary_stream
    parse: Any = handler.request_deserializer

    async def stream(_: object, context: Context) -> Any:
        try:
            received = await entry.receive(method, parse, context, is_endless=method in ENDLESS)
            async with contextlib.aclosing(entry.intake.parts(context, call(received.message, context))) as parts:
                async for part in parts:
                    yield part
        except Exception as error:  # noqa: BLE001 - the table has a status for every one
            await _refuse(error, context, method)

    return stream


def _writing(handler: grpc.RpcMethodHandler[Any, Any], method: str, entry: Entry) -> Any:
    """Wrap a handler that writes its answers itself, such as that of health checks."""
    call: Any = handler.unary_stream
    parse: Any = handler.request_deserializer

    async def write(_: object, context: Context) -> None:
        try:
            received = await entry.receive(method, parse, context, is_endless=True)
            await call(received.message, context)
        except Exception as error:  # noqa: BLE001 - the table has a status for every one
            await _refuse(error, context, method)

    return write


def _conversing(handler: grpc.RpcMethodHandler[Any, Any], method: str, entry: Entry) -> Any:
    """Wrap a handler that reads a stream, such as that of reflection."""
    call: Any = handler.stream_stream
    parse: Any = handler.request_deserializer

    async def converse(_: object, context: Context) -> Any:
        try:
            async with (
                contextlib.aclosing(entry.receive_all(method, parse, context)) as requests,
                contextlib.aclosing(entry.intake.parts(context, call(requests, context))) as parts,
            ):
                async for part in parts:
                    yield part
        except Exception as error:  # noqa: BLE001 - the table has a status for every one
            await _refuse(error, context, method)

    return converse


async def _refuse(error: Exception, context: Context, method: str) -> None:
    """End a call with the status of an exception."""
    if isinstance(error, grpc.aio.AbortError):
        raise error  # the handler has answered
    if isinstance(error, NotImplementedError) and context.code() in _UNIMPLEMENTED:
        # a method of the generated base class that the servicer does not override
        await _abort(context, grpc.StatusCode.UNIMPLEMENTED, f"{method}: this server does not implement the method")
    elif not isinstance(error, RadixKVError):
        _logger.error("%s raised what no handler should", method, exc_info=error)
        await _abort(context, grpc.StatusCode.INTERNAL, "internal error; the server's log has the cause")
    else:
        code = status_of(error)
        if code is grpc.StatusCode.INTERNAL:
            _logger.error("%s failed", method, exc_info=error)
        await _abort(context, code, str(error), trailing_metadata_of(error))


async def _abort(
    context: Context, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, str], ...] = ()
) -> None:
    """End a call. gRPC's call keeps the exception that ends it: without tracebacks, no frame keeps the call in turn."""
    try:
        await context.abort(code, details, trailing_metadata)
    except BaseException as ending:
        when_over(context, partial(_forget_tracebacks, ending))
        raise


def _forget_tracebacks(error: BaseException, _: Context) -> None:
    error.__traceback__ = None
    if error.__context__ is not None:
        error.__context__.__traceback__ = None
