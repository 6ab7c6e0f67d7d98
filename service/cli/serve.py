"""`radixkv serve`: starts the log, and one engine with its server, as configured."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import sys
from collections.abc import Iterator, Set
from datetime import UTC, datetime

from radixkv import __version__
from radixkv.config import Config, ModelConfig, TransferConfig
from radixkv.model_files.model_location import check_servable, files_directory
from radixkv.service.cli.options import Option, add_options, flag
from radixkv.service.cli.server_options import CONFIG, LISTEN, MODEL, settings_of
from radixkv.startup.openmp_threads import bound_spinning
from radixkv.startup.progress import StartProgress

_logger = logging.getLogger(__name__)

_OPTIONS = (
    MODEL,
    Option(
        "--device",
        None,
        None,
        f"device that runs the model; auto uses a GPU if there is one (default: {ModelConfig().device})",
        more={"choices": ("auto", "cpu", "cuda")},
    ),
    Option(
        "--threads",
        "N",
        int,
        "threads that compute on the CPU (default: OMP_NUM_THREADS, or else one per physical core within the CPU "
        "affinity and the cgroup quota)",
    ),
    *LISTEN,
    Option(
        "--http-port",
        None,
        int,
        "port of the APIs of OpenAI and Anthropic over HTTP; 0 picks a free one (default: none)",
    ),
    Option(
        "--metrics-port",
        None,
        int,
        "port of metrics, health probes and a page about the cache, over HTTP; 0 picks a free one (default: none)",
    ),
    flag("--insecure", "listen beyond this machine without TLS or credentials, or accept tokens without TLS"),
    Option(
        "--role",
        None,
        None,
        "prefill does not generate, and lets decode servers fetch its K/V; decode generates from K/V fetched from the "
        f"servers in [kv_sources.*] (default: {TransferConfig().role})",
        more={"choices": ("both", "prefill", "decode")},
    ),
    *CONFIG,
    Option(
        "--log-level",
        None,
        None,
        "lowest level that is logged",
        "info",
        {"choices": ("debug", "info", "warning", "error")},
    ),
    Option(
        "--log-format",
        None,
        None,
        "lines of text, or one JSON object per line",
        "text",
        {"choices": ("text", "json")},
    ),
)


def add_arguments(serve: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    serve.description = (
        "Serve a model until SIGTERM or SIGINT. Prints one line, listening on HOST:PORT, on stdout when ready; the log "
        "goes to stderr."
    )
    add_options(serve, _OPTIONS)
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
    with StartProgress() as progress:
        config = Config.load(arguments.config, [*arguments.set, *_settings(arguments)])
        _start_log(arguments.log_level, arguments.log_format)
        _announce(config.model)
        # The first log line is written before gRPC, numpy and PyTorch are imported. A wrong configuration is reported
        # before PyTorch is imported.
        progress.begin("checking the configuration")
        from radixkv.service.server.start_requirements import require_startable

        require_startable(config)
        _run(config, progress)


def _run(config: Config, progress: StartProgress) -> None:
    """Import the libraries, build the engine, and serve until SIGTERM or SIGINT."""
    bound_spinning(os.environ)
    with contextlib.ExitStack() as resources:
        resources.callback(gc.unfreeze)
        with _without_garbage_collection():
            progress.begin("importing the server")
            from radixkv.service.server.event_publishing import publishing
            from radixkv.service.server.metrics_port import Telemetry
            from radixkv.service.server.server import run
            from radixkv.telemetry.otlp import exported_spans
            from radixkv.telemetry.traffic_recorder import recorded_traffic

            progress.begin("importing PyTorch and transformers")
            from radixkv.startup.lean_imports import import_transformers

            import_transformers()
            from radixkv.startup.build_engine import build_engine
            from radixkv.startup.malloc import give_back_freed_memory

        telemetry = Telemetry(config, resources.enter_context(exported_spans(config.telemetry)))
        recorder = resources.enter_context(recorded_traffic(config))
        # The metrics port is open from here on, so that liveness probes pass while a large model is loaded.
        resources.enter_context(telemetry.serving())
        observers = [*telemetry.observers, *([] if recorder is None else [recorder])]
        engine = build_engine(config, observers, progress=progress)
        telemetry.watch(engine)
        _warn_of_turn_end(config.model.path, engine.eos_token_ids)
        give_back_freed_memory()  # of the checks and of the tokenizer
        progress.begin("starting to listen")
        resources.enter_context(publishing(engine, config.events))
        run(
            engine,
            config.server,
            config.model.path,
            config,
            telemetry.count_refusal,
            progress.ready,
        )


def _warn_of_turn_end(model_path: str, eos_token_ids: Set[int]) -> None:
    """Log a warning if the chat template of a model ends answers with a token that does not end a generation.

    Tokenizers without `tokenizer.json` are not checked, because loading them takes seconds.
    """
    if model_path == "tiny":
        return
    directory = files_directory(model_path)
    if not (directory / "tokenizer.json").is_file():
        return
    from radixkv.service.text.tokenizer import Tokenizer

    try:
        turn_end = Tokenizer.load(directory).turn_end()
    except (ModuleNotFoundError, ValueError):  # requests that need the tokenizer fail with the reason
        return
    if turn_end is None:
        return
    token, token_id = turn_end
    if token_id not in eos_token_ids:
        _logger.warning(
            "the chat template ends answers with %s (%d), which neither generation_config.json nor config.json nor the "
            "tokenizer names as end of sequence: if the model continues after it, add it to eos_token_id in "
            "generation_config.json, or send it in stop_token_ids",
            token,
            token_id,
        )


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection during imports, then exempt what they created from later collections (`gc.freeze`).

    Importing torch and transformers creates 600,000 objects that live until the process exits. Collections would spend
    0.7 s on traversing them.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _announce(model: ModelConfig) -> None:
    """Log which model will be served. This is the first line of the log.

    Raises:
        ConfigError: there is no such model, or it can't be served.
    """
    name = "the embedded model tiny"
    if model.path != "tiny":
        name = f"{model.path} ({check_servable(model.path) / 1e9:.2f} GB of weights)"
    _logger.info("radixkv %s is starting: %s, device %s, dtype %s", __version__, name, model.device, model.dtype)


def _start_log(level: str, log_format: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(JsonLines() if log_format == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _settings(arguments: argparse.Namespace) -> list[str]:
    return settings_of(
        {
            "model.path": arguments.model,
            "model.device": arguments.device,
            "model.threads": arguments.threads,
            "server.host": arguments.host,
            "server.port": arguments.port,
            "server.http_port": arguments.http_port,
            "server.metrics_port": arguments.metrics_port,
            "server.insecure": arguments.insecure or None,
            "transfer.role": arguments.role,
        }
    )
