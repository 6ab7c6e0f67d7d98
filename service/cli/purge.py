"""`radixkv purge`: drops what is cached for a tenant, an adapter or a salt, or everything."""

from __future__ import annotations

import argparse

from radixkv.errors import ConfigError
from radixkv.service.cli.argument_types import name
from radixkv.service.cli.connection import add_connection, client_of
from radixkv.service.cli.options import Option, add_options, flag
from radixkv.service.cli.output import json_of
from radixkv.service.cli.terminal import align_columns
from radixkv.v1.cache_pb2 import PurgeResponse

_NAMES = ("tenant", "adapter", "salt")
_OPTIONS = (
    *(Option(f"--{each}", "NAME", name, f"drop only what belongs to this {each} (default: any)") for each in _NAMES),
    flag("--all", "drop everything; with the token of a tenant, everything of that tenant"),
)


def add_arguments(purge: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    purge.description = "Drop what is cached for a tenant, an adapter or a salt, or drop everything."
    add_options(purge, _OPTIONS)
    add_connection(purge)
    purge.set_defaults(command=_purge)


def _purge(arguments: argparse.Namespace) -> None:
    names = {each: getattr(arguments, each) for each in _NAMES}
    has_name = any(value is not None for value in names.values())
    if arguments.all == has_name:
        raise ConfigError("purge: expected either --all, or one or more of --tenant, --adapter, --salt")
    with client_of(arguments) as client:
        purged = client.purge(**names, everything=arguments.all)
    print(json_of(purged) if arguments.json else purge_table(purged))


def purge_table(response: PurgeResponse) -> str:
    """Return a table of the blocks that a purge freed."""
    rows = [("blocks freed", str(response.freed_blocks)), ("  still in use", str(response.pinned_blocks))]
    for store in response.stores:
        deleted = f"{store.blocks} blocks" if store.HasField("blocks") else "not reachable; the purge will be retried"
        rows.append((f"deleted in {store.store}", deleted))
    return "\n".join(align_columns(rows))
