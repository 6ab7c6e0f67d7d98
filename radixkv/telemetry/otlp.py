"""Export of spans over OTLP, if `telemetry.otlp_endpoint` is set.

The OpenTelemetry SDK is only imported in that case. Its standard environment variables apply: `OTEL_SERVICE_NAME`,
`OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_SAMPLER`, `OTEL_BSP_*`, and `OTEL_EXPORTER_OTLP_*` for protocol, headers,
timeout, compression and certificates.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from radixkv import __version__
from radixkv.config import TelemetryConfig
from radixkv.config.needed_package import require_package
from radixkv.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    from radixkv.engine.observer import Observer

GRPC, HTTP = "grpc", "http/protobuf"
_CONFIG_KEY = "telemetry.otlp_endpoint"
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SCHEMES = {"http": "http", "grpc": "http", "https": "https", "grpcs": "https"}
_HTTP_PORT = 4318
_HTTP_PATH = "/v1/traces"
_FLUSH_TIMEOUT_S = 5.0
_ABORT_TIMEOUT_S = 1.0
_MODULES = {GRPC: "opentelemetry.exporter.otlp.proto.grpc", HTTP: "opentelemetry.exporter.otlp.proto.http"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Collector:
    """The collector to which spans are sent.

    Attributes:
        protocol: `GRPC` or `HTTP`.
        url: URL with the scheme http or https. It includes the path if the protocol is `HTTP`.
    """

    protocol: str
    url: str

    @property
    def is_secure(self) -> bool:
        """Whether the connection uses TLS."""
        return self.url.startswith("https:")


def collector_of(endpoint: str, environment: Mapping[str, str] = os.environ) -> Collector:
    """Parse `telemetry.otlp_endpoint`.

    The protocol is HTTP if the port is 4318 or the URL has a path, and gRPC otherwise. The standard environment
    variables override it. The default path over HTTP is /v1/traces.

    Args:
        endpoint: `http://HOST:PORT` or `https://HOST[:PORT]`, optionally with a path. The schemes `grpc` and `grpcs`
            are synonyms of `http` and `https`.
        environment: environment variables, of which `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL` and
            `OTEL_EXPORTER_OTLP_PROTOCOL` are read.

    Raises:
        ConfigError: the endpoint is not such a URL, it contains credentials, or the protocol is unknown.
    """
    try:
        url = urlsplit(endpoint)
        host, port = url.hostname, url.port
    except ValueError as error:
        raise ConfigError(
            f"{_CONFIG_KEY}: expected a URL such as http://localhost:4317, got {endpoint!r}: {error}"
        ) from error
    if url.username is not None:  # the URL would be logged
        raise ConfigError(f"{_CONFIG_KEY}: the URL contains credentials; pass them with OTEL_EXPORTER_OTLP_HEADERS")
    scheme = _SCHEMES.get(url.scheme)
    if scheme is None or not host or (scheme == "http" and port is None):
        raise ConfigError(f"{_CONFIG_KEY}: expected a URL such as http://localhost:4317, got {endpoint!r}")
    has_path = url.path.strip("/") != ""
    protocol = HTTP if has_path or port == _HTTP_PORT else GRPC
    variable = next((name for name in _PROTOCOL_VARIABLES if environment.get(name)), None)
    if variable is not None:
        protocol = environment[variable]
        if protocol not in (GRPC, HTTP):
            raise ConfigError(f"{variable}: expected {GRPC} or {HTTP}, got {protocol!r}")
    path = ""
    if protocol == HTTP:
        path = url.path if has_path else _HTTP_PATH
    return Collector(protocol, f"{scheme}://{url.netloc}{path}")


def require_exportable(config: TelemetryConfig) -> None:
    """Check the endpoint and the installed packages before a model is loaded. Nothing is sent, and no SDK imported.

    Raises:
        ConfigError: the message names the key, and the command that installs a missing package.
    """
    if config.otlp_endpoint is None:
        return
    collector = collector_of(config.otlp_endpoint)
    require_package(_CONFIG_KEY, "opentelemetry.sdk", "opentelemetry-sdk", "tracing")
    require_package(_CONFIG_KEY, _MODULES[collector.protocol], "opentelemetry-exporter-otlp", "tracing")


@contextlib.contextmanager
def exported_spans(config: TelemetryConfig) -> Iterator[Observer | None]:
    """Export the spans of an engine's requests while the context is open.

    A background thread sends spans in batches. An unreachable collector does not slow down requests: spans are dropped
    when more than 2,048 (`OTEL_BSP_MAX_QUEUE_SIZE`) are queued, and one warning is logged per outage. On exit, queued
    spans are sent for at most 5 s.

    Yields:
        An observer for the engine, or None if the configuration has no endpoint.

    Raises:
        ConfigError: see `require_exportable`.
    """
    if config.otlp_endpoint is None:
        yield None
        return
    require_exportable(config)
    from radixkv.telemetry.tracing import Tracing  # requires OpenTelemetry

    collector = collector_of(config.otlp_endpoint)
    with _captured_library_log() as library_log:
        exporter = _with_outage_log(_exporter(collector), collector.url, library_log)
        provider = _provider(exporter)
        _log.info("exporting spans to %s over %s", collector.url, collector.protocol)
        try:
            yield Tracing(provider.get_tracer("radixkv", __version__))
        finally:
            _shut_down(provider, exporter)


class _LibraryLog(logging.Handler):
    """Keeps the last message of OpenTelemetry's own log, which has several lines per failed batch."""

    def __init__(self) -> None:
        super().__init__()
        self.last_message = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        self.last_message = record.getMessage()


