"""The `radixkv` command: its parser, its exit codes, and how it reports errors.

Results are printed on stdout; statistics about a completion, progress and errors on stderr. An expected error is one
line; an unexpected one, which is a bug, has a traceback.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | a call, the service or a health check failed, the output could not be written, or there was an unexpected error |
| 2 | the command line or the configuration is wrong, or a package is missing |
| 128 + N | `chat --model` was ended by the signal N |
| 130 | interrupted by SIGINT, unless the command usually ends in this way, as `serve` and `top` |
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from radixkv import __version__
from radixkv.errors import ConfigError, RadixKVError
from radixkv.service.missing_package import MissingPackage

# The help line of each command. Its module, of the same name in this package, is imported only to run the command or to
# show its help; the function `add_arguments` adds the arguments to the command's parser, sets its description, and sets
# the default `command`, a function of the parsed arguments.
COMMANDS = {
    "serve": "serve a model until SIGTERM",
    "fleet": "serve a model with several engines on Ray until SIGTERM",
    "prefill": "prefill one prompt",
    "generate": "generate from a prompt",
    "chat": "chat with a model in the terminal",
    "health": "check whether a service accepts requests",
    "purge": "drop what is cached for a tenant, an adapter or a salt",
    "stats": "show what the cache holds and the counters of the service",
    "statement": "list what each tenant used in a month, as a table, CSV, JSON or an invoice",
    "drain": "shut a service down after its running requests",
    "adapters": "load, unload or list LoRA adapters",
    "public": "share prefixes, such as system prompts, between all tenants",
    "segments": "list what is cached, with size, heat, age, pins and retention",
    "explain": "say where a prompt diverges from what is cached, and what to change",
    "doctor": "say why prompts of a server or of a log are not reused, what that costs, and what to change",
    "top": "watch blocks, hit rate, time to first token, tenants and the hottest segments",
    "token": "make tokens for the credentials in server.tokens_file",
    "convert": "write a model directory from a GGUF file or a downloaded model",
    "trace": "convert a file of texts into a trace for simulate",
    "simulate": "replay a trace without a model to find the hit rate of a cache",
    "plan": "compute the memory and concurrency of a K/V cache",
}

# Top-level modules of the extra `engine` whose absence `main` reports in one line.
_ENGINE_MODULES = frozenset({"torch", "transformers", "safetensors", "prometheus_client", "tokenizers"})


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Adds an option's default to its help, unless the default is None or a boolean, or the help already states it."""

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
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` defaults to the process's arguments.

    Returns:
        The exit code.

    Raises:
        SystemExit: after --help, --version, an argument that does not parse, or a command that ends with a code of its
            own, such as `health` with 1 for a service that accepts no requests.
    """
    argv = sys.argv[1:] if argv is None else argv
    command_name = next((argument for argument in argv if not argument.startswith("-")), "")
    arguments = make_parser({command_name}).parse_args(argv)
    command: Callable[[argparse.Namespace], None] = arguments.command
    try:
        command(arguments)
        sys.stdout.flush()
    except (ConfigError, MissingPackage) as error:
        return _report(2, str(error))
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in _ENGINE_MODULES:
            raise
        from radixkv.config.needed_package import missing_package

        return _report(2, missing_package(package, "engine"))
    except RadixKVError as error:
        return _report(1, str(error))
    except BrokenPipeError:  # the reader of the output, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would report it again
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return _report(1, "output: no space left on the device")
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if (message := _call_failure(error)) is None:
            raise
        return _report(1, message)
    return 0


def make_parser(names: Collection[str] = COMMANDS) -> argparse.ArgumentParser:
    """Make the parser of the whole command; each command sets `command`, a function of the parsed arguments.

    Args:
        names: the commands whose modules are imported for their arguments. Of the others, the parser has only the name
            and the help line.
    """
    parser = _Parser(prog="radixkv", description="A prefix-caching prefill service for large language models.")
    parser.add_argument("--version", action="version", version=f"radixkv {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, help_line in COMMANDS.items():
        command = commands.add_parser(name, help=help_line)
        if name in names:
            importlib.import_module(f"radixkv.service.cli.{name}").add_arguments(command)
    return parser


def _call_failure(error: Exception) -> str | None:
    """Return the message of a failed gRPC call; None for any other error.

    This function does not import gRPC, which takes 0.1 s: if nothing else has imported it, the error is not from gRPC.
    """
    grpc = sys.modules.get("grpc")
    if grpc is None or not isinstance(error, grpc.RpcError):
        return None
    if not isinstance(error, grpc.Call):
        return str(error)
    errors = sys.modules.get("radixkv.service.client.errors")
    is_service_error = errors is not None and isinstance(error, errors.ServiceError)
    return f"{error.code().name}: {error if is_service_error else error.details()}"


def _report(code: int, message: str) -> int:
    with contextlib.suppress(OSError):  # print the output before the error if both go to one stream
        sys.stdout.flush()
    print(f"radixkv: {' '.join(message.split())}", file=sys.stderr)
    return code
