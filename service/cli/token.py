"""`radixkv token new`: makes a token, and its entry in a credentials file."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from radixkv.errors import ConfigError
from radixkv.service.cli.argument_types import days, name, names
from radixkv.service.cli.options import Option, add_action, add_choice, add_options, flag
from radixkv.service.server.auth.credentials import parse_credentials

TOKEN_PREFIX = "rkv_"  # so that secret scanners recognize leaked tokens

_NUM_RANDOM_BYTES = 32

_ROLES = (
    Option("--tenant", "NAME", name, "make a token for this tenant (default: none)"),
    Option("--router", "all|NAME[,...]", name, "make a token for a router that acts for these tenants (default: none)"),
    flag("--admin", "make a token for an admin, who may make every call"),
    flag("--reader", "make a token for metrics and statistics only"),
)
_NAME = Option("--name", "NAME", name, "name of the credential in the log", more={"required": True})
_ENTRY_OPTIONS = (
    Option("--days", "N", days, "days until it expires (default: never)"),
    Option("--file", "FILE", None, "TOML file to add the entry to; created if missing (default: none)"),
)


def add_arguments(token: argparse.ArgumentParser) -> None:
    """Add the actions of the command to its parser."""
    token.description = "Make tokens for the credentials in server.tokens_file."
    actions = token.add_subparsers(required=True, metavar="ACTION", help="new")
    new = add_action(
        actions,
        "new",
        "make a token",
        "Make a token and print it on stdout. It can't be shown again, because only its hash is stored: the entry with "
        "the hash is added to --file, or printed on stderr without --file.",
    )
    add_options(new, (_NAME,))
    add_choice(new, _ROLES, is_required=True)
    add_options(new, _ENTRY_OPTIONS)
    new.set_defaults(command=_new)


def _new(arguments: argparse.Namespace) -> None:
    token = TOKEN_PREFIX + secrets.token_urlsafe(_NUM_RANDOM_BYTES)
    entry = _entry(arguments, token)
    if arguments.file is None:
        parse_credentials(entry)
        print(entry, end="", file=sys.stderr)
    else:
        _add(Path(arguments.file), entry)
    print(token)


def _entry(arguments: argparse.Namespace, token: str) -> str:
    lines = ["[[credentials]]", f"name = {_toml(arguments.name)}"]
    if arguments.admin or arguments.reader:
        lines.append(f'role = "{"admin" if arguments.admin else "reader"}"')
    elif arguments.tenant is not None:
        lines += ['role = "tenant"', f"tenant = {_toml(arguments.tenant)}"]
    else:
        tenants = "all" if arguments.router == "all" else names(arguments.router)
        lines += ['role = "router"', f"tenants = {_toml(tenants)}"]
    lines.append(f'token_sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"')
    if arguments.days is not None:
        expires = datetime.now(UTC) + timedelta(days=arguments.days)
        lines.append(f"expires = {expires.isoformat(timespec='seconds')}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # JSON strings and lists of them are TOML as well


def _add(path: Path, entry: str) -> None:
    """Append an entry in one write, so that a server that reads the file at the same time sees the whole entry or none.

    Raises:
        ConfigError: the file can't be read or written, or would not be a valid credentials file. The file is unchanged.
    """
    try:
        old_text = path.read_text(encoding="utf-8") if path.exists() else ""
        added_text = ("\n" if old_text else "") + entry
        parse_credentials(old_text + added_text)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(added_text)
    except UnicodeDecodeError as error:
        raise ConfigError("--file: the file is not UTF-8") from error
    except OSError as error:
        reason = f"{path}: {error.strerror}"
        raise ConfigError(f"--file: expected a file that can be read and written, got {reason}") from error
