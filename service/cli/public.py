"""`radixkv public`: registers, unregisters and lists the public prefixes of a running service."""

from __future__ import annotations

import argparse

from radixkv.service.cli.argument_types import name
from radixkv.service.cli.connection import add_connection, client_of
from radixkv.service.cli.options import Option, add_action, add_options
from radixkv.service.cli.output import json_of
from radixkv.service.cli.prompt import add_tokens, prompt_of
from radixkv.service.cli.terminal import align_columns
from radixkv.v1.cache_pb2 import PublicPrefix

_HEADER = ("public prefix", "tokens", "blocks", "adapter", "users", "uses", "state")

_NAME = Option("name", None, name, "name of the prefix")
_NEW_NAME = Option("name", None, name, "name of the prefix; no other public prefix may have it")
_ADAPTER = Option("--adapter", "NAME", name, "name of a loaded adapter (default: the base model)", "")


def add_arguments(public: argparse.ArgumentParser) -> None:
    """Add the actions of the command to its parser."""
    public.description = "Share prefixes, such as system prompts, between all tenants. Each is computed once."
    actions = public.add_subparsers(required=True, metavar="ACTION", help="add, remove or list")
    add = add_action(
        actions,
        "add",
        "compute a prefix and share it",
        "Compute a prefix and share it between all tenants until it is removed or the service ends.",
    )
    add_options(add, (_NEW_NAME,))
    add_tokens(add)
    add_options(add, (_ADAPTER,))
    add_connection(add)
    add.set_defaults(command=_add)
    remove = add_action(
        actions,
        "remove",
        "stop sharing a prefix",
        "Stop sharing a prefix. Its blocks are freed when the requests that use them are finished.",
    )
    add_options(remove, (_NAME,))
    add_connection(remove)
    remove.set_defaults(command=_remove)
    listing = add_action(actions, "list", "list the public prefixes")
    add_connection(listing)
    listing.set_defaults(command=_list)


def _add(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        prompt = prompt_of(arguments, client)
        prefix = client.public.register(arguments.name, prompt.token_ids, adapter=arguments.adapter)
    print(json_of(prefix) if arguments.json else f"{prefix.name} is public: {_size(prefix)}")


def _remove(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        prefix = client.public.unregister(arguments.name)
    if arguments.json:
        print(json_of(prefix))
    else:
        end = f"freed when {prefix.users} requests are finished" if prefix.users else "freed"
        print(f"{prefix.name} is no longer public: {_size(prefix)}, {end}")


def _list(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        response = client.public.list()
    rows = [_HEADER, *map(_row, response.public_prefixes)]
    print(json_of(response) if arguments.json else "\n".join(align_columns(rows, is_right=True)))


def _size(prefix: PublicPrefix) -> str:
    return f"{prefix.tokens} tokens in {prefix.blocks} blocks"


def _row(prefix: PublicPrefix) -> tuple[str, ...]:
    return (
        prefix.name,
        str(prefix.tokens),
        str(prefix.blocks),
        ", ".join(prefix.adapter_names),
        str(prefix.users),
        str(prefix.uses),
        "" if prefix.is_computed else "computing",
    )
