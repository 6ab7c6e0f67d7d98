"""Options of `radixkv` that describe a prompt: its tokens, its identity, its use of the cache, its priorities."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from radixkv.api.retention import Retention
from radixkv.errors import ConfigError, InvalidRequest
from radixkv.service.client.requests import PromptOptions
from radixkv.service.commands import argument_types


def add_prompt(command: argparse.ArgumentParser) -> None:
    """Add the options of a prompt to a command."""
    group = command.add_argument_group(
        "the prompt", "One of --text, --text-file, --tokens and --tokens-file; - as its value reads stdin."
    )
    prompt = group.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--text", metavar="T|-", type=_text, help="text; its bytes in UTF-8 are the token ids")
    prompt.add_argument(
        "--text-file", metavar="F", dest="text", type=_read, help="a file with the text, taken byte for byte"
    )
    prompt.add_argument("--tokens", metavar="1,2,3|-", type=_tokens, help="token ids, separated by commas or spaces")
    prompt.add_argument("--tokens-file", metavar="F", dest="tokens", type=_read_tokens, help="a file with token ids")
    group.add_argument("--tokenizer", metavar="DIR", help="a directory with a tokenizer for the text (default: none)")
    identity = command.add_argument_group("identity", "Only requests with equal ones share cached tokens.")
    for name in ("tenant", "adapter", "salt"):
        identity.add_argument(
            f"--{name}", type=argument_types.name, default="", help=f"name of the {name} (default: empty)"
        )
    use = command.add_argument_group("cache and queue")
    use.add_argument("--no-read-cache", action="store_true", help="compute every token")
    use.add_argument("--no-write-cache", action="store_true", help="publish nothing for later requests")
    use.add_argument(
        "--retention-priority",
        metavar="0..100",
        type=argument_types.points,
        help="unused blocks of lower priority are evicted first (default: 50)",
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
        help="order of the tenant's own requests; a point is worth a second of waiting (default: 50)",
    )


def token_ids_of(arguments: argparse.Namespace) -> list[int]:
    """Return the prompt's token ids.

    Raises:
        ConfigError: there is no tokenizer where --tokenizer says, or the text is not for one.
    """
    if arguments.tokens is not None:
        if arguments.tokenizer is not None:
            raise ConfigError("--tokenizer: expected --text or --text-file with it, got --tokens")
        token_ids: list[int] = arguments.tokens
        return token_ids
    if arguments.tokenizer is None:
        return list(arguments.text)
    return _tokenized(arguments.text, arguments.tokenizer)


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


def _tokenized(text: bytes, directory: str) -> list[int]:
    if not Path(directory).is_dir():  # else transformers would take it for a name on a hub
        raise ConfigError(f"--tokenizer: expected a directory with a tokenizer, got {directory}")
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # whatever transformers raises over a bad directory
        raise ConfigError(f"--tokenizer: expected a directory with a tokenizer, got {directory}") from error
    try:
        token_ids: list[int] = tokenizer.encode(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"--tokenizer: expected text in UTF-8, got the byte {text[error.start]:#04x}") from error
    return token_ids


def _text(text: str) -> bytes:
    return _read("-") if text == "-" else text.encode("utf-8", "surrogateescape")  # the bytes of the command line


def _tokens(text: str) -> list[int]:
    return _read_tokens("-") if text == "-" else argument_types.token_ids(text)


def _read_tokens(path: str) -> list[int]:
    return argument_types.token_ids(_read(path).decode("utf-8", "replace"))


def _read(path: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"expected a file, got {path}: {error.strerror}") from error
