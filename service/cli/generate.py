"""`radixkv generate`: generates from a prompt, and prints the completion as it arrives."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.api.sampling import DEFAULT_MAX_NEW_TOKENS
from radixkv.errors import ConfigError, InvalidRequest
from radixkv.service.cli.argument_types import COUNTS, count, grammar, json_schema, name, positive, seed, token_ids
from radixkv.service.cli.connection import add_connection, client_of
from radixkv.service.cli.options import Option, add_choice, add_options, flag
from radixkv.service.cli.output import generate_table, json_of
from radixkv.service.cli.prompt import EncodedPrompt, add_chat, add_prompt, prompt_of, prompt_options
from radixkv.service.cli.terminal import printable
from radixkv.service.text.answer_text import AnswerText
from radixkv.v1.prefill_pb2 import GenerateResponse

_SAMPLING = (
    Option("--max-new-tokens", "N", positive, "maximum number of tokens to generate", DEFAULT_MAX_NEW_TOKENS),
    Option("--temperature", "T", float, "sampling temperature; 0 is greedy", 0.0),
    Option(
        "--top-p",
        "P",
        float,
        "sample from the smallest set of tokens whose cumulative probability reaches P (default: 1)",
    ),
    Option("--top-k", "K", count, "sample from the K most likely tokens; 0 for all", 0),
    Option("--min-p", "P", float, "sample from tokens at least P times as likely as the top one", 0.0),
    Option(
        "--repetition-penalty",
        "X",
        float,
        "above 1, makes tokens of the prompt and the completion less likely (default: 1)",
    ),
    Option("--presence-penalty", "X", float, "subtracted from the logits of tokens in the completion", 0.0),
    Option(
        "--frequency-penalty",
        "X",
        float,
        "subtracted from the logits of tokens in the completion once per occurrence",
        0.0,
    ),
    Option("--min-tokens", "N", count, "minimum number of tokens to generate before a stop token", 0),
    Option("--seed", "N", seed, "seed of the sampling (default: random)"),
    Option("--stop-tokens", "1,2,3", token_ids, "token ids that end the completion (default: none)", []),
    flag("--ignore-eos", "continue after the end-of-sequence token"),
    Option(
        "--stop",
        "TEXT",
        name,
        "text that ends the completion and is not printed; may be repeated (default: none)",
        [],
        {"action": "append"},
    ),
)
_GRAMMARS = (
    Option("--json-schema", "FILE|TEXT", json_schema, "JSON schema that the completion follows (default: none)"),
    flag("--json-object", "the completion is a JSON object"),
    Option("--regex", "REGEX", name, "regular expression that the whole completion matches (default: none)"),
    Option(
        "--grammar",
        "FILE|TEXT",
        grammar,
        "grammar that the completion follows, in the syntax of Lark or llama.cpp (default: none)",
    ),
)
_COMPRESSION = (
    Option(
        "--compression",
        "POLICY",
        None,
        f"keep only a part of the K/V after prefill: {', '.join(CompressionPolicy)} (default: keep all)",
        more={"choices": [policy.value for policy in CompressionPolicy]},
    ),
    Option(
        "--compression-tokens",
        "N",
        positive,
        "K/V entries that each head keeps; required by --compression (default: none)",
    ),
    Option("--compression-sinks", "N", count, "first tokens that streaming_llm keeps (default: 4)"),
    Option(
        "--compression-window",
        "N",
        positive,
        "last tokens that h2o and snapkv always keep (default: half of --compression-tokens, at most 32 for snapkv)",
    ),
)


def add_arguments(generate: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    generate.description = (
        "Generate from a prompt. Prints the completion on stdout as it arrives: text, or token ids with --tokens, "
        f"--tokens-file or --bytes. Then prints statistics on stderr. {COUNTS}"
    )
    add_prompt(generate)
    add_chat(generate)
    completion = generate.add_argument_group("the completion")
    add_options(completion, _SAMPLING)
    add_choice(completion, _GRAMMARS)
    compression = generate.add_argument_group(
        "lossy compression of the K/V", "Changes the completion, which is not cached."
    )
    add_options(compression, _COMPRESSION)
    add_connection(generate)
    generate.set_defaults(command=_generate)


def _generate(arguments: argparse.Namespace) -> None:
    merged = GenerateResponse()
    compression = _compression(arguments)
    with client_of(arguments) as client:
        prompt = prompt_of(arguments, client)
        responses = client.generate(
            prompt.token_ids,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            seed=arguments.seed,
            stop_token_ids=arguments.stop_tokens,
            stop=arguments.stop,
            ignore_eos=arguments.ignore_eos,
            top_k=arguments.top_k,
            min_p=arguments.min_p,
            repetition_penalty=arguments.repetition_penalty,
            presence_penalty=arguments.presence_penalty,
            frequency_penalty=arguments.frequency_penalty,
            min_tokens=arguments.min_tokens,
            json_schema=arguments.json_schema,
            json_object=arguments.json_object or None,
            regex=arguments.regex,
            grammar=arguments.grammar,
            compression=compression,
            **prompt_options(arguments, len(prompt.token_ids)),
        )
        with _Printer(prompt, arguments.stop, arguments.min_tokens, is_silent=arguments.json) as printer:
            for response in responses:
                merged.MergeFrom(response)  # concatenates the token ids
                printer.add(response)
    if arguments.json:
        print(json_of(merged, text=printer.text))
    else:
        print(generate_table(merged), file=sys.stderr)


def _compression(arguments: argparse.Namespace) -> Compression | None:
    """Return the requested compression; None if no compression is requested.

    Raises:
        ConfigError: an option is missing or out of range, or requires another one.
    """
    values = {each: getattr(arguments, f"compression_{each}") for each in ("tokens", "sinks", "window")}
    if arguments.compression is None:
        for each, value in values.items():
            if value is not None:
                raise ConfigError(f"--compression-{each}: requires --compression")
        return None
    if values["tokens"] is None:
        raise ConfigError("--compression: requires --compression-tokens")
    policy = CompressionPolicy(arguments.compression)
    compression = Compression(policy, values["tokens"], values["sinks"], values["window"])
    try:
        compression.validate()
    except InvalidRequest as error:
        raise ConfigError(str(error)) from error
    return compression


class _Printer:
    """Prints a completion on stdout as it arrives: text if the prompt has a tokenizer, otherwise token ids.

    Leaving the context ends the last line, also after an error or Ctrl-C in the middle of a completion, so that
    whatever is printed next starts on a new line.

    Args:
        prompt: the prompt.
        stops: stop strings, which are not printed.
        min_tokens: number of tokens before which no stop string ends the completion.
        is_silent: whether to print nothing, and only collect the text.
    """

    def __init__(self, prompt: EncodedPrompt, stops: Sequence[str], min_tokens: int, *, is_silent: bool) -> None:
        self._is_silent = is_silent
        self._is_terminal = sys.stdout.isatty()
        self._is_inside_line = False
        self._pieces: list[str] = []
        self._detokenizer: AnswerText | None = None
        if prompt.tokenizer is not None:
            self._detokenizer = AnswerText(prompt.tokenizer.stream(prompt.token_ids), stops, min_tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_inside_line:
            self._print("\n")

    @property
    def text(self) -> str | None:
        """The text of the completion so far; None if the prompt has no tokenizer."""
        return None if self._detokenizer is None else "".join(self._pieces)

    def add(self, response: GenerateResponse) -> None:
        """Print the next part of the completion."""
        if self._detokenizer is None:
            ids = " ".join(map(str, response.token_ids))
            # The space precedes the ids, because the last response may have no ids.
            self._print((" " if ids and self._is_inside_line else "") + ids)
            return
        piece = self._detokenizer.put(response.token_ids) + (self._detokenizer.end() if response.finished else "")
        self._pieces.append(piece)
        self._print(printable(piece, keep="\n\t") if self._is_terminal else piece)

    def _print(self, text: str) -> None:
        if text and not self._is_silent:
            print(text, end="", flush=True)
            self._is_inside_line = not text.endswith("\n")
