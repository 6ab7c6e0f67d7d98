"""`radixkv trace`: converts a file of texts into a trace without text."""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from radixkv.errors import ConfigError
from radixkv.planning.text_log import Message, TextRequest, text_requests
from radixkv.planning.trace_formats import MAX_TOKENS_PER_ID
from radixkv.planning.trace_records import read_records
from radixkv.service.cli.argument_types import positive
from radixkv.service.cli.options import Option, add_options
from radixkv.service.cli.prompt import load_tokenizer
from radixkv.service.text.tokenizer import Tokenizer

_DESCRIPTION = (
    "Convert a file of texts (ShareGPT, LMSYS, OpenAI's batch files, JSON lines with messages or prompts) into a trace "
    "for `radixkv simulate`. The trace has no text: the ids of its blocks are numbers in the order of first appearance."
)
_OPTIONS = (
    Option("texts", "TEXTS", None, "file of JSON or JSON lines, plain or gzip"),
    Option(
        "--tokenizer",
        "DIR|FILE.gguf|ORG/NAME",
        None,
        "the tokenizer of the model: a directory, a GGUF file, or a model of the Hugging Face Hub in the local cache",
        more={"required": True},
    ),
    Option("--output", "FILE", None, "file to write; a name that ends in .gz is compressed", more={"required": True}),
    Option("--tokens-per-id", "N", positive, "tokens per id; reuse can be simulated only in steps of this size", 16),
    Option("--limit", "N", positive, "convert only the first N requests (default: all)"),
)


def add_arguments(trace: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    trace.description = _DESCRIPTION
    add_options(trace, _OPTIONS)
    trace.set_defaults(command=_trace)


class _BlockNumbers:
    """Numbers token blocks in order of first appearance. Equal blocks with equal preceding blocks share a number."""

    def __init__(self, tokens_per_id: int) -> None:
        self._tokens_per_id = tokens_per_id
        self._numbers: dict[tuple[int, bytes], int] = {}

    def ids_of(self, token_ids: list[int]) -> list[int]:
        """Return the ids of the blocks of a prompt; the last block may be shorter."""
        tokens = np.array(token_ids, dtype=np.uint32)
        ids, previous_id = [], -1
        for start in range(0, len(tokens), self._tokens_per_id):
            block = tokens[start : start + self._tokens_per_id].tobytes()
            previous_id = self._numbers.setdefault((previous_id, block), len(self._numbers))
            ids.append(previous_id)
        return ids


class _Encoder:
    """Converts prompts to token ids, and counts those that the chat template rejects."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_refused = 0
        self.first_refused = ""

    def encode(self, request: TextRequest) -> list[int] | None:
        """Return the token ids of a prompt; None if the chat template rejects it."""
        try:
            if isinstance(request.prompt, str):
                return self._tokenizer.encode(request.prompt)
            if self._tokenizer.has_chat_template:
                return self._tokenizer.encode_chat(request.prompt, tools=request.tools)
            return self._tokenizer.encode("".join(map(_plain_text, request.prompt)))
        except (TypeError, ValueError) as error:
            self.num_refused += 1
            self.first_refused = self.first_refused or f"{request.where}: {error}"
            return None

    def count_tokens(self, answer: str | None) -> int:
        """Return the number of tokens of an answer; 0 without an answer, or if it cannot be encoded."""
        try:
            return len(self._tokenizer.encode(answer)) if answer else 0
        except ValueError:
            return 0


def _trace(arguments: argparse.Namespace) -> None:
    if arguments.tokens_per_id > MAX_TOKENS_PER_ID:
        raise ConfigError(f"--tokens-per-id: expected 1 to {MAX_TOKENS_PER_ID}, got {arguments.tokens_per_id}")
    encoder = _Encoder(load_tokenizer(arguments.tokenizer))
    output = Path(arguments.output)
    all_requests = itertools.chain.from_iterable(map(text_requests, read_records(Path(arguments.texts))))
    requests = itertools.islice(all_requests, arguments.limit)
    blocks = _BlockNumbers(arguments.tokens_per_id)
    num_lines = 0
    try:
        with gzip.open(output, "wt") if output.suffix == ".gz" else output.open("w") as file:
            for line in _lines(requests, encoder, blocks):
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
                num_lines += 1
    except OSError as error:
        raise ConfigError(f"--output: expected a file that can be written, got {output}: {error.strerror}") from error
    if not num_lines:
        raise ConfigError(f"{arguments.texts}: the file has no prompt{_refusals(encoder, ' that can be encoded')}")
    print(f"{num_lines:,} requests in {output}{_refusals(encoder, '')}", file=sys.stderr)


def _refusals(encoder: _Encoder, qualifier: str) -> str:
    """Return a text about the prompts that were left out, after a qualifier; empty if there are none."""
    if not encoder.num_refused:
        return ""
    return f"{qualifier}; {encoder.num_refused:,} left out, the first one: {encoder.first_refused}"


def _lines(requests: Iterable[TextRequest], encoder: _Encoder, blocks: _BlockNumbers) -> Iterator[dict[str, object]]:
    start_s: float | None = None
    for request in requests:
        token_ids = encoder.encode(request)
        if not token_ids:
            continue
        line: dict[str, object] = {}
        if request.time_s is not None:
            start_s = request.time_s if start_s is None else start_s
            line["timestamp"] = max(0, round(1000 * (request.time_s - start_s)))
        yield line | {
            "input_length": len(token_ids),
            "output_length": encoder.count_tokens(request.answer),
            "hash_ids": blocks.ids_of(token_ids),
        }


def _plain_text(message: Message) -> str:
    content = message.get("content")
    return f"{message['role']}: {content if isinstance(content, str) else json.dumps(content)}\n"
