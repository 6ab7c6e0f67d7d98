"""Observability of a service: an HTTP port with Prometheus metrics and health checks, and spans."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from radixkv import __version__
from radixkv.config import Config
from radixkv.engine.observer import Observer
from radixkv.service.server.identity.doors import known_callers
from radixkv.service.server.identity.http_guard import guarded
from radixkv.service.server.identity.tls import Tls, tls_of
from radixkv.service.server.listen_address import host_port, not_free
from radixkv.service.server.page.page import Page
from radixkv.service.server.page.state_feed import StateFeed
from radixkv.telemetry.gauges import EngineGauges
from radixkv.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from radixkv.engine.engine import Engine

# Probes of an orchestrator carry no credentials. The page has no data: it asks for a token, and gets its state with it.
OPEN_PATHS = ("/healthz", "/readyz", "/")

_logger = logging.getLogger(__name__)


class Telemetry:
    """Watches one engine: with metrics if the configuration has a port for them, with spans if there is a tracer.

    Args:
        config: of the service.
        tracing: makes spans. Without it, they are made where the process has set OpenTelemetry up itself.

    Attributes:
        observers: for the engine; none if nothing is counted or traced.
        count_refusal: counts a call that is refused before the engine knows of it; None if nothing is counted.
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
        """Tell the port which engine it is about. To be called once."""
        if self._app is not None:
            self._app.watch(engine)

    @contextlib.contextmanager
    def serving(self, engine: Engine | None = None) -> Iterator[str | None]:
        """Serve the metrics port while the context lasts, also while the service starts and while it drains.

        With credentials, everything but `OPEN_PATHS` needs the token of an admin or a reader. With TLS, it is HTTPS.

        Args:
            engine: what the port is about; None if it is to be built, and then given to `watch`.

        Yields:
            `HOST:PORT` with the port that was taken, which is logged too; None without a port in the configuration.

        Raises:
            ConfigError: the address can't be bound.
        """
        host, port = self._config.host, self._config.metrics_port
        if self._app is None or port is None:
            yield None
            return
        if engine is not None:
            self.watch(engine)
        try:
            app: WSGIApplication = self._app
            callers = known_callers(self._config)
            if callers is not None:
                app = guarded(app, callers, OPEN_PATHS)
            tls = tls_of(self._config)
            server = _Server(host, port, app, tls)
        except (OSError, UnicodeError) as error:
            raise not_free("server.metrics_port", host, port) from error
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


class MetricsApp:
    """The application behind the port.

    | path | answer |
    |---|---|
    | / | a page that draws what is cached, fed by /state.json |
    | /metrics | all metrics, or those that `?name[]=NAME` names |
    | /healthz | 200 while the service starts, serves or drains, and 503 if only a restart of the process helps |
    | /readyz | 200 while requests are accepted, else 503: send them elsewhere |

    Any other path is 404. While the service starts, the page is 503, and metrics are those of the process.

    Args:
        registry: collected by a scrape.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._metrics = make_wsgi_app(registry)
        self._engine: Engine | None = None
        self._page: Page | None = None

    def watch(self, engine: Engine) -> None:
        """Answer for an engine from now on. Until then the service is starting."""
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
            status = HTTPStatus.OK if self._passes(path) else HTTPStatus.SERVICE_UNAVAILABLE
        text = f"{status.phrase}\n".encode()
        headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text)))]
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            headers.append(("Allow", "GET, HEAD"))
        start_response(f"{status.value} {status.phrase}", headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [text]

    def _passes(self, path: str) -> bool:
        """Whether the service passes the check at a path. While it starts it is alive, and not ready."""
        if self._engine is None:
            return path == "/healthz"
        return self._engine.can_recover if path == "/healthz" else self._engine.is_healthy


_MAX_CONNECTIONS = 64  # each has a thread
_REQUEST_S = 5.0  # of a connection, until its handshake and its request have come, in however many pieces
_ANSWER_S = 30.0  # from the request on
_LEAVE_S = 1.0  # until the thread of a connection that was ended has gone


class _Connections:
    """The open connections of a port. Those whose request has not come yet are the first to be ended.

    Safe to share between threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asking: dict[socket.socket, float] = {}  # with the time of its end, the oldest first
        self._answered: dict[socket.socket, float] = {}  # the same

    def add(self, connection: socket.socket) -> None:
        """Add a connection whose request is still to come."""
        with self._lock:
            self._asking[connection] = time.monotonic() + _REQUEST_S

    def note_request(self, connection: socket.socket) -> None:
        """Note that the request of a connection has come."""
        with self._lock:
            if self._asking.pop(connection, None) is not None:
                self._answered[connection] = time.monotonic() + _ANSWER_S

    def discard(self, connection: socket.socket) -> None:
        """Forget a connection that is over."""
        with self._lock:
            self._asking.pop(connection, None)
            self._answered.pop(connection, None)

    def end_late(self) -> None:
        """End those whose time is over."""
        now_s = time.monotonic()
        for connections in (self._asking, self._answered):
            with self._lock:
                late = [connection for connection, end_s in connections.items() if end_s <= now_s]
            for connection in late:
                self._end(connection)

    def end_oldest(self) -> None:
        """End the oldest one of those whose request has not come, or else of the others."""
        with self._lock:
            oldest = next(iter({**self._asking, **self._answered}), None)
        if oldest is not None:
            self._end(oldest)

    def _end(self, connection: socket.socket) -> None:
        self.discard(connection)
        with contextlib.suppress(OSError):  # it is over already
            # Without a word of TLS, which belongs to the connection's own thread.
            socket.socket.shutdown(connection, socket.SHUT_RDWR)


class _Server(ThreadingMixIn, WSGIServer):
    """Answers each connection on a thread of its own, which does not keep the process alive.

    With TLS, the handshake is on that thread too, so that a caller who begins one and stops keeps nobody waiting.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, app: WSGIApplication, tls: Tls | None) -> None:
        self._tls = tls
        self._places = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self.connections = _Connections()
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), _Handler)
        self.set_app(app)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection."""
        connection, address = super().get_request()
        if self._tls is not None:
            context = self._tls.https()
            connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread. Where all places are taken, end the connection that has asked nothing for longest."""
        if not self._places.acquire(blocking=False):
            self.connections.end_oldest()
            if not self._places.acquire(timeout=_LEAVE_S):
                self.shutdown_request(request)
                return
        self.connections.add(request)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and give the place back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.discard(request)
            self._places.release()

    def service_actions(self) -> None:
        """End connections that are late. The loop calls it at least twice a second."""
        self.connections.end_late()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep quiet about connections that break, as those of callers without TLS do; print other errors."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(WSGIRequestHandler):
    """Reads a request, and writes no line for it."""

    timeout = _ANSWER_S  # seconds in which a caller has to take a piece of its answer
    server: _Server

    def parse_request(self) -> bool:
        """Read the request's headers. Returns whether it can be answered."""
        can_be_answered = super().parse_request()
        self.server.connections.note_request(self.connection)
        return can_be_answered

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


def _process_tracing() -> Observer | None:
    """Make an observer for spans if the process has set OpenTelemetry up, as `opentelemetry-instrument` does."""
    if sys.modules.get("opentelemetry") is None:  # not imported, so not set up
        return None
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):
        return None
    from radixkv.telemetry.tracing import Tracing

    return Tracing(provider.get_tracer("radixkv", __version__))
