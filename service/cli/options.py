"""Command-line options as tables: one `Option` per option, which `add_options` passes to argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

Parser = argparse.ArgumentParser | argparse._ArgumentGroup  # options may be added to a parser or to a group of it


class Option(NamedTuple):
    """One option or positional argument of a command.

    Attributes:
        name: such as `--tenant`; without dashes for a positional argument.
        metavar: name of the value in the help; None for argparse's default, such as the values of `choices`.
        type: function that parses the value, see `argument_types`; None to keep the text.
        help: one line. The default is appended, unless it is None or a boolean, or the help already states it.
        default: value of an option that is not given.
        more: further arguments of `argparse.ArgumentParser.add_argument`.
    """

    name: str
    metavar: str | None
    type: Callable[[str], Any] | None
    help: str
    default: Any = None
    more: Mapping[str, Any] = MappingProxyType({})


def flag(name: str, help: str) -> Option:
    """Return an option without a value."""
    return Option(name, None, None, help, more={"action": "store_true"})


def add_options(parser: Parser, options: Sequence[Option]) -> None:
    """Add options to a parser."""
    for option in options:
        settings = {"metavar": option.metavar, "type": option.type, "default": option.default}
        settings = {name: value for name, value in settings.items() if value is not None}
        parser.add_argument(option.name, help=option.help, **settings, **option.more)


def add_choice(parser: Parser, options: Sequence[Option], *, is_required: bool = False) -> None:
    """Add options of which at most one may be given, or exactly one."""
    add_options(parser.add_mutually_exclusive_group(required=is_required), options)


def add_action(actions: Any, name: str, help: str, description: str = "") -> argparse.ArgumentParser:
    """Add an action, such as `load` of `radixkv adapters`, and return its parser.

    Args:
        actions: what `add_subparsers` of the command returned.
        name: name of the action.
        help: the line in the help of the command.
        description: description of the action; empty for `help` as a sentence.
    """
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=help, description=description or f"{help[0].upper()}{help[1:]}."
    )
    return parser
