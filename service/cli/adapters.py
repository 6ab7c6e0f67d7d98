"""`radixkv adapters`: loads, unloads and lists adapters of a running service."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from radixkv.service.cli import argument_types
from radixkv.service.cli.connection import add_connection, client_of
from radixkv.service.cli.output import json_of
from radixkv.service.cli.terminal import aligned
from radixkv.v1.cache_pb2 import Adapter

_HEAD = ("adapter", "digest", "rank", "MB", "memory", "requests", "cached tokens", "state")
_DIGEST_CHARS = 12


def add_adapters_command(adapters: argparse.ArgumentParser) -> None:
    """Add the actions of `adapters` to its parser."""
    adapters.description = "Load, unload or list LoRA adapters."
    actions = adapters.add_subparsers(required=True, metavar="ACTION", help="load, unload or list")
    load: argparse.ArgumentParser = actions.add_parser(
        "load",
        help="load an adapter from a directory of the server",
        description="Load an adapter, or replace the one that has this name. Requests that have already arrived keep "
        "the previous weights, and nothing that was cached with them is reused.",
    )
    load.add_argument("name", type=argument_types.name, help="name of the adapter in requests")
    load.add_argument(
        "path",
        type=argument_types.name,
        help="directory that PEFT wrote, relative to model.adapter_directory of the server",
    )
    add_connection(load)
    load.set_defaults(command=_load)
    unload: argparse.ArgumentParser = actions.add_parser(
        "unload",
        help="unload an adapter",
        description="Unload an adapter. Requests that have already arrived finish; then its cached blocks are freed.",
    )
    unload.add_argument("name", type=argument_types.name, help="name of the adapter in requests")
    add_connection(unload)
    unload.set_defaults(command=_unload)
    listing = actions.add_parser("list", help="list the loaded adapters", description="List the loaded adapters.")
    add_connection(listing)
    listing.set_defaults(command=_list)


def adapter_rows(adapters: Iterable[Adapter]) -> list[tuple[str, ...]]:
    """Return a row of cells for each adapter, below the names of the columns."""
    return [_HEAD, *map(_row, adapters)]


def _load(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        answer = client.load_adapter(arguments.name, arguments.path)
    if arguments.json:
        print(json_of(answer))
        return
    digest = answer.adapter.digest[:_DIGEST_CHARS]
    replaced = answer.replaced_digest[:_DIGEST_CHARS] if answer.HasField("replaced_digest") else ""
    print(f"{arguments.name} is loaded: {digest}" + (f", in place of {replaced}" if replaced else ""))


def _unload(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        client.unload_adapter(arguments.name)
    print("{}" if arguments.json else f"{arguments.name} is unloaded")


def _list(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        answer = client.adapters()
    if arguments.json:
        print(json_of(answer))
    else:
        num_loaded = len({each.digest for each in answer.adapters if not each.is_draining})
        rows = aligned(adapter_rows(answer.adapters), is_right=True)
        print("\n".join([*rows, f"{num_loaded} of at most {answer.max_adapters} different adapters"]))


def _row(adapter: Adapter) -> tuple[str, ...]:
    return (
        adapter.name,
        adapter.digest[:_DIGEST_CHARS],
        str(adapter.rank),
        f"{adapter.num_bytes / 1e6:.1f}",
        "device" if adapter.is_on_device else "host",
        str(adapter.unfinished_requests),
        str(adapter.cached_tokens),
        "draining" if adapter.is_draining else "",
    )
