"""`radixkv drain`: shuts a running service down."""

from __future__ import annotations

import argparse

from radixkv.service.cli.connection import add_connection, client_of


def add_arguments(drain: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    drain.description = "Shut a service down as SIGTERM does: it refuses new requests, finishes running ones and exits."
    add_connection(drain)
    drain.set_defaults(command=_drain)


def _drain(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        client.drain()
    print("{}" if arguments.json else "draining")
