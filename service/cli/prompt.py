"""The options of a prompt: its text or tokens, its namespace, its use of the cache, and its priorities."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from radixkv.api.retention import Retention
from radixkv.errors import ConfigError, InvalidRequest
from radixkv.service.cli import argument_types
from radixkv.service.cli.argument_types import name, points
from radixkv.service.cli.options import Option, add_choice, add_options, flag
from radixkv.service.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # importing these loads gRPC, which --help and argument errors do not need
    from radixkv.service.client import Client
    from radixkv.service.client.requests import PromptOptions

_ALTERNATIVES = "use --tokenizer DIR, --bytes or --tokens"


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as token ids.

    Attributes:
        token_ids: token ids of the prompt.
        tokenizer: the tokenizer that encoded its text; None if no tokenizer was used.
    """

    token_ids: list[int]
    tokenizer: Tokenizer | None


def add_tokens(command: argparse.ArgumentParser) -> None:
    """Add the options of a prompt's text or tokens to a command."""
    group = command.add_argument_group(
        "the prompt", "Give one of --text, --text-file, --tokens and --tokens-file. The value - reads stdin."
    )
    prompt = (
        Option("--text", "TEXT|-", _parse_text, "text, for the tokenizer of the served model"),
        Option("--text-file", "FILE", _read_text, "file with the text", more={"dest": "text"}),
        Option("--tokens", "1,2,3|-", _parse_tokens, "token ids, separated by commas or spaces"),
        Option("--tokens-file", "FILE", _read_tokens, "file with token ids", more={"dest": "tokens"}),
    )
    add_choice(group, prompt, is_required=True)
    encoding = (
        Option(
            "--tokenizer",
            "DIR|FILE.gguf|ORG/NAME",
            None,
            "directory with a tokenizer for the text, a GGUF file, or a model of the Hugging Face Hub that is in the "
            "local cache (default: the tokenizer of the served model)",
        ),
        flag("--bytes", "use the bytes of the text as token ids, without a tokenizer"),
    )
    add_choice(group, encoding)


def add_prompt(command: argparse.ArgumentParser) -> None:
    """Add all options of a prompt to a command: its tokens, its namespace, and its use of the cache."""
    add_tokens(command)
    add_namespace(command)
    use_options = (
        flag("--no-read-cache", "compute every token, without reuse"),
        flag("--no-write-cache", "do not cache the computed tokens"),
        Option(
            "--retention-priority",
            "0..100",
            points,
            "priority in the cache; unused blocks with a lower one are evicted first (default: 50)",
        ),
        Option(
            "--ttl-s",
            "S",
            float,
            "seconds for which --retention-priority applies (default: as long as the prompt is cached)",
        ),
        Option(
            "--urgency",
            "0..100",
            points,
            "priority among the requests of the tenant; a point counts as a second of waiting (default: 50)",
        ),
    )
    add_options(command.add_argument_group("cache and queue"), use_options)


def add_namespace(command: argparse.ArgumentParser) -> None:
    """Add the options that select the namespace of a prompt to a command."""
    namespace = command.add_argument_group(
        "the namespace", "Requests share cached tokens only if all three are equal, apart from public prefixes."
    )
    add_options(
        namespace,
        [Option(f"--{each}", "NAME", name, f"{each} (default: none)", "") for each in ("tenant", "adapter", "salt")],
    )


def add_chat(command: argparse.ArgumentParser) -> None:
    """Add the options of a conversation to a command that has the options of a prompt."""
    chat = (
        flag("--chat", "send the text as a user message in the chat template of the model"),
        Option("--system", "TEXT", name, "with --chat, the system message (default: none)"),
    )
    add_options(command.add_argument_group("the conversation"), chat)


