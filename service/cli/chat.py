"""`radixkv chat`: a conversation in the terminal, which shows what each turn reuses."""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, NoReturn

from radixkv.errors import ConfigError
from radixkv.service.cli.argument_types import name, positive, seed
from radixkv.service.cli.connection import add_connection, client_of
from radixkv.service.cli.options import Option, add_options
from radixkv.service.cli.terminal import printable

if TYPE_CHECKING:  # importing this loads gRPC, which --help does not need
    from radixkv.service.client import Client

_DESCRIPTION = (
    "Chat with the model of a running service, or with --model, which is served as long as the chat lasts. Each line "
    "of input is a turn. /reset begins a new conversation; Ctrl-D or /exit ends the chat, and Ctrl-C ends an answer. "
    "After each answer, stderr shows the time to its first token and how many tokens of the conversation were reused."
)
_OPTIONS = (
    Option(
        "--model",
        "SOURCE",
        name,
        "model to serve for this chat, as in `radixkv serve --model` (default: the model of the service at --address)",
    ),
    Option("--system", "TEXT", name, "system message (default: none)"),
    Option("--tenant", "NAME", name, "tenant (default: none)", ""),
    Option("--max-new-tokens", "N", positive, "maximum number of tokens of an answer", 512),
    Option("--temperature", "T", float, "sampling temperature; 0 is greedy", 0.0),
    Option("--top-p", "P", float, "sample from the smallest set of tokens with this cumulative probability", 1.0),
    Option("--frequency-penalty", "X", float, "makes tokens less likely the more often an answer contains them", 0.0),
    Option("--seed", "N", seed, "seed of the sampling (default: random)"),
)
_STOP_TIMEOUT_S = 30.0
_LISTENING = "listening on "


def add_arguments(chat: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    chat.description = _DESCRIPTION
    add_options(chat, _OPTIONS)
    add_connection(chat)
    chat.set_defaults(command=_chat)


def _chat(arguments: argparse.Namespace) -> None:
    if arguments.json:
        raise ConfigError("--json: chat has no such output; use radixkv generate --chat --json")
    with contextlib.ExitStack() as stack:
        if arguments.model is not None:
            for signal_number in (signal.SIGTERM, signal.SIGHUP):  # the server must not outlive the chat
                previous_handler = signal.signal(signal_number, _exit)
                stack.callback(signal.signal, signal_number, previous_handler)
            arguments.address = stack.enter_context(_run_server(arguments.model))
        session = ChatSession(stack.enter_context(client_of(arguments)), arguments)
        for line in _turns():
            if line == "/exit":
                break
            if line == "/reset":
                session.reset()
            elif line:
                session.ask(line)


class ChatSession:
    """The conversation so far, and the options of its completions.

    Args:
        client: client that is connected to the service.
        arguments: arguments of the command.
    """

    def __init__(self, client: Client, arguments: argparse.Namespace) -> None:
        self._client = client
        self._system = arguments.system
        self._options: dict[str, Any] = {
            each: getattr(arguments, each)
            for each in ("tenant", "max_new_tokens", "temperature", "top_p", "frequency_penalty", "seed")
        }
        self._messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forget all turns."""
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def ask(self, text: str) -> None:
        """Send a turn and print its answer. A turn that fails is reported and removed; Ctrl-C ends the answer.

        Raises:
            ConfigError: the model cannot chat.
            ConnectError: the service cannot be reached.
        """
        from radixkv.service.client import ConnectError, ServiceError

        self._messages.append({"role": "user", "content": text})
        try:
            answer = self._print_answer()
        except ConnectError:
            raise
        except ServiceError as error:
            print(f"radixkv: {error.code().name}: {error}", file=sys.stderr)
            self._messages.pop()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"chat: {error}") from error
        else:
            self._messages.append({"role": "assistant", "content": answer})

    def _print_answer(self) -> str:
        from radixkv.service.client import ServiceError

        start_s = time.monotonic()
        answer = self._client.chat(self._messages, **self._options)
        first_token_s: float | None = None
        cached_tokens = computed_tokens = 0
        is_terminal = sys.stdout.isatty()
        try:
            with contextlib.suppress(KeyboardInterrupt), contextlib.closing(answer):
                for chunk in answer:
                    if first_token_s is None:
                        first_token_s = time.monotonic() - start_s
                        cached_tokens, computed_tokens = chunk.usage.cached_tokens, chunk.usage.computed_tokens
                    print(printable(chunk.text, keep="\n\t") if is_terminal else chunk.text, end="", flush=True)
        except ServiceError:
            if answer.text:  # the error starts on a new line
                print(flush=True)
            raise
        print(flush=True)
        if first_token_s is not None:
            prompt_tokens = cached_tokens + computed_tokens
            print(
                f"[first token after {1000 * first_token_s:,.0f} ms; {cached_tokens:,} of {prompt_tokens:,} tokens "
                "from the cache]",
                file=sys.stderr,
                flush=True,
            )
        return answer.text


def _turns() -> Iterator[str]:
    """Read turns, with a prompt and line editing if stdin is a terminal."""
    if not sys.stdin.isatty():
        yield from map(str.strip, sys.stdin)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives `input` line editing and history
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # clears the line, as in a shell
            print()


@contextlib.contextmanager
def _run_server(model: str) -> Iterator[str]:
    """Serve a model on a free port of this machine. Yields the address.

    Raises:
        ConfigError: the server does not start. The message is the last line of its log.
    """
    print(f"loading {model}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "radixkv", "serve", "--model", model, "--port", "0"]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
        # In a session of its own, so that Ctrl-C ends an answer and not the server.
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True) as server,
    ):
        try:
            assert server.stdout is not None, "it is a pipe"
            line = next((line for line in server.stdout if line.startswith(_LISTENING)), None)
            if line is None:
                raise ConfigError(_last_line(log))
            yield line.removeprefix(_LISTENING).strip()
        finally:
            server.terminate()
            try:
                server.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()


def _last_line(log: IO[str]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()]
    return lines[-1].removeprefix("radixkv: ") if lines else "the server ended without a message"


def _exit(signal_number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signal_number)
