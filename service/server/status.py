"""Answers exceptions with gRPC statuses, by one table."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from radixkv.errors import (
    BeyondCeiling,
    CapacityError,
    ConfigError,
    DeadlineExceeded,
    Draining,
    EventsLost,
    InvalidRequest,
    InvariantViolation,
    LifecycleError,
    RadixKVError,
    RequestError,
    StepFailed,
    StepHangs,
    UnknownAdapter,
    UnknownLease,
    UnknownSequence,
    UnknownTokenizer,
)
from radixkv.service.server.unfinished_calls import Context, UnfinishedCalls

# A class that is not here has the status of its nearest ancestor.
STATUS: dict[type[RadixKVError], grpc.StatusCode] = {
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    BeyondCeiling: grpc.StatusCode.FAILED_PRECONDITION,  # the request is valid, and trying again does not help
    UnknownAdapter: grpc.StatusCode.NOT_FOUND,
    UnknownLease: grpc.StatusCode.NOT_FOUND,
    UnknownSequence: grpc.StatusCode.OUT_OF_RANGE,
    UnknownTokenizer: grpc.StatusCode.NOT_FOUND,
    CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    LifecycleError: grpc.StatusCode.INTERNAL,  # the service itself misused something
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Draining: grpc.StatusCode.UNAVAILABLE,
    EventsLost: grpc.StatusCode.DATA_LOSS,
    StepHangs: grpc.StatusCode.UNAVAILABLE,
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    StepFailed: grpc.StatusCode.INTERNAL,
    InvariantViolation: grpc.StatusCode.INTERNAL,
}

# Streams that end with the service and not before: a drain ends them, and does not wait for callers that read nothing.
ENDLESS = ("/radixkv.v1.EventService/Subscribe", "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents")

RETRY_AFTER = "retry-after-ms"

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
    """Return `retry-after-ms` in whole milliseconds, rounded up, if the service is full now; otherwise nothing."""
    if isinstance(error, CapacityError):
        return ((RETRY_AFTER, str(max(0, math.ceil(error.retry_after_s * 1000)))),)
    return ()


class StatusInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Answers exceptions of handlers that take one request with the statuses of the table.

    A request that does not parse is INVALID_ARGUMENT. An exception that radixkv does not raise on purpose is INTERNAL
    without its message, which may contain data of other callers; the log has it. Other requests go on.

    Args:
        unfinished: notes every such call that ends by itself.
    """

    def __init__(self, unfinished: UnfinishedCalls) -> None:
        self._unfinished = unfinished
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
        self._wrapped[method] = _wrapped(handler, method, self._unfinished)
        return self._wrapped[method]


def _wrapped(
    handler: grpc.RpcMethodHandler[Any, Any], method: str, unfinished: UnfinishedCalls
) -> grpc.RpcMethodHandler[Any, Any]:
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(
            _answering(handler, method, unfinished), response_serializer=handler.response_serializer
        )
    if inspect.isasyncgenfunction(handler.unary_stream):
        return grpc.unary_stream_rpc_method_handler(
            _streaming(handler, method, unfinished), response_serializer=handler.response_serializer
        )
    return handler


def _answering(handler: grpc.RpcMethodHandler[Any, Any], method: str, unfinished: UnfinishedCalls) -> Any:
    call: Any = handler.unary_unary
    parse: Any = handler.request_deserializer

    async def answer(data: bytes, context: Context) -> Any:
        unfinished.add(context)
        try:
            return await call(_parsed(parse, data), context)
        except Exception as error:  # noqa: BLE001 - the table has a status for every one
            await _refuse(error, context, method)

    return answer


def _streaming(handler: grpc.RpcMethodHandler[Any, Any], method: str, unfinished: UnfinishedCalls) -> Any:
    call: Any = handler.unary_stream
    parse: Any = handler.request_deserializer

    async def stream(data: bytes, context: Context) -> Any:
        if method not in ENDLESS:
            unfinished.add(context)
        try:
            async with contextlib.aclosing(call(_parsed(parse, data), context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:  # noqa: BLE001 - the table has a status for every one
            await _refuse(error, context, method)

    return stream


async def _refuse(error: Exception, context: Context, method: str) -> None:
    """End a call with the status of an exception."""
    if isinstance(error, grpc.aio.AbortError):
        raise error  # the handler has answered
    if not isinstance(error, RadixKVError):
        _logger.error("%s raised what no handler should", method, exc_info=error)
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has the cause")
    else:
        code = status_of(error)
        if code is grpc.StatusCode.INTERNAL:
            _logger.error("%s failed", method, exc_info=error)
        await context.abort(code, str(error), trailing_metadata_of(error))


def _parsed(parse: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return parse(data)
    except DecodeError as error:
        raise InvalidRequest(f"request: expected a protobuf message, got {len(data)} other bytes") from error
