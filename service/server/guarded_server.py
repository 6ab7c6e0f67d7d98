"""Adds services to a gRPC server so that every call is authorized, received within limits, and answered.

call ─▶ authorize ─▶ count ─▶ receive, parse, bind the tenant ─▶ servicer ─▶ serialize, count ─▶ gRPC
        ╰── Authorizer ──╯    ╰────────── Receiver ─────────╯               ╰── Receiver ──╯
        any exception ─▶ the gRPC status that `status.py` maps it to
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from radixkv.errors import RadixKVError
from radixkv.service.server.auth.authorizer import Authorizer
from radixkv.service.server.auth.revocation import Revocation
from radixkv.service.server.calls import Context, add_done_callback
from radixkv.service.server.receive.receiver import InFlightCall, Parse, Receiver
from radixkv.service.server.status import status_of, trailing_metadata_of

if TYPE_CHECKING:  # generic in the stubs of gRPC only
    Handler = grpc.RpcMethodHandler[Any, Any]
    GenericHandler = grpc.GenericRpcHandler[Any, Any]
CountRefusal = Callable[[RadixKVError], None]

# Methods whose servicers never end a stream while the service runs. A drain does not wait for these streams.
_ENDLESS_METHODS = (
    "/grpc.health.v1.Health/Watch",
    "/radixkv.v1.EventService/Subscribe",
    "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents",
)

# `ServicerContext.code` of grpc.aio returns the number, contrary to its annotation.
_UNIMPLEMENTED = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNIMPLEMENTED.value[0])

_logger = logging.getLogger(__name__)


class GuardedServer:
    """Registers services with a gRPC server. Pass it to the generated functions `add_...Servicer_to_server`.

    Handlers are registered with gRPC as if their requests were streams, which is the same on the wire. So the handler
    reads the request itself, and can refuse a call before its request is received.

    Args:
        server: the gRPC server.
        authorizer: decides which calls a caller may make, before their requests are received.
        receiver: receives requests and accounts for responses.
        count_refusal: is called with the exception of each call that `authorizer` or `receiver` refuses.
    """

    def __init__(
        self,
        server: grpc.aio.Server,
        authorizer: Authorizer,
        receiver: Receiver,
        count_refusal: CountRefusal | None = None,
    ) -> None:
        self._server = server
        self._authorizer = authorizer
        self._receiver = receiver
        self._count_refusal = count_refusal

    def add_generic_rpc_handlers(self, handlers: Sequence[GenericHandler]) -> None:
        """Register handlers, as `grpc.aio.Server.add_generic_rpc_handlers` does."""
        self._server.add_generic_rpc_handlers([_GuardedHandlers(each, self._guard) for each in handlers])

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Register the methods of a service, as generated code does."""
        guarded = {name: self._guard(f"/{service}/{name}", handler) for name, handler in handlers.items()}
        self._server.add_registered_method_handlers(service, guarded)  # type: ignore[attr-defined]  # not in its stubs

    def add_service(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Register the methods of a service that has no generated code, as generated code would.

        Args:
            service: the full name of the service, such as `grpc.health.v1.Health`.
            handlers: the handlers, by the names of their methods.
        """
        self.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, dict(handlers)),))
        self.add_registered_method_handlers(service, handlers)

    def _guard(self, method: str, handler: Handler) -> Handler:
        """Wrap the handler of a method."""
        if handler.unary_unary is not None:
            return grpc.stream_unary_rpc_method_handler(self._wrap_unary(method, handler))
        if handler.unary_stream is None:
            return grpc.stream_stream_rpc_method_handler(
                self._wrap_bidirectional(method, handler), response_serializer=handler.response_serializer
            )
        return grpc.stream_stream_rpc_method_handler(
            self._wrap_server_streaming(method, handler),
            response_serializer=partial(_serialize, handler.response_serializer),
        )

    def _wrap_unary(self, method: str, handler: Handler) -> Any:
        """Wrap the handler of a method with one request and one response."""
        servicer: Any = handler.unary_unary
        parse: Any = handler.request_deserializer
        serialize: Any = handler.response_serializer

        async def answer(_: object, context: Context) -> Any:
            try:
                call, request = await self._receive(method, parse, context)
                return self._note_response(call, serialize(await servicer(request, context)))
            except Exception as error:  # noqa: BLE001 - every exception becomes a status
                await _abort_with(error, context, method)

        return answer

    def _wrap_server_streaming(self, method: str, handler: Handler) -> Any:
        """Wrap the handler of a method with one request and a stream of responses."""
        servicer: Any = handler.unary_stream
        parse: Any = handler.request_deserializer

        async def stream(_: object, context: Context) -> Any:
            try:
                call, request = await self._receive(method, parse, context)
                async with (
                    self._revocation(call, request) as revocation,
                    contextlib.aclosing(self._receiver.note_responses(call, servicer(request, context))) as responses,
                ):
                    async for response in responses:
                        revocation.begin_write()
                        yield response
                        revocation.end_write()
            except Exception as error:  # noqa: BLE001 - every exception becomes a status
                await _abort_with(error, context, method)

        return stream

    def _wrap_bidirectional(self, method: str, handler: Handler) -> Any:
        """Wrap the handler of a method that reads a stream of requests, such as reflection."""
        servicer: Any = handler.stream_stream
        parse: Any = handler.request_deserializer

        async def converse(_: object, context: Context) -> Any:
            try:
                call = self._begin(method, context, is_endless=True)
                async with (
                    self._revocation(call) as revocation,
                    contextlib.aclosing(self._receive_all(call, parse)) as requests,
                    contextlib.aclosing(self._receiver.note_responses(call, servicer(requests, context))) as responses,
                ):
                    async for response in responses:
                        revocation.begin_write()
                        yield response
                        revocation.end_write()
            except Exception as error:  # noqa: BLE001 - every exception becomes a status
                await _abort_with(error, context, method)

        return converse

    def _revocation(self, call: InFlightCall, request: Any = None) -> Revocation:
        """Return the context in which a stream runs as long as its caller may make the call."""
        identity = call.authorization.identity
        if identity is None or identity.is_anyone:
            return Revocation(None)

        def require_authorized() -> None:
            try:
                self._authorizer.require_still_authorized(call.authorization, call.context, request)
            except RadixKVError as error:
                self._count_refused(error)
                raise

        return Revocation(require_authorized)

    def _begin(self, method: str, context: Context, *, is_endless: bool) -> InFlightCall:
        """Authorize and count a call."""
        try:
            authorization = self._authorizer.authorize(method, context)
            return self._receiver.begin(context, authorization, is_endless=is_endless)
        except RadixKVError as error:
            self._count_refused(error)
            raise

    async def _receive(self, method: str, parse: Parse, context: Context) -> tuple[InFlightCall, Any]:
        """Authorize and count a call, and receive its request."""
        call = self._begin(method, context, is_endless=method in _ENDLESS_METHODS)
        try:
            return call, await self._receiver.receive(call, parse)
        except RadixKVError as error:
            self._count_refused(error)
            raise

    async def _receive_all(self, call: InFlightCall, parse: Parse) -> AsyncGenerator[Any, None]:
        try:
            async with contextlib.aclosing(self._receiver.receive_all(call, parse)) as requests:
                async for request in requests:
                    yield request
        except RadixKVError as error:
            self._count_refused(error)
            raise

    def _note_response(self, call: InFlightCall, response: bytes) -> bytes:
        try:
            return self._receiver.note_response(call, response)
        except RadixKVError as error:
            self._count_refused(error)
            raise

    def _count_refused(self, refusal: RadixKVError) -> None:
        if self._count_refusal is not None:
            self._count_refusal(refusal)


class _GuardedHandlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """Wraps the handlers that another generic handler returns."""

    def __init__(self, handlers: GenericHandler, guard: Callable[[str, Handler], Handler]) -> None:
        self._handlers = handlers
        self._guard = guard
        self._guarded: dict[str, Handler] = {}  # by method

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Return the wrapped handler of a method; None if there is none."""
        method = handler_call_details.method
        guarded = self._guarded.get(method)
        if guarded is not None:
            return guarded
        handler = self._handlers.service(handler_call_details)
        if handler is None:
            return None  # unknown names are not cached, because callers can invent any number of them
        self._guarded[method] = self._guard(method, handler)
        return self._guarded[method]


def _serialize(serialize: Any, response: Any) -> bytes:
    """Serialize a message of a streamed response, unless the servicer has serialized it, as it does with large ones."""
    serialized: bytes = response if isinstance(response, bytes) else serialize(response)
    return serialized


async def _abort_with(error: Exception, context: Context, method: str) -> None:
    """End a call with the status of an exception.

    An exception that radixkv does not raise on purpose becomes INTERNAL without its message, which may contain data of
    other callers; the log has it.
    """
    if isinstance(error, grpc.aio.AbortError):
        raise error  # the servicer has set a status
    if isinstance(error, NotImplementedError) and context.code() in _UNIMPLEMENTED:
        # a method of the generated base class that the servicer does not override
        await _abort(context, grpc.StatusCode.UNIMPLEMENTED, f"{method}: this server does not implement the method")
    elif not isinstance(error, RadixKVError):
        _logger.error("%s raised an unexpected exception", method, exc_info=error)
        await _abort(context, grpc.StatusCode.INTERNAL, "internal error; the server's log has the cause")
    else:
        code = status_of(error)
        if code is grpc.StatusCode.INTERNAL:
            _logger.error("%s failed", method, exc_info=error)
        await _abort(context, code, str(error), trailing_metadata_of(error))


async def _abort(
    context: Context, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, str], ...] = ()
) -> None:
    """End a call. gRPC keeps the exception that ends it, so the tracebacks, which refer to the call, are cleared."""
    try:
        await context.abort(code, details, trailing_metadata)
    except BaseException as abort_error:
        add_done_callback(partial(_clear_tracebacks, abort_error))
        raise


def _clear_tracebacks(error: BaseException) -> None:
    error.__traceback__ = None
    if error.__context__ is not None:
        error.__context__.__traceback__ = None
