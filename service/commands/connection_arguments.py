"""Options of `radixkv` that say which service is called, and how."""

from __future__ import annotations

import argparse

from radixkv.config import ServerConfig
from radixkv.errors import ConfigError
from radixkv.service.client import Client
from radixkv.service.client.channel import MAX_RETRIES

_ADDRESS = f"{ServerConfig().host}:{ServerConfig().port}"


def add_connection(command: argparse.ArgumentParser) -> None:
    """Add the options of a connection to a command, and the form of its answer."""
    service = command.add_argument_group("the service")
    service.add_argument("--address", metavar="HOST:PORT", default=_ADDRESS, help="where it listens")
    service.add_argument("--timeout-s", metavar="S", type=float, help="seconds for a call (default: no limit)")
    service.add_argument(
        "--retries", metavar="N", type=int, default=0, help=f"further attempts after UNAVAILABLE, at most {MAX_RETRIES}"
    )
    service.add_argument("--json", action="store_true", help="print the whole answer as JSON")


def client_of(arguments: argparse.Namespace) -> Client:
    """Connect to the service.

    Raises:
        ConfigError: an option makes no sense.
    """
    try:
        return Client(arguments.address, timeout_s=arguments.timeout_s, retries=arguments.retries)
    except ValueError as error:
        raise ConfigError(str(error)) from error
