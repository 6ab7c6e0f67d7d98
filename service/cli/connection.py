"""The options of a connection to a running service, which several commands share, and the client for these options."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from radixkv.config import ServerConfig
from radixkv.errors import ConfigError
from radixkv.service.cli import argument_types
from radixkv.service.cli.options import Option, add_options, flag

if TYPE_CHECKING:  # importing this loads gRPC, which --help and argument errors do not need
    from radixkv.service.client import Client

TOKEN_VARIABLE = "RADIXKV_TOKEN"

# For commands whose output can be restricted to one tenant.
TENANT = Option(
    "--tenant",
    "NAME",
    argument_types.name,
    "only this tenant (default: all, or your own with the credential of a tenant)",
)

_DEFAULT_ADDRESS = f"{ServerConfig().host}:{ServerConfig().port}"
_ADDRESS = Option("--address", "HOST:PORT", argument_types.name, "address of the service", _DEFAULT_ADDRESS)
_OPTIONS = (
    Option("--retries", "N", int, "number of retries of a call that fails with UNAVAILABLE, 0 to 4", 0),
    Option("--tls-ca", "FILE", None, "PEM file with the CA certificates to verify the server with (default: no TLS)"),
    Option("--token-file", "FILE", None, f"file with your token (default: the variable {TOKEN_VARIABLE})"),
    Option("--certificate", "FILE", None, "PEM file with your certificate (default: none)"),
    Option("--key", "FILE", None, "PEM file with the private key of your certificate (default: none)"),
    flag("--json", "print the whole response as JSON"),
)
_FILE_OPTIONS = ("tls_ca", "token_file", "certificate", "key")


def add_connection(command: argparse.ArgumentParser, timeout_s: float | None = None) -> None:
    """Add the options of a connection to a command, and `--json`.

    Args:
        command: the parser of the command.
        timeout_s: the default of `--timeout-s`; None for no deadline.
    """
    default = "" if timeout_s is not None else " (default: none)"
    timeout = Option("--timeout-s", "S", float, f"deadline of a call in seconds{default}", timeout_s)
    add_options(command.add_argument_group("the service"), (_ADDRESS, timeout, *_OPTIONS))


def client_of(arguments: argparse.Namespace) -> Client:
    """Return a client for the options of a connection.

    Raises:
        ConfigError: an option has a wrong value.
    """
    from radixkv.service.client import Client

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
        options = (option for option in _FILE_OPTIONS if getattr(arguments, option) == error.filename)
        option = f"--{next(options, 'file').replace('_', '-')}"
        raise ConfigError(f"{option}: expected a readable file, got {error.filename}: {error.strerror}") from error


def _token(arguments: argparse.Namespace) -> str | None:
    """Return the token. It is never an argument, because other users of the machine can read arguments of processes."""
    if arguments.token_file is not None:
        token = Path(arguments.token_file).read_text(encoding="ascii", errors="replace").strip()
        if not token:
            raise ConfigError(f"--token-file: {arguments.token_file} is empty; it must contain a token")
        return token
    return os.environ.get(TOKEN_VARIABLE) or None
