"""One request to an HTTP API: who sent it, what it holds in memory, and its response."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from radixkv.errors import DeadlinePassed, InvalidRequest, RadixKVError
from radixkv.service.http.api_errors import http_status_of
from radixkv.service.http.event_stream import EventStream
from radixkv.service.http.sessions import SESSION_HEADERS
from radixkv.service.server.calls import Context
from radixkv.service.server.receive.receiver import InFlightCall, Receiver
from radixkv.service.server.servicers.messages import new_request_id
from radixkv.v1.prefill_pb2 import GenerateRequest

TENANT_HEADER = "radixkv-tenant"
REQUEST_ID_HEADER = "x-request-id"
_ANTHROPIC_REQUEST_ID_HEADER = "request-id"
_ANTHROPIC_VERSION_HEADER = "anthropic-version"  # clients of Anthropic's API send it with each request
_ANTHROPIC_PATH = "/v1/messages"

SendError = Callable[[Mapping[str, Any]], Awaitable[None]]

_logger = logging.getLogger(__name__)


def is_anthropic_request(request: web.BaseRequest) -> bool:
    """Return whether a request uses Anthropic's API and not OpenAI's, which share some paths."""
    return request.path.startswith(_ANTHROPIC_PATH) or _ANTHROPIC_VERSION_HEADER in request.headers


def id_headers(request_id: str) -> dict[str, str]:
    """Return the headers with which each of the APIs returns the id of a request."""
    return {REQUEST_ID_HEADER: request_id, _ANTHROPIC_REQUEST_ID_HEADER: request_id}


class ApiRequest:
    """One request to an HTTP API.

    Args:
        request: the HTTP request.
        call: the same request, for the parts of the server that see gRPC calls.
        in_flight: records the memory that the request is charged for.
        receiver: the receiver of the server.
        count_refusal: is called with the exception of a request that the receiver refuses.
        num_bytes: size of the body.
        send_timeout_s: seconds that the client may leave a response unread.
        error_body: returns the body of a response to a request that failed.

    Attributes:
        call: the argument `call`.
        num_bytes: size of the body.
        request_id: from the header `x-request-id`, or random; after `hold`, that of the held request if it has one.
        held: the request with which `hold` was called; None before.
    """

    def __init__(
        self,
        request: web.BaseRequest,
        call: Context,
        in_flight: InFlightCall,
        receiver: Receiver,
        count_refusal: Callable[[RadixKVError], None],
        num_bytes: int,
        send_timeout_s: float,
        error_body: Callable[[BaseException], Mapping[str, Any]],
    ) -> None:
        self.call = call
        self.num_bytes = num_bytes
        self.held: GenerateRequest | None = None
        self.request_id = self._header(REQUEST_ID_HEADER) or new_request_id()
        self._error_body = error_body
        self._request = request
        self._in_flight = in_flight
        self._receiver = receiver
        self._count_refusal = count_refusal
        self._send_timeout_s = send_timeout_s
        self._events: EventStream | None = None
        self._send_error: SendError | None = None

    def hold(self, generate: GenerateRequest) -> str:
        """Set the tenant, the session and the id of a request, and charge its bytes to the tenant. Returns the tenant.

        The credential determines the tenant; a credential for several tenants requires the header `radixkv-tenant`.

        Raises:
            InvalidRequest: the request id contains characters that are not printable.
            NotPermitted: the caller may not act for the tenant.
            QueueFull: the requests of the tenant hold too many bytes.
        """
        generate.prefill.tenant = self._header(TENANT_HEADER)
        if not generate.prefill.session_id:
            sessions = map(self._header, SESSION_HEADERS)
            generate.prefill.session_id = next(filter(None, sessions), "")
        if not generate.prefill.request_id:
            generate.prefill.request_id = self.request_id
        if not generate.prefill.request_id.isprintable():  # it becomes a header of the response
            raise InvalidRequest("request_id: expected printable characters, got others among them")
        self.request_id = generate.prefill.request_id
        try:
            self._receiver.hold(self._in_flight, generate, self.num_bytes)
        except RadixKVError as error:
            self._count_refusal(error)
            raise
        self.held = generate
        return str(generate.prefill.tenant)

    def _header(self, name: str) -> str:
        """Return a header of the request; empty if it is absent."""
        return str(next((value for each, value in self.call.invocation_metadata() or () if each == name), ""))

    def json(self, body: Mapping[str, Any]) -> web.Response:
        """Return a response with a JSON object."""
        return web.json_response(body=orjson.dumps(body), headers=id_headers(self.request_id))

    def events(self, send_error: SendError | None = None) -> EventStream:
        """Return a response with server-sent events.

        Args:
            send_error: sends the body of an error as an event; None to send it as an event without a name.
        """
        self._events = EventStream(self._request, id_headers(self.request_id), self._send_timeout_s)
        self._send_error = send_error or self._events.send
        return self._events

    @property
    def is_streaming(self) -> bool:
        """Whether a stream has begun, so that an error can only be its last event."""
        return self._events is not None and self._events.has_begun

    async def end_stream(self, error: Exception) -> web.StreamResponse:
        """Send the error of a failed request as the last event of its stream. Return the response."""
        assert self._events is not None, "the stream has begun"
        assert self._send_error is not None
        if not isinstance(error, ConnectionError):  # otherwise the client has disconnected
            if http_status_of(error) == 500:
                _logger.error("%s failed", self._request.path, exc_info=error)
            with contextlib.suppress(ConnectionError, DeadlinePassed):
                await self._send_error(self._error_body(error))
                await self._events.end()
        return self._events.response
