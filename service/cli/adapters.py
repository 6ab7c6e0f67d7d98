"""`radixkv adapters`: loads, unloads and lists LoRA adapters of a running service."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from radixkv.service.cli.argument_types import name
from radixkv.service.cli.connection import add_connection, client_of
from radixkv.service.cli.options import Option, add_action, add_options
from radixkv.service.cli.output import json_of
from radixkv.service.cli.terminal import align_columns
from radixkv.v1.cache_pb2 import Adapter

_HEADER = ("adapter", "digest", "rank", "MB", "memory", "requests", "cached tokens", "state")
_DIGEST_CHARS = 12

_NAME = Option("name", None, name, "name of the adapter in requests")
_PATH = Option("path", None, name, "directory that PEFT wrote, relative to model.adapter_directory of the server")


def add_arguments(adapters: argparse.ArgumentParser) -> None:
    """Add the actions of the command to its parser."""
    adapters.description = "Load, unload or list LoRA adapters."
    actions = adapters.add_subparsers(required=True, metavar="ACTION", help="load, unload or list")
    load = add_action(
        actions,
        "load",
        "load an adapter from a directory of the server",
        "Load an adapter, or replace the one that has this name. Requests that have already arrived keep the previous "
        "weights; later requests reuse nothing that was cached with the previous weights.",
    )
    add_options(load, (_NAME, _PATH))
    add_connection(load)
    load.set_defaults(command=_load)
    unload = add_action(
        actions,
        "unload",
        "unload an adapter",
        "Unload an adapter. Requests that have already arrived finish; then its cached blocks are freed.",
    )
    add_options(unload, (_NAME,))
    add_connection(unload)
    unload.set_defaults(command=_unload)
    listing = add_action(actions, "list", "list the loaded adapters")
    add_connection(listing)
    listing.set_defaults(command=_list)


def adapter_rows(adapters: Iterable[Adapter]) -> list[tuple[str, ...]]:
    """Return a header and one row of cells per adapter."""
    return [_HEADER, *map(_row, adapters)]


def _load(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        response = client.load_adapter(arguments.name, arguments.path)
    if arguments.json:
        print(json_of(response))
        return
    digest = response.adapter.digest[:_DIGEST_CHARS]
    has_replaced = response.HasField("replaced_digest")
    replaced = f", in place of {response.replaced_digest[:_DIGEST_CHARS]}" if has_replaced else ""
    print(f"{arguments.name} is loaded: {digest}{replaced}")


def _unload(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        client.unload_adapter(arguments.name)
    print("{}" if arguments.json else f"{arguments.name} is unloaded")


def _list(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        response = client.adapters()
    if arguments.json:
        print(json_of(response))
    else:
        num_loaded = len({each.digest for each in response.adapters if not each.is_draining})
        rows = align_columns(adapter_rows(response.adapters), is_right=True)
        print("\n".join([*rows, f"{num_loaded} of at most {response.max_adapters} different adapters"]))


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
