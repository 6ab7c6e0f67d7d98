"""Options of `radixkv` that describe a prompt: its tokens, its identity, its use of the cache, its priorities."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import grpc

from radixkv.api.retention import Retention
from radixkv.errors import ConfigError, InvalidRequest
from radixkv.service.cli import argument_types
from radixkv.service.client import Client
from radixkv.service.client.requests import PromptOptions
from radixkv.service.text.tokenizer import Tokenizer

_CHOICES = "choose --tokenizer DIR, --bytes or --tokens"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and the tokenizer that made its token ids; None if they were given."""

    token_ids: list[int]
    tokenizer: Tokenizer | None


def add_tokens(command: argparse.ArgumentParser) -> None:
    """Add the options of a prompt's tokens to a command."""
    group = command.add_argument_group(
        "the prompt", "Give one of --text, --text-file, --tokens and --tokens-file. The value - reads stdin."
    )
    prompt = group.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--text", metavar="TEXT|-", type=_text, help="text, for the tokenizer of the served model")
    prompt.add_argument("--text-file", metavar="FILE", dest="text", type=_read_text, help="file with the text")
    prompt.add_argument("--tokens", metavar="1,2,3|-", type=_tokens, help="token ids, separated by commas or spaces")
    prompt.add_argument("--tokens-file", metavar="FILE", dest="tokens", type=_read_tokens, help="file with token ids")
    text = group.add_mutually_exclusive_group()
    text.add_argument(
        "--tokenizer", metavar="DIR", help="directory with a tokenizer for the text (default: that of the model)"
    )
    text.add_argument(
        "--bytes", action="store_true", help="use the bytes of the text as token ids, without a tokenizer"
    )


def add_prompt(command: argparse.ArgumentParser) -> None:
    """Add the options of a prompt to a command: its tokens, its identity and its use of the cache."""
    add_tokens(command)
    identity = command.add_argument_group("identity", "Requests share cached tokens only if all three are equal.")
    for name in ("tenant", "adapter", "salt"):
        identity.add_argument(
            f"--{name}", metavar="NAME", type=argument_types.name, default="", help=f"{name} (default: none)"
        )
    use = command.add_argument_group("cache and queue")
    use.add_argument("--no-read-cache", action="store_true", help="compute every token, without reuse")
    use.add_argument("--no-write-cache", action="store_true", help="cache nothing for later requests")
    use.add_argument(
        "--retention-priority",
        metavar="0..100",
        type=argument_types.points,
        help="priority in the cache; unused blocks with a lower one are evicted first (default: 50)",
    )
    use.add_argument(
        "--ttl-s",
        metavar="S",
        type=float,
        help="seconds that --retention-priority lasts (default: as long as the prompt is cached)",
    )
    use.add_argument(
        "--urgency",
        metavar="0..100",
        type=argument_types.points,
        help="priority among the requests of the tenant; a point counts as a second of waiting (default: 50)",
    )


def add_chat(command: argparse.ArgumentParser) -> None:
    """Add the options of a conversation to a command that has those of a prompt."""
    group = command.add_argument_group("the conversation")
    group.add_argument(
        "--chat", action="store_true", help="send the text as a user message in the chat template of the model"
    )
    group.add_argument(
        "--system",
        metavar="TEXT",
        type=argument_types.name,
        help="with --chat, the system message (default: none)",
    )


def prompt_of(arguments: argparse.Namespace, client: Client) -> Prompt:
    """Return the prompt. Asks the service for its tokenizer if the prompt is text, and nothing else is chosen.

    Raises:
        ConfigError: the options do not go together, or there is no tokenizer, or the text is not for one.
    """
    is_chat, system = getattr(arguments, "chat", False), getattr(arguments, "system", None)
    if system is not None and not is_chat:
        raise ConfigError("--system: expected --chat with it, got none")
    others = {"--tokenizer": arguments.tokenizer is not None, "--bytes": arguments.bytes, "--chat": is_chat}
    if arguments.tokens is not None:
        for name in (name for name, is_given in others.items() if is_given):
            raise ConfigError(f"{name}: expected --text or --text-file with it, got --tokens")
        return Prompt(arguments.tokens, None)
    if arguments.bytes:
        if is_chat:
            raise ConfigError("--chat: expected a tokenizer, got --bytes")
        return Prompt(list(arguments.text), None)
    tokenizer = _served_tokenizer(client) if arguments.tokenizer is None else _tokenizer_in(arguments.tokenizer)
    text = _decoded(arguments.text)
    if not is_chat:
        return Prompt(tokenizer.encode(text), tokenizer)
    messages = [] if system is None else [{"role": "system", "content": system}]
    try:
        return Prompt(tokenizer.encode_chat([*messages, {"role": "user", "content": text}]), tokenizer)
    except ValueError as error:
        raise ConfigError(f"--chat: {error}") from error


def prompt_options(arguments: argparse.Namespace, num_tokens: int) -> PromptOptions:
    """Return what the options say of a prompt.

    Raises:
        ConfigError: the retention makes no sense for a prompt of `num_tokens`.
    """
    return {
        "tenant": arguments.tenant,
        "adapter": arguments.adapter,
        "salt": arguments.salt,
        "read_cache": not arguments.no_read_cache,
        "write_cache": not arguments.no_write_cache,
        "retention": _retention(arguments, num_tokens),
        "urgency": arguments.urgency,
    }


def _retention(arguments: argparse.Namespace, num_tokens: int) -> Retention | None:
    if arguments.retention_priority is None:
        if arguments.ttl_s is not None:
            raise ConfigError("--ttl-s: expected --retention-priority with it, got none")
        return None
    retention = Retention(arguments.retention_priority, arguments.ttl_s)
    try:
        retention.range_in(max(1, num_tokens))
    except InvalidRequest as error:
        raise ConfigError(str(error)) from error
    return retention


def _tokenizer_in(directory: str) -> Tokenizer:
    try:
        return Tokenizer.load(directory)
    except ValueError as error:
        raise ConfigError(f"--tokenizer: {error}") from error


def _served_tokenizer(client: Client) -> Tokenizer:
    try:
        return client.tokenizer()
    except grpc.RpcError as error:
        if error.code() not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
            raise
        raise ConfigError(f"--text: expected a model with a tokenizer, got one without; {_CHOICES}") from error
    except (ValueError, OSError) as error:
        raise ConfigError(f"--text: the tokenizer of the service can't be used: {error}; {_CHOICES}") from error


def _decoded(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--text: expected text in UTF-8, got the byte {text[error.start]:#04x}; with --bytes, any bytes will do"
        ) from error


def _text(text: str) -> bytes:
    if text == "-":
        return _read_text("-")
    if not text:
        raise argparse.ArgumentTypeError("expected text, got an empty string")
    return text.encode("utf-8", "surrogateescape")  # the bytes of the command line


def _read_text(path: str) -> bytes:
    text = _read(path)
    if not text:
        raise argparse.ArgumentTypeError(f"expected text, got none from {'stdin' if path == '-' else path}")
    return text


def _tokens(text: str) -> list[int]:
    return _read_tokens("-") if text == "-" else argument_types.token_ids(text)


def _read_tokens(path: str) -> list[int]:
    return argument_types.token_ids(_read(path).decode("utf-8", "replace"))


def _read(path: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"expected a file, got {path}: {error.strerror}") from error
