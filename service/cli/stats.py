"""`radixkv stats`: what the cache holds and the counters of the service, once or until Ctrl-C."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from typing import TYPE_CHECKING

from radixkv.service.cli.argument_types import name, period
from radixkv.service.cli.connection import add_connection, client_of
from radixkv.service.cli.options import Option, add_options
from radixkv.service.cli.output import json_of, stats_table

if TYPE_CHECKING:
    from radixkv.service.client import Client

_PERIOD_S = 2.0
_HOME_AND_CLEAR = "\x1b[H\x1b[J"  # moves the cursor to the top left and erases everything below it
_OPTIONS = (
    Option(
        "--watch",
        "S",
        period,
        f"refresh every S seconds until Ctrl-C, every {_PERIOD_S:g} seconds without a number; a terminal is redrawn, "
        "other outputs get one table after the other, and --json prints one line each (default: show once)",
        more={"nargs": "?", "const": _PERIOD_S},
    ),
    Option(
        "--tenant",
        "NAME",
        name,
        "only what this tenant may see (default: everything, or what you may see with the credential of a tenant)",
    ),
)


def add_arguments(stats: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    stats.description = "Show what the cache holds and the counters of the service."
    add_options(stats, _OPTIONS)
    add_connection(stats)
    stats.set_defaults(command=_stats)


def _stats(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        if arguments.watch is None:
            stats = client.stats(tenant=arguments.tenant)
            print(json_of(stats) if arguments.json else stats_table(stats))
        else:
            _watch(client, arguments.watch, arguments.tenant, as_json=arguments.json)


def _watch(client: Client, period_s: float, tenant: str | None, *, as_json: bool) -> None:
    """Print the statistics until Ctrl-C."""
    is_redrawn = sys.stdout.isatty() and not as_json
    try:
        while True:
            stats = client.stats(tenant=tenant)
            if as_json:
                print(json_of(stats, indent=None), flush=True)
            elif is_redrawn:
                lines = stats_table(stats).splitlines()[: shutil.get_terminal_size().lines - 1]
                print(_HOME_AND_CLEAR + "\n".join(lines), flush=True)
            else:
                print(stats_table(stats), end="\n\n", flush=True)
            time.sleep(period_s)
    except KeyboardInterrupt:
        return
