"""`radixkv fleet`: serves several engines behind one address, on Ray."""

from __future__ import annotations

import argparse
import logging
import re
import signal
import socket
import sys
import threading

from radixkv.config import Config
from radixkv.errors import ConfigError
from radixkv.model_files.model_location import check_servable
from radixkv.service.cli.argument_types import processors
from radixkv.service.cli.options import Option, add_options, flag
from radixkv.service.cli.server_options import CONFIG, LISTEN, MODEL, settings_of
from radixkv.service.server.listen_address import bind_error, host_port, require_free

_DEFAULT_REPLICAS = "2"
# Ports and sockets that a single server has, but not a fleet.
_SINGLE_SERVER_KEYS = (
    ("server", "metrics_port"),
    ("server", "http_port"),
    ("server", "admin_port"),
    ("events", "zmq_endpoint"),
    ("events", "replay_endpoint"),
)

_OPTIONS = (
    Option("--replicas", "N|N:M", None, "number of engines; N:M scales between N and M with the load (default: 2)"),
    Option(
        "--prefill-replicas",
        "N",
        int,
        "number of engines that only prefill, instead of --replicas (default: none)",
    ),
    Option(
        "--decode-replicas",
        "N",
        int,
        "number of engines that decode from the K/V of the engines that only prefill (default: none)",
    ),
    MODEL,
    *LISTEN,
    Option(
        "--replica-host", "H", None, "address that engines listen on; node is the address of their machine", "127.0.0.1"
    ),
    Option("--cpus", "N", processors, "CPUs per engine", 1.0),
    Option("--gpus", "N", processors, "GPUs per engine", 0.0),
    Option("--ray-address", "A", None, "address of a running Ray cluster (default: the command starts a cluster)"),
    flag("--insecure", "listen beyond this machine without TLS or credentials"),
    *CONFIG,
)


def add_arguments(fleet: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    fleet.description = (
        "Serve a model with several engines on Ray until SIGTERM or SIGINT. Each request is routed to the engine "
        "where it costs least. Prints one line, listening on HOST:PORT, on stdout when ready."
    )
    add_options(fleet, _OPTIONS)
    fleet.set_defaults(command=_fleet)


def _fleet(arguments: argparse.Namespace) -> None:
    from radixkv.service.fleet.ray_fleet import FleetPlan, running_fleet, with_port
    from radixkv.service.server.auth.requirements import require_secure
    from radixkv.service.server.servicers.kv_sources import require_sources
    from radixkv.startup.requirements import require_protected, require_secret_files
    from radixkv.telemetry.otlp import require_exportable

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    config = Config.load(arguments.config, [*arguments.set, *_settings(arguments)])
    if config.fleet.has_roles and arguments.replicas is not None:
        raise ConfigError("--replicas: can't be combined with fleet.prefill_replicas and fleet.decode_replicas")
    replicas = _DEFAULT_REPLICAS if arguments.replicas is None else arguments.replicas
    min_replicas, max_replicas = _parse_replicas(replicas)
    _require_fleet_keys(config)
    require_secure(config.server)
    require_free(config.server)
    _require_private(arguments.replica_host, config)
    require_sources(config.kv_sources)
    require_protected(config)
    require_secret_files(config)
    require_exportable(config.telemetry)
    config = with_port(config, config.server.port or _free_port(config.server.host))
    plan = FleetPlan(
        config,
        min_replicas,
        max_replicas,
        arguments.replica_host,
        arguments.cpus,
        arguments.gpus,
        arguments.ray_address,
    )
    if config.model.path != "tiny":
        check_servable(config.model.path)
    stop = threading.Event()
    with running_fleet(plan):
        for signal_number in (signal.SIGTERM, signal.SIGINT):  # after Ray has set its own handlers
            signal.signal(signal_number, lambda *_: stop.set())
        print(f"listening on {host_port(config.server.host, config.server.port)}", flush=True)
        stop.wait()


def _parse_replicas(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text)
    minimum, maximum = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= minimum <= maximum:
        raise ConfigError(f"--replicas: expected N, or N:M with N of at least 1 and at most M, got {text!r}")
    return minimum, maximum


def _require_fleet_keys(config: Config) -> None:
    """Refuse keys that a fleet does not support, and a role that all replicas would have."""
    for section, key in _SINGLE_SERVER_KEYS:
        value = getattr(getattr(config, section), key)
        if value is not None:
            raise ConfigError(f"{section}.{key}: a fleet does not support it, got {value}; leave it out")
    if (role := config.transfer.role) != "both":
        raise ConfigError(
            f"transfer.role: expected both in a fleet, got {role}; use --prefill-replicas and --decode-replicas"
        )


def _require_private(host: str, config: Config) -> None:
    """Refuse replicas that other machines can reach without credentials, and tokens that would be sent unencrypted."""
    from radixkv.service.client.address import is_loopback
    from radixkv.service.client.connection import tls_credentials

    server = config.server
    has_tls = config.fleet.tls_ca is not None
    if has_tls and server.tls_certificate is None:
        raise ConfigError("fleet.tls_ca: requires server.tls_certificate")
    if has_tls:
        try:
            tls_credentials(str(config.fleet.tls_ca))
        except OSError as error:
            reason = f"{config.fleet.tls_ca}: {error.strerror}"
            raise ConfigError(f"fleet.tls_ca: expected a file of certificates in PEM, got {reason}") from error
        except ValueError as error:
            raise ConfigError(f"fleet.tls_ca: {config.fleet.tls_ca} contains no certificates in PEM") from error
    if is_loopback(host):
        return
    if not has_tls and server.tokens_file is not None:
        raise ConfigError(
            f"--replica-host: expected 127.0.0.1, ::1 or localhost without fleet.tls_ca, got {host!r}: tokens would "
            "be sent to replicas unencrypted"
        )
    if server.tokens_file is None and not server.insecure:
        raise ConfigError(
            f"--replica-host: expected 127.0.0.1, ::1 or localhost without server.tokens_file and fleet.tls_ca, got "
            f"{host!r}; --insecure allows it in a private network"
        )


def _free_port(host: str) -> int:
    """Return a free port, chosen once because the port must not change when Ray restarts the ingress."""
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            port: int = listener.getsockname()[1]
    except (OSError, UnicodeError) as error:
        raise bind_error("server.port", host, 0) from error
    return port


def _settings(arguments: argparse.Namespace) -> list[str]:
    return settings_of(
        {
            "model.path": arguments.model,
            "server.host": arguments.host,
            "server.port": arguments.port,
            "server.insecure": arguments.insecure or None,
            "fleet.prefill_replicas": arguments.prefill_replicas,
            "fleet.decode_replicas": arguments.decode_replicas,
        }
    )
