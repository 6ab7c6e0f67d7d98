"""`radixkv token new`: makes a token and its entry in a file of credentials."""

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
from radixkv.service.cli import argument_types
from radixkv.service.server.identity.credentials import parse_credentials

TOKEN_PREFIX = "rkv_"  # so that scanners for secrets find a token that lies where it should not

_NUM_RANDOM_BYTES = 32


def add_token_command(token: argparse.ArgumentParser) -> None:
    """Add the actions of `token` to its parser."""
    token.description = "Make tokens for the credentials in server.tokens_file."
    verbs = token.add_subparsers(required=True, metavar="ACTION", help="new")
    new: argparse.ArgumentParser = verbs.add_parser(
        "new",
        help="make a token",
        description="Make a token and print it on stdout. It can't be shown again, because only its hash is kept: the "
        "entry with the hash is added to --file, or printed on stderr without --file.",
    )
    new.add_argument(
        "--name", required=True, type=argument_types.name, metavar="NAME", help="name of the credential in the log"
    )
    role = new.add_mutually_exclusive_group(required=True)
    role.add_argument(
        "--tenant", type=argument_types.name, metavar="NAME", help="a token of this tenant (default: none)"
    )
    role.add_argument(
        "--router",
        metavar="all|NAME[,...]",
        type=argument_types.name,
        help="a token of a router, which may act for these tenants (default: none)",
    )
    role.add_argument("--admin", action="store_true", help="a token of an admin, for every call")
    role.add_argument("--reader", action="store_true", help="a token for metrics and statistics only")
    new.add_argument("--days", metavar="N", type=argument_types.days, help="days until it expires (default: never)")
    new.add_argument("--file", metavar="FILE", help="TOML file to add the entry to; created if missing (default: none)")
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
        tenants = "all" if arguments.router == "all" else arguments.router.split(",")
        lines += ['role = "router"', f"tenants = {_toml(tenants)}"]
    lines.append(f'token_sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"')
    if arguments.days is not None:
        expires = datetime.now(UTC) + timedelta(days=arguments.days)
        lines.append(f"expires = {expires.isoformat(timespec='seconds')}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # JSON strings and lists of them are TOML as well


def _add(path: Path, entry: str) -> None:
    """Append an entry in one write, so that a server that reads meanwhile sees all of it or none.

    Raises:
        ConfigError: the file can't be read or written, or would not be one of credentials; then it stays as it is.
    """
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        added = ("\n" if before else "") + entry
        parse_credentials(before + added)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(added)
    except UnicodeDecodeError as error:
        raise ConfigError("--file: expected UTF-8, got something else") from error
    except OSError as error:
        reason = f"{path}: {error.strerror}"
        raise ConfigError(f"--file: expected a file that can be read and written, got {reason}") from error
