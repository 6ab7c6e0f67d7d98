"""Commands that call a running service: prefill, purge, stats, drain."""

from __future__ import annotations

import argparse
import shutil
import sys
import time

from radixkv.errors import ConfigError
from radixkv.service.cli import argument_types
from radixkv.service.cli.connection import add_connection, client_of
from radixkv.service.cli.output import json_of, prefill_table, purge_table, stats_table
from radixkv.service.cli.prompt import add_prompt, prompt_of, prompt_options
from radixkv.service.client import Client

_WATCH_PERIOD_S = 2.0
_HOME_AND_CLEAR = "\x1b[H\x1b[J"  # cursor to the top left, then everything below it is erased


def add_prefill_command(prefill: argparse.ArgumentParser) -> None:
    """Add the arguments of `prefill` to its parser."""
    prefill.description = "Prefill one prompt. Prints the next token, and how many tokens of the prompt were cached."
    add_prompt(prefill)
    prefill.add_argument(
        "--top-logprobs",
        metavar="N",
        type=argument_types.count,
        default=0,
        help="number of most likely next tokens to print",
    )
    add_connection(prefill)
    prefill.set_defaults(command=_prefill)


def add_purge_command(purge: argparse.ArgumentParser) -> None:
    """Add the arguments of `purge` to its parser."""
    purge.description = "Drop what is cached for a tenant, an adapter or a salt, or drop everything."
    for name in ("tenant", "adapter", "salt"):
        purge.add_argument(
            f"--{name}", metavar="NAME", type=argument_types.name, help=f"only of this {name} (default: any)"
        )
    purge.add_argument(
        "--all",
        action="store_true",
        help="drop everything; with the token of a tenant, everything of that tenant",
    )
    add_connection(purge)
    purge.set_defaults(command=_purge)


def add_stats_command(stats: argparse.ArgumentParser) -> None:
    """Add the arguments of `stats` to its parser."""
    stats.description = "Show what the cache holds and the counters of the service."
    stats.add_argument(
        "--watch",
        metavar="S",
        type=argument_types.period,
        nargs="?",
        const=_WATCH_PERIOD_S,
        help=f"refresh every S seconds until Ctrl-C, every {_WATCH_PERIOD_S:g} seconds without a number; a terminal "
        "is redrawn, other outputs get one table after the other, and --json prints one line each (default: show once)",
    )
    stats.add_argument(
        "--tenant", metavar="NAME", type=argument_types.name, help="only what this tenant may see (default: all)"
    )
    add_connection(stats)
    stats.set_defaults(command=_stats)


def add_drain_command(drain: argparse.ArgumentParser) -> None:
    """Add the arguments of `drain` to its parser."""
    drain.description = "Shut a service down as SIGTERM does: it refuses new requests, finishes running ones and exits."
    add_connection(drain)
    drain.set_defaults(command=_drain)


def _prefill(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        prompt = prompt_of(arguments, client)
        options = prompt_options(arguments, len(prompt.token_ids))
        answer = client.prefill(prompt.token_ids, top_logprobs=arguments.top_logprobs, **options)
    text = None if prompt.tokenizer is None else prompt.tokenizer.decode([answer.next_token_id])
    print(json_of(answer, next_token_text=text) if arguments.json else prefill_table(answer, text))


def _purge(arguments: argparse.Namespace) -> None:
    names = {"tenant": arguments.tenant, "adapter": arguments.adapter, "salt": arguments.salt}
    if arguments.all is not (set(names.values()) == {None}):
        raise ConfigError("purge: expected either --all, or one or more of --tenant, --adapter, --salt")
    with client_of(arguments) as client:
        purged = client.purge(**names, everything=arguments.all)
    print(json_of(purged) if arguments.json else purge_table(purged))


def _drain(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        client.drain()
    print("{}" if arguments.json else "draining")


def _stats(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        if arguments.watch is None:
            stats = client.stats(tenant=arguments.tenant)
            print(json_of(stats) if arguments.json else stats_table(stats))
        else:
            _watch(client, arguments.watch, arguments.tenant, as_json=arguments.json)


def _watch(client: Client, period_s: float, tenant: str | None, *, as_json: bool) -> None:
    """Print the stats until Ctrl-C, which is how it ends in the ordinary way."""
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