def prompt_of(arguments: argparse.Namespace, client: Client) -> EncodedPrompt:
    """Encode the prompt. Text is encoded with the tokenizer of the service, unless an option names another encoding.

    Raises:
        ConfigError: options exclude each other, the tokenizer can't be used, or the text can't be encoded.
    """
    is_chat, system = getattr(arguments, "chat", False), getattr(arguments, "system", None)
    if system is not None and not is_chat:
        raise ConfigError("--system: requires --chat")
    if arguments.tokens is not None:
        needs_text = {"--tokenizer": arguments.tokenizer is not None, "--bytes": arguments.bytes, "--chat": is_chat}
        for option, is_given in needs_text.items():
            if is_given:
                raise ConfigError(f"{option}: requires --text or --text-file, got --tokens")
        return EncodedPrompt(arguments.tokens, None)
    if arguments.bytes:
        if is_chat:
            raise ConfigError("--chat: requires a tokenizer, got --bytes")
        return EncodedPrompt(list(arguments.text), None)
    tokenizer = served_tokenizer(client) if arguments.tokenizer is None else load_tokenizer(arguments.tokenizer)
    text = _decode(arguments.text)
    if not is_chat:
        return EncodedPrompt(tokenizer.encode(text), tokenizer)
    messages = [] if system is None else [{"role": "system", "content": system}]
    try:
        return EncodedPrompt(tokenizer.encode_chat([*messages, {"role": "user", "content": text}]), tokenizer)
    except ValueError as error:
        raise ConfigError(f"--chat: {error}") from error


def prompt_options(arguments: argparse.Namespace, num_tokens: int) -> PromptOptions:
    """Return the options of a prompt of `num_tokens` for the client.

    Raises:
        ConfigError: the retention is not valid for this prompt.
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
            raise ConfigError("--ttl-s: requires --retention-priority")
        return None
    retention = Retention(arguments.retention_priority, arguments.ttl_s)
    try:
        retention.range_in(max(1, num_tokens))
    except InvalidRequest as error:
        raise ConfigError(str(error)) from error
    return retention


def load_tokenizer(source: str) -> Tokenizer:
    """Load the tokenizer that `--tokenizer` names.

    Raises:
        ConfigError: the tokenizer can't be used.
    """
    try:
        return Tokenizer.load(source)
    except ValueError as error:
        raise ConfigError(f"--tokenizer: {error}") from error


def served_tokenizer(client: Client, option: str = "--text", alternatives: str = _ALTERNATIVES) -> Tokenizer:
    """Return the tokenizer of the served model.

    Args:
        client: client that is connected to the service.
        option: the option that requires the tokenizer, for errors.
        alternatives: what to do without this tokenizer, for errors.

    Raises:
        ConfigError: the model has no tokenizer, or the tokenizer can't be used.
    """
    from radixkv.service.client.errors import NotFound, Unimplemented

    try:
        return client.tokenizer()
    except (NotFound, Unimplemented) as error:
        raise ConfigError(f"{option}: the served model has no tokenizer; {alternatives}") from error
    except (ValueError, OSError) as error:
        message = f"{option}: the tokenizer of the service can't be used: {error}; {alternatives}"
        raise ConfigError(message) from error


def _decode(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--text: expected text in UTF-8, got the byte {text[error.start]:#04x}; --bytes accepts any bytes"
        ) from error


def _parse_text(text: str) -> bytes:
    if text == "-":
        return _read_text("-")
    if not text:
        raise argparse.ArgumentTypeError("expected text, got an empty string")
    return text.encode("utf-8", "surrogateescape")  # the bytes of the command line


def _read_text(path: str) -> bytes:
    text = _read(path)
    if not text:
        raise argparse.ArgumentTypeError(f"{'stdin' if path == '-' else path} is empty; it must contain text")
    return text


def _parse_tokens(text: str) -> list[int]:
    return _read_tokens("-") if text == "-" else argument_types.token_ids(text)


def _read_tokens(path: str) -> list[int]:
    return argument_types.token_ids(_read(path).decode("utf-8", "replace"))


def _read(path: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"expected a file, got {path}: {error.strerror}") from error
