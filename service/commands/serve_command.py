"""`radixkv serve`: its options, its log, and the way from a configuration to a server that listens."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from radixkv.config import Config, ModelConfig, ServerConfig, TransferConfig
from radixkv.config.model_directory import check_servable
from radixkv.service.server.events.publishing import publishing, require_publishable
from radixkv.service.server.identity.requirements import require_secure
from radixkv.service.server.listen_address import require_free
from radixkv.service.server.transfer.kv_sources import require_sources
from radixkv.service.server.transfer.role import require_role
from radixkv.startup.openmp_threads import bound_spinning
from radixkv.startup.requirements import require_usable
from radixkv.telemetry.otlp import exported_spans, require_exportable

_logger = logging.getLogger(__name__)


def add_serve_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `serve` to the commands of a parser."""
    model, server = ModelConfig(), ServerConfig()
    serve: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="serve a model until SIGTERM",
        description="Serve a model until SIGTERM or SIGINT. Prints one line, listening on HOST:PORT, on stdout when "
        "ready; the log goes to stderr.",
    )
    serve.add_argument(
        "--model",
        metavar="tiny|DIR",
        help=f"the embedded model, or a directory with a config.json and safetensors (default: {model.path})",
    )
    serve.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), help=f"auto takes a GPU if there is one (default: {model.device})"
    )
    serve.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads that compute on the CPU (default: one per physical core that the process may use, by its CPU "
        "affinity and cgroup quota)",
    )
    serve.add_argument("--host", help=f"address to listen on (default: {server.host})")
    serve.add_argument("--port", type=int, help=f"0 picks a free one (default: {server.port})")
    serve.add_argument(
        "--metrics-port",
        type=int,
        help="port of Prometheus metrics over HTTP; 0 picks a free one (default: no metrics)",
    )
    serve.add_argument(
        "--insecure",
        action="store_true",
        help="listen beyond this machine without TLS or credentials, or take tokens without TLS",
    )
    serve.add_argument(
        "--role",
        choices=("both", "prefill", "decode"),
        help="prefill does not generate, and sends K/V to servers that do; decode generates, with K/V of its sections "
        f"kv_sources (default: {TransferConfig().role})",
    )
    serve.add_argument("--config", metavar="F", help="a TOML file (default: none)")
    serve.add_argument(
        "--set",
        metavar="a.b=v",
        action="append",
        default=[],
        help="one key of the configuration; may be repeated; wins over --config, and the options above win over it "
        "(default: none)",
    )
    serve.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="lowest level that is logged"
    )
    serve.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="lines of text, or a JSON object on each line"
    )
    serve.set_defaults(command=_serve)


class JsonLines(logging.Formatter):
    """Formats each record as one line of JSON: time, level, logger, message, and the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def _serve(arguments: argparse.Namespace) -> None:
    start_s = time.monotonic()
    config = Config.load(arguments.config, [*arguments.set, *_settings(arguments)])
    _start_log(arguments.log_level, arguments.log_format)
    require_secure(config.server)
    require_free(config.server)
    require_publishable(config.events)
    require_role(config)
    require_sources(config.kv_sources)
    require_usable(config)
    require_exportable(config.telemetry)
    _announce(config.model)
    try:
        with _without_collections():
            bound_spinning(os.environ)
            # Imported only here: clients need neither a model nor a server, and torch takes seconds.
            from radixkv.service.server.metrics_port import Telemetry
            from radixkv.service.server.optional_services import optional_services
            from radixkv.service.server.server import run
            from radixkv.startup.build_engine import build_engine

        _logger.info("imported the libraries in %.1f s", time.monotonic() - start_s)
        with exported_spans(config.telemetry) as tracing:
            telemetry = Telemetry(config, tracing)
            engine = build_engine(config, telemetry.observers)
            limits = engine.limits
            _logger.info(
                "ready after %.1f s: model %s on %s, %d tokens of K/V in blocks of %d",
                time.monotonic() - start_s,
                limits.model,
                limits.device,
                limits.pool_tokens,
                limits.block_size,
            )
            with telemetry.serving(engine), publishing(engine, config.events):
                services = optional_services(engine, config)
                run(engine, config.server, config.model.path, services, config.gateway.tenant, telemetry.count_refusal)
    finally:
        gc.unfreeze()  # as `run` does, also if there is nothing to run


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Make objects that stay. Garbage collections would walk the 600,000 of torch and transformers for 0.7 s."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _announce(model: ModelConfig) -> None:
    """Log what will be loaded. Raises ConfigError at once, before torch is imported, if there is no model there."""
    wanted = f"device {model.device}, dtype {model.dtype}"
    if model.path == "tiny":
        _logger.info("loading the embedded model, %s", wanted)
    else:
        num_bytes = check_servable(model.path)
        _logger.info("loading %s, %.2f GB of weights, %s", model.path, num_bytes / 1e9, wanted)


def tells_of_more_than_a_gone_caller(record: logging.LogRecord) -> bool:
    """Return False for what gRPC logs for each answer whose caller has gone, by which strangers could fill the log.

    Errors of handlers, gRPC's and ours, are other records.
    """
    return not record.getMessage().startswith("ExecuteBatchError raised in core")


def _start_log(level: str, log_format: str) -> None:
    logging.getLogger("grpc._cython.cygrpc").addFilter(tells_of_more_than_a_gone_caller)
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(JsonLines() if log_format == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _settings(arguments: argparse.Namespace) -> list[str]:
    named = {
        "model.path": arguments.model,
        "model.device": arguments.device,
        "model.threads": arguments.threads,
        "server.host": arguments.host,
        "server.port": arguments.port,
        "server.metrics_port": arguments.metrics_port,
        "server.insecure": arguments.insecure or None,
        "transfer.role": arguments.role,
    }
    # A JSON string is a TOML string.
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in named.items() if value is not None]
