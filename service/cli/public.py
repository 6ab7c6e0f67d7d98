"""`radixkv public`: registers, unregisters and lists the public prefixes of a running service."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from radixkv.service.cli import argument_types
from radixkv.service.cli.connection import add_connection, client_of
from radixkv.service.cli.output import json_of
from radixkv.service.cli.prompt import add_tokens, prompt_of
from radixkv.service.cli.terminal import aligned
from radixkv.v1.cache_pb2 import PublicPrefix

_HEAD = ("public prefix", "tokens", "blocks", "adapter", "users", "uses", "state")


def add_public_command(public: argparse.ArgumentParser) -> None:
    """Add the actions of `public` to its parser."""
    public.description = "Share prefixes, such as system prompts, between all tenants. Each is computed once."
    actions = public.add_subparsers(required=True, metavar="ACTION", help="add, remove or list")
    add: argparse.ArgumentParser = actions.add_parser(
        "add",
        help="compute a prefix and share it",
        description="Compute a prefix and share it between all tenants until it is removed or the service ends.",
    )
    add.add_argument("name", type=argument_types.name, help="name of the prefix; no other public prefix may have it")
    add_tokens(add)
    add.add_argument(
        "--adapter",
        metavar="NAME",
        type=argument_types.name,
        default="",
        help="name of a loaded adapter (default: the model itself)",
    )
    add_connection(add)
    add.set_defaults(command=_add)
    remove: argparse.ArgumentParser = actions.add_parser(
        "remove",
        help="stop sharing a prefix",
        description="Stop sharing a prefix. Its blocks are freed when the requests that use them are finished.",
    )
    remove.add_argument("name", type=argument_types.name, help="name of the prefix")
    add_connection(remove)
    remove.set_defaults(command=_remove)
    listing = actions.add_parser("list", help="list the public prefixes", description="List the public prefixes.")
    add_connection(listing)
    listing.set_defaults(command=_list)


def _add(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        prompt = prompt_of(arguments, client)
        prefix = client.public.register(arguments.name, prompt.token_ids, adapter=arguments.adapter)
    print(json_of(prefix) if arguments.json else f"{prefix.name} is public: {_amount(prefix)}")


def _remove(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        prefix = client.public.unregister(arguments.name)
    if arguments.json:
        print(json_of(prefix))
    else:
        end = f"freed when {prefix.users} requests are finished" if prefix.users else "freed"
        print(f"{prefix.name} is no longer public: {_amount(prefix)}, {end}")


def _list(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        answer = client.public.list()
    print(json_of(answer) if arguments.json else "\n".join(aligned(_rows(answer.public_prefixes), is_right=True)))


def _amount(prefix: PublicPrefix) -> str:
    return f"{prefix.tokens} tokens in {prefix.blocks} blocks"


def _rows(prefixes: Iterable[PublicPrefix]) -> list[tuple[str, ...]]:
    return [_HEAD, *map(_row, prefixes)]


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
