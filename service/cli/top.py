"""`radixkv top`: a terminal that shows what the cache holds and how it is used, live."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from radixkv.service.cli import argument_types
from radixkv.service.cli.connection import add_connection, client_of
from radixkv.service.cli.output import json_of
from radixkv.service.cli.top_screen import Reading, screen
from radixkv.service.client import Client

_PERIOD_S = 2.0
_MAX_TENANTS = 10
_MAX_SEGMENTS = 40
# The alternate screen, which leaves what was on the terminal as it was, without a cursor.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def add_top_command(top: argparse.ArgumentParser) -> None:
    """Add the arguments of `top` to its parser."""
    top.description = (
        "Watch what the cache holds and how it is used, until Ctrl-C. A terminal is redrawn; other outputs get one "
        "screen after the other, and --json prints one line for each."
    )
    top.add_argument(
        "--tenant", metavar="NAME", type=argument_types.name, help="list segments of this tenant (default: all)"
    )
    top.add_argument(
        "--interval",
        metavar="S",
        type=argument_types.period,
        default=_PERIOD_S,
        help="seconds between two screens",
    )
    top.add_argument("--once", action="store_true", help="show one screen, with the rates since the server started")
    add_connection(top)
    top.set_defaults(command=_top)


def _top(arguments: argparse.Namespace) -> None:
    is_drawn = sys.stdout.isatty() and not arguments.json and not arguments.once
    with client_of(arguments) as client, _alternate_screen(is_drawn):
        before: Reading | None = None
        try:
            while True:
                now = _read(client, arguments.tenant)
                if arguments.json:
                    print(_json(now), flush=True)
                elif is_drawn:
                    size = shutil.get_terminal_size()
                    lines = screen(now, before, size.columns, size.lines - 1)
                    print(
                        _HOME + "".join(f"{line}{_CLEAR_LINE}\n" for line in lines) + _CLEAR_BELOW, end="", flush=True
                    )
                else:
                    print("\n".join(screen(now, before)), end="\n" if arguments.once else "\n\n", flush=True)
                if arguments.once:
                    return
                before = now
                time.sleep(arguments.interval)
        except KeyboardInterrupt:  # which is how it ends in the ordinary way
            return


def _read(client: Client, tenant: str | None) -> Reading:
    stats = client.stats(max_tenants=_MAX_TENANTS)
    return Reading(stats, client.segments(tenant=tenant, page_size=_MAX_SEGMENTS, hottest_first=True))


def _json(reading: Reading) -> str:
    parts = {"stats": reading.stats, "hottest": reading.hottest}
    return json.dumps({name: json.loads(json_of(message)) for name, message in parts.items()})


@contextmanager
def _alternate_screen(is_used: bool) -> Iterator[None]:
    if is_used:
        print(_ENTER, end="", flush=True)
    try:
        yield
    finally:
        if is_used:
            print(_LEAVE, end="", flush=True)
