"""The metrics port: Prometheus metrics, health checks and a page over HTTP; and the observers of the engine."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from radixkv import __version__
from radixkv.config import Config
from radixkv.engine.observer import Observer
from radixkv.errors import InvalidCredential
from radixkv.service.server.auth.authenticator import Authenticator
from radixkv.service.server.auth.identity import OPERATORS
from radixkv.service.server.auth.server_auth import credential_authenticator
from radixkv.service.server.auth.tls import Tls
from radixkv.service.server.host_check import HostCheck
from radixkv.service.server.listen_address import bind_error, host_port
from radixkv.service.server.page.page import Page
from radixkv.service.server.page.state_feed import StateFeed
from radixkv.telemetry.gauges import EngineGauges
from radixkv.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from radixkv.engine.engine import Engine

# Probes of an orchestrator have no credentials. The page itself has no data; it asks for a token to load the data.
OPEN_PATHS = ("/healthz", "/readyz", "/")

_logger = logging.getLogger(__name__)


class Telemetry:
    """Observes one engine: with metrics if the configuration has a metrics port, with spans if there is a tracer.

    Args:
        config: the configuration of the service.
        tracing: records spans. Without it, spans are recorded if the process has set up OpenTelemetry itself.

    Attributes:
        observers: the observers to pass to the engine.
        count_refusal: counts a call that is refused by the server, and not by the engine; None without a metrics port.
    """

    def __init__(self, config: Config, tracing: Observer | None = None) -> None:
        self._config = config.server
        self._metrics = None if config.server.metrics_port is None else Metrics(config.tenants)
        self._app = None if self._metrics is None else MetricsApp(self._metrics.registry)
        self.count_refusal = None if self._metrics is None else self._metrics.call_refused
        self.observers = [
            observer for observer in (self._metrics, tracing or _process_tracing()) if observer is not None
        ]

    def watch(self, engine: Engine) -> None:
        """Report the metrics and health of this engine. Call it once."""
        if self._app is not None:
            self._app.watch(engine)

    @contextlib.contextmanager
    def serving(self, engine: Engine | None = None) -> Iterator[str | None]:
        """Serve the metrics port while the context lasts, including while the service starts and drains.

        With a credentials file, all paths except `OPEN_PATHS` require the token of an admin or a reader. With TLS, the
        port speaks HTTPS. Requests must pass `HostCheck`.

        Args:
            engine: the engine to report on; None if it does not exist yet and is passed to `watch` later.

        Yields:
            `HOST:PORT` with the port that was bound; None without a port in the configuration.

        Raises:
            ConfigError: the address cannot be bound, or a file of credentials or certificates cannot be used.
        """
        host, port = self._config.host, self._config.metrics_port
        if self._app is None or port is None:
            yield None
            return
        if engine is not None:
            self.watch(engine)
        try:
            app: WSGIApplication = self._app
            authenticator = credential_authenticator(self._config)
            if authenticator is not None:
                app = with_authorization(app, authenticator, OPEN_PATHS)
            app = with_host_check(app, HostCheck(self._config))
            tls = None if self._config.tls_certificate is None else Tls(self._config)
            server = _WsgiServer(host, port, app, tls)
        except (OSError, UnicodeError) as error:
            raise bind_error("server.metrics_port", host, port) from error
        thread = threading.Thread(target=server.serve_forever, name="radixkv-metrics", daemon=True)
        thread.start()
        address = host_port(host, server.server_port)
        scheme = "http" if tls is None else "https"
        _logger.info("a page on %s://%s/, metrics on %s://%s/metrics", scheme, address, scheme, address)
        try:
            yield address
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def with_host_check(app: WSGIApplication, check: HostCheck) -> WSGIApplication:
    """Answer requests whose header `Host` is not allowed with 421, and pass on all others."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if check.allows(environ.get("HTTP_HOST")):
            return app(environ, start_response)
        text = "the header Host of this request does not name this server; server.metrics_hosts allows more names"
        return _text_response(environ, start_response, HTTPStatus.MISDIRECTED_REQUEST, text)

    return answer


