"""The HTTP port of a server: routes, authorization, limits, TLS and draining."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from radixkv.api.limits import Limits
from radixkv.config import ServerConfig
from radixkv.errors import RadixKVError
from radixkv.service.http.anthropic_api import AnthropicApi
from radixkv.service.http.anthropic_api import error_object as anthropic_error
from radixkv.service.http.api_errors import http_status_of, retry_headers_of
from radixkv.service.http.api_request import ApiRequest, id_headers, is_anthropic_request
from radixkv.service.http.breakpoints import Retain
from radixkv.service.http.completer import Completer
from radixkv.service.http.connections import Connections
from radixkv.service.http.http_call import context_of
from radixkv.service.http.http_connection import HttpConnection, NotHttp
from radixkv.service.http.json_fields import Fields
from radixkv.service.http.models import Models
from radixkv.service.http.openai_api import OpenAIApi
from radixkv.service.http.openai_responses import error_object as openai_error
from radixkv.service.http.prompts import PromptEncoder
from radixkv.service.http.responses_api import ResponsesApi
from radixkv.service.server.auth.authorizer import Authorizer
from radixkv.service.server.auth.revocation import Revocation
from radixkv.service.server.auth.tls import Tls
from radixkv.service.server.guarded_server import CountRefusal
from radixkv.service.server.host_check import HostCheck
from radixkv.service.server.listen_address import bind_error, host_port
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.server.open_files import max_connections
from radixkv.service.server.page.page import Page
from radixkv.service.server.receive.grpc_options import max_message_bytes
from radixkv.service.server.receive.receiver import InFlightCall, Receiver
from radixkv.service.server.servicers.messages import new_request_id
from radixkv.service.server.servicers.prefill import PrefillServicer

Answer = Callable[[ApiRequest, Fields], Awaitable[web.StreamResponse]]

# The gRPC methods whose authorization rules apply to requests for completions, for descriptions of the model, and for
# the state that the page draws.
_GENERATE = "/radixkv.v1.PrefillService/Generate"
_DESCRIBE = "/radixkv.v1.ModelService/GetTokenizer"
_READ_STATE = "/radixkv.v1.CacheService/ListAdapters"
_BACKLOG = 4096  # the maximum that Linux allows by default
_MAX_CONNECTING = _BACKLOG  # accepted connections that are being prepared, for example in their TLS handshake
_ACCEPTED_AT_ONCE = 64  # connections that are accepted before other tasks of the event loop continue
# The buffer of the system, per connection; Linux would let it grow to megabytes for an unread response.
_SEND_BUFFER_BYTES = 65_536
_TLS_HANDSHAKE_S = 10.0
_SHUTDOWN_S = 1.0  # for responses that were written to reach their clients, after a drain
_ACCEPT_PAUSE_S = 0.1  # after the system refuses to accept a connection

_logger = logging.getLogger(__name__)


class HttpPort:
    """Serves the APIs of OpenAI and Anthropic over HTTP. Create it inside the event loop that runs it.

        connection ─▶ Connections ─▶ Host, authorize ─▶ receive ─▶ read the fields ─▶ servicer ─▶ response
                                     (Authorizer)       (Receiver)  (OpenAIApi)       (PrefillServicer)

    Args:
        config: where to listen, and limits.
        limits: limits of the engine.
        servicer: generates completions.
        retain: retains a prefix for some time.
        tokenizer: tokenizer of the model.
        authorizer: decides who may call what.
        receiver: receives requests, together with those of the gRPC port.
        tls: TLS of the port; None without a certificate.
        is_healthy: returns whether the engine accepts requests.
        page: the page that draws the state of the engine.
        count_refusal: is called with the exception of each POST request that `authorizer` or `receiver` refuses, or
            whose body is not a JSON object; None to count nothing.

    Attributes:
        address: `HOST:PORT` after `start`.
    """

    def __init__(
        self,
        config: ServerConfig,
        limits: Limits,
        servicer: PrefillServicer,
        retain: Retain,
        tokenizer: ModelTokenizer,
        authorizer: Authorizer,
        receiver: Receiver,
        tls: Tls | None,
        is_healthy: Callable[[], bool],
        page: Page,
        count_refusal: CountRefusal | None = None,
    ) -> None:
        self.address: str | None = None
        self._config = config
        self._authorizer = authorizer
        self._receiver = receiver
        self._tls = tls
        self._is_healthy = is_healthy
        self._page = page
        self._count_refusal = count_refusal
        self._host_check = HostCheck(config)
        self._max_body_bytes = max_message_bytes(config, limits)
        self._encoder = PromptEncoder(tokenizer, config.tool_format, config.reasoning_format)
        completer = Completer(servicer, retain, self._encoder, limits)
        self._openai = OpenAIApi(completer)
        self._responses = ResponsesApi(completer)
        self._anthropic = AnthropicApi(completer)
        self._models = Models(limits)
        self._connections = Connections(max_connections(config), config.receive_timeout_s, config.connection_idle_s)
        self._listeners: list[socket.socket] = []
        self._accept_tasks: list[asyncio.Task[None]] = []
        self._connect_tasks: set[asyncio.Task[None]] = set()
        application = web.Application(middlewares=[self._middleware])
        application.add_routes(
            [
                web.post("/v1/chat/completions", self._post_handler(self._openai.chat_completions)),
                web.post("/v1/completions", self._post_handler(self._openai.completions)),
                web.post("/v1/responses", self._post_handler(self._responses.responses)),
                web.post("/v1/messages", self._post_handler(self._anthropic.messages)),
                web.post("/v1/messages/count_tokens", self._post_handler(self._anthropic.count_tokens)),
                web.get("/v1/models", self._list_models),
                web.get("/v1/models/{model:.+}", self._describe_model),
                web.get("/health", self._health),
                web.get("/", self._show_page),
                web.get("/state.json", self._describe_state),
            ]
        )
        self._runner = web.AppRunner(
            application,
            handle_signals=False,
            handler_cancellation=True,
            shutdown_timeout=_SHUTDOWN_S,
        )

    async def start(self) -> str:
        """Listen.

        Returns:
            `HOST:PORT` with the port that was bound.

        Raises:
            ConfigError: the address cannot be bound.
        """
        host, port = self._config.host, self._config.http_port
        assert port is not None, "the HTTP port is configured"
        await self._runner.setup()
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            for family, _, _, _, address in dict.fromkeys(addresses):
                listener = socket.create_server((str(address[0]), port), family=family, backlog=_BACKLOG)
                listener.setblocking(False)
                port = listener.getsockname()[1]
                self._listeners.append(listener)
        except (OSError, UnicodeError) as error:
            await self.stop()
            raise bind_error("server.http_port", host, port) from error
        self._accept_tasks = [asyncio.create_task(self._accept(each)) for each in self._listeners]
        self.address = host_port(host, port)
        scheme = "http" if self._tls is None else "https"
        _logger.info("the APIs of OpenAI and Anthropic on %s://%s/v1", scheme, self.address)
        return self.address

    async def stop(self) -> None:
        """Close the listening sockets and all connections. Requests that still run are cancelled."""
        for task in (*self._accept_tasks, *self._connect_tasks):
            task.cancel()
        for listener in self._listeners:
            listener.close()
        self._connections.stop_watching()
        await self._runner.cleanup()

    async def _accept(self, listener: socket.socket) -> None:
        """Accept connections until the task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                client_socket, _ = await loop.sock_accept(listener)
                self._admit(client_socket)
                for _ in range(_ACCEPTED_AT_ONCE):  # so that a burst does not overflow the backlog
                    client_socket, _ = listener.accept()
                    self._admit(client_socket)
            except BlockingIOError:
                continue
            except OSError as error:
                _logger.warning("cannot accept an HTTP connection: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)

    def _admit(self, client_socket: socket.socket) -> None:
        """Begin to serve an accepted connection, or close it if too many are open or being opened."""
        if len(self._connect_tasks) >= _MAX_CONNECTING or not self._connections.make_room():
            client_socket.close()
            return
        client_socket.setblocking(False)
        task = asyncio.create_task(self._connect(client_socket))
        self._connect_tasks.add(task)
        task.add_done_callback(self._connect_tasks.discard)

    async def _connect(self, client_socket: socket.socket) -> None:
        """Begin to serve a connection, after its TLS handshake if the port has TLS."""
        loop = asyncio.get_running_loop()
        try:
            client_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            if self._tls is None:
                transport, connection = await loop.connect_accepted_socket(self._new_connection, client_socket)
            else:
                transport, connection = await loop.connect_accepted_socket(
                    self._new_connection, client_socket, ssl=self._tls.https(), ssl_handshake_timeout=_TLS_HANDSHAKE_S
                )
        except OSError:
            client_socket.close()  # the client disconnected, or does not use TLS
            return
        # A write waits until the system has buffered all of it, so that a response counts as unsent until then.
        transport.set_write_buffer_limits(0)
        self._connections.add(connection)

    def _new_connection(self) -> HttpConnection:
        server = self._runner.server
        assert server is not None, "the runner is set up"
        return HttpConnection(server, self._failure_response, self._config.connection_idle_s)

    @web.middleware
    async def _middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer a request in a task of its own, to which the receiver ties what the request holds.

        aiohttp runs all requests of a connection in one task.
        """
        if isinstance(request.protocol, HttpConnection):
            request.protocol.note_request(request.content)
        with self._connections.answering(request.protocol):
            task = asyncio.create_task(self._answer(request, handler))
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:  # the client disconnected
                task.cancel()
                await asyncio.wait([task])
                raise

    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer a request, and turn exceptions into responses.

        No exception leaves the task, because it would be part of a reference cycle with the task that waits.
        """
        try:
            if not self._host_check.allows(request.headers.get("host")):
                raise web.HTTPMisdirectedRequest(
                    reason="the header Host does not name this server; server.metrics_hosts allows more names"
                )
            response = await handler(request)
        except Exception as error:  # noqa: BLE001 - every exception becomes a response
            response = self._failure_response(request, error)
        await self._send(request, response)
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse) -> None:
        """Send a response that was not streamed. The client must read it within `server.send_timeout_s`."""
        if response.prepared:
            return
        try:
            async with asyncio.timeout(self._config.send_timeout_s):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            _logger.warning("closed an HTTP connection that left its response unread")
            if request.transport is not None:
                request.transport.abort()

    def _post_handler(self, answer: Answer) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return a handler that authorizes a request and receives its body."""

        async def handle(request: web.Request) -> web.StreamResponse:
            call = context_of(request, self._max_body_bytes)
            try:
                authorization = self._authorizer.authorize(_GENERATE, call)
                in_flight = self._receiver.begin(call, authorization)
                body = await self._receiver.receive_bytes(in_flight, request.content_length)
                fields = Fields(await self._encoder.parse(body))
            except RadixKVError as error:
                self._count_refused(error)
                raise
            api_request = ApiRequest(
                request,
                call,
                in_flight,
                self._receiver,
                self._count_refused,
                len(body),
                self._config.send_timeout_s,
                lambda error: self._error_body(request, error),
            )
            try:
                async with self._revocation(in_flight, api_request):
                    return await answer(api_request, fields)
            except Exception as error:  # noqa: BLE001 - every exception becomes a response
                if not api_request.is_streaming:
                    return self._failure_response(request, error, api_request.request_id)
                return await api_request.end_stream(error)

        return handle

    def _revocation(self, in_flight: InFlightCall, request: ApiRequest) -> Revocation:
        """Return the context that ends a request when its caller may no longer make it."""
        identity = in_flight.authorization.identity
        if identity is None or identity.is_anyone:
            return Revocation(None)

        def require_authorized() -> None:
            try:
                self._authorizer.require_still_authorized(in_flight.authorization, in_flight.context, request.held)
            except RadixKVError as error:
                self._count_refused(error)
                raise

        return Revocation(require_authorized)

    async def _list_models(self, request: web.Request) -> web.Response:
        self._authorizer.authorize(_DESCRIBE, context_of(request, 0))
        models = self._models
        return web.json_response(
            models.anthropic_list(request.query) if is_anthropic_request(request) else models.openai_list()
        )

    async def _describe_model(self, request: web.Request) -> web.Response:
        self._authorizer.authorize(_DESCRIBE, context_of(request, 0))
        models = self._models
        if request.match_info["model"] != models.name:
            raise web.HTTPNotFound(reason=f"this server serves the model {models.name}")
        return web.json_response(models.anthropic_model() if is_anthropic_request(request) else models.openai_model())

    async def _show_page(self, request: web.Request) -> web.Response:
        """Answer with the page, which has no data and needs no credential."""
        return self._page_response(request)

    async def _describe_state(self, request: web.Request) -> web.Response:
        self._authorizer.authorize(_READ_STATE, context_of(request, 0))
        return await asyncio.to_thread(self._page_response, request)

    def _page_response(self, request: web.Request) -> web.Response:
        status, headers, body = self._page.answer(request.method, request.path)
        return web.Response(status=status.value, headers=headers, body=body)

    async def _health(self, request: web.Request) -> web.Response:
        """Answer a probe: 200 while requests are accepted, else 503."""
        return web.Response(status=200 if self._is_healthy() else 503)

    def _failure_response(self, request: web.BaseRequest, error: Exception, request_id: str = "") -> web.Response:
        """Return the response to a request that failed."""
        request_id = request_id or new_request_id()
        headers = {**id_headers(request_id), **retry_headers_of(error)}
        if isinstance(error, web.HTTPException):
            status = error.status
            message = f"{request.method} {request.path}: {error.reason}"
            body = anthropic_error(message, status) if is_anthropic_request(request) else openai_error(message, status)
            headers |= {"allow": error.headers["allow"]} if "allow" in error.headers else {}
        else:
            status = http_status_of(error)
            if status == 500:
                _logger.error("%s failed", request.path, exc_info=error)
            if status == 401:
                headers["www-authenticate"] = "Bearer"
            body = dict(self._error_body(request, error))
        if is_anthropic_request(request):
            body["request_id"] = request_id
        return web.json_response(body, status=status, headers=headers)

    def _error_body(self, request: web.BaseRequest, error: BaseException) -> Mapping[str, Any]:
        """Return the body of the response to a failed request, in the form of the API of the request."""
        if is_anthropic_request(request):
            return self._anthropic.error(error)
        body = self._openai.error(request.path, error)
        return {"type": "error", **body} if isinstance(error, NotHttp) else body  # has the fields of both APIs

    def _count_refused(self, refusal: RadixKVError) -> None:
        if self._count_refusal is not None:
            self._count_refusal(refusal)
