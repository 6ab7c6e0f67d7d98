"""Options of `radixkv` that say which service is called, and how."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from radixkv.config import ServerConfig
from radixkv.errors import ConfigError
from radixkv.service.cli import argument_types
from radixkv.service.client import Client
from radixkv.service.client.connection import MAX_RETRIES

TOKEN_VARIABLE = "RADIXKV_TOKEN"

_ADDRESS = f"{ServerConfig().host}:{ServerConfig().port}"


def add_connection(command: argparse.ArgumentParser) -> None:
    """Add the options of a connection to a command, and the form of its answer."""
    service = command.add_argument_group("the service")
    service.add_argument(
        "--address", metavar="HOST:PORT", type=argument_types.name, default=_ADDRESS, help="address of the service"
    )
    service.add_argument("--timeout-s", metavar="S", type=float, help="deadline of a call in seconds (default: none)")
    service.add_argument(
        "--retries",
        metavar="N",
        type=int,
        default=0,
        help=f"retries of a call that is UNAVAILABLE, at most {MAX_RETRIES}",
    )
    service.add_argument(
        "--tls-ca", metavar="FILE", help="PEM file with the authority of its certificate (default: no TLS)"
    )
    service.add_argument(
        "--token-file", metavar="FILE", help=f"file with your token (default: the variable {TOKEN_VARIABLE})"
    )
    service.add_argument("--certificate", metavar="FILE", help="PEM file with your certificate (default: none)")
    service.add_argument("--key", metavar="FILE", help="PEM file with its private key (default: none)")
    service.add_argument("--json", action="store_true", help="print the whole answer as JSON")


def client_of(arguments: argparse.Namespace) -> Client:
    """Connect to the service.

    Raises:
        ConfigError: an option makes no sense.
    """
    try:
        return Client(
            arguments.address,
            timeout_s=arguments.timeout_s,
            retries=arguments.retries,
            tls_ca=arguments.tls_ca,
            token=_token(arguments),
            certificate=arguments.certificate,
            key=arguments.key,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        options = ("tls_ca", "token_file", "certificate", "key")
        named = (name for name in options if getattr(arguments, name) == error.filename)
        option = f"--{next(named, 'file').replace('_', '-')}"
        raise ConfigError(f"{option}: expected a readable file, got {error.filename}: {error.strerror}") from error


def _token(arguments: argparse.Namespace) -> str | None:
    """Return the caller's token; never from an argument, which others on the machine could read."""
    if arguments.token_file is not None:
        token = Path(arguments.token_file).read_text(encoding="ascii", errors="replace").strip()
        if not token:
            raise ConfigError(f"{arguments.token_file}: expected a token, got an empty file")
        return token
    return os.environ.get(TOKEN_VARIABLE) or None
