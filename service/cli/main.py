"""The `radixkv` command: its parser, its exit codes, and how it reports errors.

Answers go to stdout; statistics about an answer, progress and errors go to stderr. An expected error is one line on
stderr; an unexpected one, which is a bug, has a traceback.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | a call or the service failed, the output could not be written, or there was an unexpected error |
| 2 | the command line or the configuration is wrong, or a package is missing |
| 130 | interrupted by SIGINT |
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, NoReturn

from radixkv import __version__
from radixkv.errors import ConfigError, RadixKVError
from radixkv.service.missing_package import MissingPackage


class Command(NamedTuple):
    """A command of `radixkv`. Its module is imported only to run the command or to show its help.

    Attributes:
        module: where the command is, below `radixkv.service.cli`.
        add: name of the module's function that is called with the command's parser. It sets the description, adds the
            arguments, and sets the default `command`, a function of the parsed arguments.
        help: the line that `radixkv --help` shows.
    """

    module: str
    add: str
    help: str


COMMANDS = {
    "serve": Command("serve", "add_serve_command", "serve a model until SIGTERM"),
    "fleet": Command("fleet", "add_fleet_command", "serve a model with several engines on Ray until SIGTERM"),
    "prefill": Command("client_commands", "add_prefill_command", "prefill one prompt"),
    "generate": Command("generate", "add_generate_command", "generate from a prompt"),
    "health": Command("health", "add_health_command", "check whether a service accepts requests"),
    "purge": Command("client_commands", "add_purge_command", "drop what is cached for a tenant, an adapter or a salt"),
    "stats": Command(
        "client_commands", "add_stats_command", "show what the cache holds and the counters of the service"
    ),
    "drain": Command("client_commands", "add_drain_command", "shut a service down after its running requests"),
    "adapters": Command("adapters", "add_adapters_command", "load, unload or list LoRA adapters"),
    "public": Command(
        "public",
        "add_public_command",
        "share prefixes, such as system prompts, between all tenants",
    ),
    "segments": Command(
        "segments",
        "add_segments_command",
        "list what is cached, with size, heat, age, pins and retention",
    ),
    "top": Command(
        "top",
        "add_top_command",
        "watch blocks, hit rate, time to first token, tenants and the hottest segments",
    ),
    "token": Command("token", "add_token_command", "make tokens for the credentials in server.tokens_file"),
    "simulate": Command(
        "simulate",
        "add_simulate_command",
        "replay a trace without a model to find the hit rate of a cache",
    ),
    "plan": Command("plan", "add_plan_command", "compute the memory and concurrency of a K/V cache"),
}

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
    """Adds an option's default to its help, unless it is a flag or the help already states the default."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if "(default: " in (action.help or "") or any(action.default is each for each in (None, False, True)):
            return action.help
        return super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line; argparse would print the usage first."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **arguments})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse unknown options here, so that the error names the command whose --help lists the options."""
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
    argv = sys.argv[1:] if argv is None else argv
    named = next((argument for argument in argv if not argument.startswith("-")), "")
    arguments = make_parser({named}).parse_args(argv)
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
        from radixkv.config.needed_package import missing_package

        return _complain(2, missing_package(package, "engine"))
    except RadixKVError as error:
        return _complain(1, str(error))
    except BrokenPipeError:  # the reader, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would report it again at exit
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return _complain(1, "output: no space left on the device")
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if (message := _call_failure(error)) is None:
            raise
        return _complain(1, message)
    return 0


def make_parser(names: Collection[str] = COMMANDS) -> argparse.ArgumentParser:
    """Make the parser of the whole command; each command sets `command`, a function of the parsed arguments.

    Args:
        names: the commands whose modules are imported for their arguments. The parser knows the others by name and
            help line only.
    """
    parser = _Parser(prog="radixkv", description="A prefix-caching prefill service for large language models.")
    parser.add_argument("--version", action="version", version=f"radixkv {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        own = commands.add_parser(name, help=command.help)
        if name in names:
            getattr(importlib.import_module(f"radixkv.service.cli.{command.module}"), command.add)(own)
    return parser


def _call_failure(error: Exception) -> str | None:
    """Return the message of a failed gRPC call; None for any other error.

    gRPC is not imported for this: it takes 0.1 s, and a command that has not imported it has no such error.
    """
    grpc = sys.modules.get("grpc")
    if grpc is None or not isinstance(error, grpc.RpcError):
        return None
    if not isinstance(error, grpc.Call):
        return str(error)
    errors = sys.modules.get("radixkv.service.client.errors")
    is_explained = errors is not None and isinstance(error, errors.ServiceError)
    return f"{error.code().name}: {error if is_explained else error.details()}"


def _complain(code: int, message: str) -> int:
    with contextlib.suppress(OSError):  # output comes before the error if both streams are one
        sys.stdout.flush()
    print(f"radixkv: {' '.join(message.split())}", file=sys.stderr)
    return code