def with_authorization(
    app: WSGIApplication, authenticator: Authenticator, open_paths: Collection[str]
) -> WSGIApplication:
    """Require the token of an admin or a reader for all paths of an application except `open_paths`."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        status = HTTPStatus.OK
        if environ["PATH_INFO"] not in open_paths:
            status = authorize(authenticator, environ.get("HTTP_AUTHORIZATION"))
        if status is HTTPStatus.OK:
            return app(environ, start_response)
        headers = [("WWW-Authenticate", "Bearer")] if status is HTTPStatus.UNAUTHORIZED else []
        return _text_response(environ, start_response, status, status.phrase, headers)

    return answer


def authorize(authenticator: Authenticator, authorization: str | None) -> HTTPStatus:
    """Return OK for an admin or a reader, FORBIDDEN for another caller with a credential, else UNAUTHORIZED.

    Args:
        authenticator: identifies callers.
        authorization: the header; None without one.
    """
    try:
        caller = authenticator.identify_header(authorization)
    except InvalidCredential:
        return HTTPStatus.UNAUTHORIZED
    return HTTPStatus.OK if caller.role in OPERATORS else HTTPStatus.FORBIDDEN


class MetricsApp:
    """The WSGI application of the port.

    | path | response |
    |---|---|
    | / | a page that draws what is cached, from /state.json |
    | /metrics | all metrics, or those that `?name[]=NAME` names |
    | /healthz | 200 while the service starts, serves or drains; 503 if only a restart of the process can fix it |
    | /readyz | 200 while requests are accepted, else 503: send requests to another server |

    Any other path is 404. While the service starts, `/` and `/state.json` are 503, and /metrics has no gauges of the
    engine.

    Args:
        registry: the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._metrics = make_wsgi_app(registry)
        self._engine: Engine | None = None
        self._page: Page | None = None

    def watch(self, engine: Engine) -> None:
        """Report on an engine from now on. Until then the service is starting."""
        self._registry.register(EngineGauges(engine))
        self._page = Page(StateFeed(engine))
        self._engine = engine

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request."""
        path = environ["PATH_INFO"]
        if path == "/metrics":
            metrics: Iterable[bytes] = self._metrics(environ, start_response)
            return metrics
        if path in Page.PATHS and self._page is not None:
            return self._page(environ, start_response)
        if path not in ("/healthz", "/readyz", *Page.PATHS):
            status = HTTPStatus.NOT_FOUND
        elif environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            status = HTTPStatus.METHOD_NOT_ALLOWED
        else:
            status = HTTPStatus.OK if self._passes_check(path) else HTTPStatus.SERVICE_UNAVAILABLE
        headers = [("Allow", "GET, HEAD")] if status is HTTPStatus.METHOD_NOT_ALLOWED else []
        return _text_response(environ, start_response, status, status.phrase, headers)

    def _passes_check(self, path: str) -> bool:
        """Return whether the health check at a path passes. While the service starts, it is alive but not ready."""
        if self._engine is None:
            return path == "/healthz"
        return self._engine.can_recover if path == "/healthz" else self._engine.is_healthy


def _text_response(
    environ: WSGIEnvironment,
    start_response: StartResponse,
    status: HTTPStatus,
    line: str,
    headers: Iterable[tuple[str, str]] = (),
) -> Iterable[bytes]:
    """Respond with one line of text."""
    text = f"{line}\n".encode()
    all_headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text))), *headers]
    start_response(f"{status.value} {status.phrase}", all_headers)
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [text]


_MAX_CONNECTIONS = 64  # each has a thread
_REQUEST_S = 5.0  # maximum time from accepting a connection until its request has arrived
_RESPONSE_S = 30.0  # maximum time from the arrival of the request until the response was read
_THREAD_END_S = 1.0  # maximum time until the thread of a closed connection ends


class _WsgiConnections:
    """The open connections of a port. Connections whose request has not arrived are closed first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._awaiting_request: dict[socket.socket, float] = {}  # with their deadlines, the oldest first
        self._responding: dict[socket.socket, float] = {}  # with their deadlines, the oldest first

    def add(self, connection: socket.socket) -> None:
        """Add a connection whose request has not arrived yet."""
        with self._lock:
            self._awaiting_request[connection] = time.monotonic() + _REQUEST_S

    def note_request(self, connection: socket.socket) -> None:
        """Record that the request of a connection has arrived."""
        with self._lock:
            if self._awaiting_request.pop(connection, None) is not None:
                self._responding[connection] = time.monotonic() + _RESPONSE_S

    def discard(self, connection: socket.socket) -> None:
        """Remove a connection that was closed."""
        with self._lock:
            self._awaiting_request.pop(connection, None)
            self._responding.pop(connection, None)

    def end_late_connections(self) -> None:
        """Close connections that exceed their deadline."""
        now_s = time.monotonic()
        for connections in (self._awaiting_request, self._responding):
            with self._lock:
                late_connections = [connection for connection, end_s in connections.items() if end_s <= now_s]
            for connection in late_connections:
                self._end(connection)

    def end_oldest_connection(self) -> None:
        """Close the oldest connection whose request has not arrived; if there is none, the oldest connection."""
        with self._lock:
            oldest = next(iter({**self._awaiting_request, **self._responding}), None)
        if oldest is not None:
            self._end(oldest)

    def _end(self, connection: socket.socket) -> None:
        self.discard(connection)
        with contextlib.suppress(OSError):  # it is closed already
            # Not `SSLSocket.shutdown`: TLS belongs to the connection's own thread.
            socket.socket.shutdown(connection, socket.SHUT_RDWR)


class _WsgiServer(ThreadingMixIn, WSGIServer):
    """Handles each connection on a daemon thread of its own, including the TLS handshake."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, app: WSGIApplication, tls: Tls | None) -> None:
        self._tls = tls
        self._slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self.connections = _WsgiConnections()
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), _WsgiHandler)
        self.set_app(app)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection."""
        connection, address = super().get_request()
        if self._tls is not None:
            context = self._tls.https()
            connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection on a thread. At the limit, an older one is closed first; see `end_oldest_connection`.

        If the thread of the older connection does not end within a second, the new connection is closed.
        """
        if not self._slots.acquire(blocking=False):
            self.connections.end_oldest_connection()
            if not self._slots.acquire(timeout=_THREAD_END_S):
                self.shutdown_request(request)
                return
        self.connections.add(request)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system allows no further thread
            self.connections.discard(request)
            self._slots.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a connection, and release its slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.discard(request)
            self._slots.release()

    def service_actions(self) -> None:
        """Close connections that exceed their deadline. The server calls this at least twice per second."""
        self.connections.end_late_connections()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that break, for example because the client does not use TLS; print other errors."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _WsgiHandler(WSGIRequestHandler):
    """Reads a request without logging it."""

    timeout = _RESPONSE_S  # seconds that a single read or write may block
    server: _WsgiServer

    def parse_request(self) -> bool:
        """Read the headers of the request and return whether it can be answered."""
        can_be_answered = super().parse_request()
        self.server.connections.note_request(self.connection)
        return can_be_answered

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def _process_tracing() -> Observer | None:
    """Return an observer that records spans if OpenTelemetry is set up, as `opentelemetry-instrument` does."""
    if sys.modules.get("opentelemetry") is None:  # it is not imported, so it is not set up
        return None
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):
        return None
    from radixkv.telemetry.tracing import Tracing

    return Tracing(provider.get_tracer("radixkv", __version__))
