"""The `radixkv` command: its parser, its exit codes, and one line on stderr for every error.

Exit codes: 0 done, 1 the service refused or can't be reached, 2 the command line or the configuration is wrong.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import grpc

from radixkv import __version__
from radixkv.config.needed_package import missing_package
from radixkv.errors import ConfigError, RadixKVError
from radixkv.service.commands.adapters_command import add_adapters_command
from radixkv.service.commands.client_commands import add_client_commands
from radixkv.service.commands.fleet_command import add_fleet_command
from radixkv.service.commands.health_command import add_health_command
from radixkv.service.commands.planning.plan_command import add_plan_command
from radixkv.service.commands.planning.simulate_command import add_simulate_command
from radixkv.service.commands.public_command import add_public_command
from radixkv.service.commands.seeing.segments_command import add_segments_command
from radixkv.service.commands.seeing.top_command import add_top_command
from radixkv.service.commands.serve_command import add_serve_command
from radixkv.service.commands.token_command import add_token_command
from radixkv.service.missing_package import MissingPackage

# Top-level modules that the extra `engine` brings.
_ENGINE_MODULES = frozenset(
    {
        "torch",
        "transformers",
        "safetensors",
        "prometheus_client",
        "tokenizers",
    }
)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Adds an option's default to its help, unless it is a flag or the help says what holds without it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if "(default: " in (action.help or "") or any(action.default is each for each in (None, False, True)):
            return action.help
        return super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    """Refuses in one line; argparse would print the usage first."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **arguments})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse unknown options here, where the command is known whose --help lists them."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` defaults to the process's arguments.

    Returns:
        The exit code.

    Raises:
        SystemExit: after --help, --version, or an argument that does not parse.
    """
    arguments = make_parser().parse_args(argv)
    command: Callable[[argparse.Namespace], None] = arguments.command
    try:
        command(arguments)
        sys.stdout.flush()
    except ConfigError as error:
        return _complain(2, str(error))
    except MissingPackage as error:
        return _complain(2, str(error))
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in _ENGINE_MODULES:
            raise
        return _complain(2, missing_package(package, "engine"))
    except grpc.RpcError as error:
        return _complain(1, _text_of(error))
    except RadixKVError as error:
        return _complain(1, str(error))
    except BrokenPipeError:  # the reader, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain when it ends
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return _complain(1, "output: no space left on the device")
    except KeyboardInterrupt:
        return 130
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the whole command; each command sets `command`, a function of the parsed arguments."""
    parser = _Parser(prog="radixkv", description="A prefix-caching prefill service for large language models.")
    parser.add_argument("--version", action="version", version=f"radixkv {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_serve_command(commands)
    add_fleet_command(commands)
    add_client_commands(commands)
    add_health_command(commands)
    add_adapters_command(commands)
    add_public_command(commands)
    add_segments_command(commands)
    add_top_command(commands)
    add_token_command(commands)
    add_simulate_command(commands)
    add_plan_command(commands)
    return parser


def _text_of(error: grpc.RpcError) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error)


def _complain(code: int, message: str) -> int:
    print(f"radixkv: {' '.join(message.split())}", file=sys.stderr)
    return code