@contextlib.contextmanager
def _captured_library_log() -> Iterator[_LibraryLog]:
    logger, handler = logging.getLogger("opentelemetry"), _LibraryLog()
    previous_propagate = logger.propagate
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.propagate = previous_propagate


def _exporter(collector: Collector) -> SpanExporter:
    if collector.protocol == HTTP:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        over_http: SpanExporter = HttpExporter(endpoint=collector.url)
        return over_http
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

    over_grpc: SpanExporter = GrpcExporter(endpoint=collector.url, insecure=not collector.is_secure)
    return over_grpc


def _with_outage_log(exporter: SpanExporter, url: str, library_log: _LibraryLog) -> SpanExporter:
    """Return an exporter that calls `exporter`, and logs the beginning and the end of each outage."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class OutageLogger(SpanExporter):
        def __init__(self) -> None:
            self._is_failing = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = exporter.export(spans)
            is_failing = result is not SpanExportResult.SUCCESS
            if is_failing and not self._is_failing:
                _log.warning("%s is unreachable, dropping spans: %s", url, library_log.last_message)
            elif self._is_failing and not is_failing:
                _log.info("exporting spans to %s again", url)
            self._is_failing = is_failing
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    return OutageLogger()


def _provider(exporter: SpanExporter) -> TracerProvider:
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    defaults = {"service.name": "radixkv", "service.version": __version__, "service.instance.id": str(uuid.uuid4())}
    # The attributes of environment variables take precedence over these defaults.
    resource = Resource.create(defaults).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _shut_down(provider: TracerProvider, exporter: SpanExporter) -> None:
    """Send queued spans, and drop those that are not sent within `_FLUSH_TIMEOUT_S` seconds."""
    flush_thread = threading.Thread(target=provider.shutdown, name="radixkv-spans-flush", daemon=True)
    flush_thread.start()
    flush_thread.join(_FLUSH_TIMEOUT_S)
    if flush_thread.is_alive():
        _log.warning("dropping spans that could not be sent within %g s of shutdown", _FLUSH_TIMEOUT_S)
        exporter.shutdown()  # aborts the export
        flush_thread.join(_ABORT_TIMEOUT_S)
