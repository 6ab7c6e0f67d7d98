"""What an operator watches a service by: Prometheus metrics over HTTP, and spans."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import start_http_server

from radixkv import __version__
from radixkv.config import Config
from radixkv.engine.observer import Observer
from radixkv.service.server.listen_address import host_port, not_free
from radixkv.telemetry.gauges import EngineGauges
from radixkv.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from radixkv.engine.engine import Engine

_logger = logging.getLogger(__name__)


class Telemetry:
    """Watches one engine: counts for Prometheus if there is a port for it, traces if the process is set up for it.

    Attributes:
        observers: for the engine; none if nothing is counted or traced.
    """

    def __init__(self, config: Config) -> None:
        self._config = config.server
        self._metrics = None if config.server.metrics_port is None else Metrics(config.tenants)
        self.observers = [observer for observer in (self._metrics, _tracing()) if observer is not None]

    @contextlib.contextmanager
    def serving(self, engine: Engine) -> Iterator[str | None]:
        """Serve the metrics while the context lasts, also while the service drains.

        Yields:
            `HOST:PORT` with the port that was taken, which is logged too; None without a port in the configuration.

        Raises:
            ConfigError: the address can't be bound.
        """
        host, port = self._config.host, self._config.metrics_port
        if self._metrics is None or port is None:
            yield None
            return
        self._metrics.registry.register(EngineGauges(engine))
        try:
            server, thread = start_http_server(port, host, self._metrics.registry)
        except (OSError, UnicodeError) as error:
            raise not_free("server.metrics_port", host, port) from error
        address = host_port(host, server.server_port)
        _logger.info("metrics on http://%s/metrics", address)
        try:
            yield address
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def _tracing() -> Observer | None:
    """Spans, if OpenTelemetry is installed and set up in this process, as `opentelemetry-instrument` does."""
    try:
        from opentelemetry import trace
    except ModuleNotFoundError:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):
        return None
    from radixkv.telemetry.tracing import Tracing

    return Tracing(provider.get_tracer("radixkv", __version__))
