"""`radixkv generate`: its options, and the answer as it comes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from radixkv.api.sampling import DEFAULT_MAX_NEW_TOKENS
from radixkv.service.cli import argument_types
from radixkv.service.cli.compression import add_compression, compression_of
from radixkv.service.cli.connection import add_connection, client_of
from radixkv.service.cli.output import generate_table, json_of
from radixkv.service.cli.prompt import Prompt, add_chat, add_prompt, prompt_of, prompt_options
from radixkv.service.cli.terminal import printable
from radixkv.service.text.answer_text import AnswerText
from radixkv.v1.prefill_pb2 import GenerateResponse


def add_generate_command(generate: argparse.ArgumentParser) -> None:
    """Add the arguments of `generate` to its parser."""
    generate.description = (
        "Generate from a prompt. Prints the answer on stdout as it arrives, text for a prompt of text and token ids "
        f"for a prompt of token ids, and then statistics on stderr. {argument_types.COUNTS}"
    )
    add_prompt(generate)
    add_chat(generate)
    sampling = generate.add_argument_group("the answer")
    sampling.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=argument_types.positive,
        default=DEFAULT_MAX_NEW_TOKENS,
        help="maximum number of tokens to generate",
    )
    sampling.add_argument(
        "--temperature", metavar="T", type=float, default=0.0, help="sampling temperature; 0 is greedy"
    )
    sampling.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        help="sample from the smallest set of tokens whose cumulative probability reaches P (default: 1)",
    )
    sampling.add_argument(
        "--top-k",
        metavar="K",
        type=argument_types.count,
        default=0,
        help="sample from the K most likely tokens; 0 for all",
    )
    sampling.add_argument(
        "--min-p",
        metavar="P",
        type=float,
        default=0.0,
        help="sample from tokens at least P times as likely as the top one",
    )
    sampling.add_argument(
        "--repetition-penalty",
        metavar="X",
        type=float,
        help="above 1, makes tokens of the prompt and the answer less likely (default: 1)",
    )
    for name, when in (("presence", "that are in the answer"), ("frequency", "for each time they are in the answer")):
        sampling.add_argument(
            f"--{name}-penalty",
            metavar="X",
            type=float,
            default=0.0,
            help=f"subtracted from the logits of tokens {when}",
        )
    sampling.add_argument(
        "--min-tokens",
        metavar="N",
        type=argument_types.count,
        default=0,
        help="minimum number of tokens to generate before a stop token",
    )
    sampling.add_argument(
        "--seed", metavar="N", type=argument_types.seed, help="seed of the sampling (default: random)"
    )
    sampling.add_argument(
        "--stop-tokens",
        metavar="1,2,3",
        type=argument_types.token_ids,
        default=[],
        help="token ids that end the answer (default: none)",
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="continue after the end-of-sequence token")
    sampling.add_argument(
        "--stop",
        metavar="TEXT",
        type=argument_types.name,
        action="append",
        default=[],
        help="text that ends the answer and is not printed; may be repeated (default: none)",
    )
    followed = sampling.add_mutually_exclusive_group()
    followed.add_argument(
        "--json-schema",
        metavar="FILE|TEXT",
        type=argument_types.json_schema,
        help="JSON schema that the answer follows (default: none)",
    )
    followed.add_argument("--json-object", action="store_true", help="the answer is a JSON object")
    followed.add_argument(
        "--regex",
        metavar="REGEX",
        type=argument_types.name,
        help="regular expression that the whole answer matches (default: none)",
    )
    followed.add_argument(
        "--grammar",
        metavar="FILE|TEXT",
        type=argument_types.grammar,
        help="grammar that the answer follows, in the syntax of Lark or llama.cpp (default: none)",
    )
    add_compression(generate)
    add_connection(generate)
    generate.set_defaults(command=_generate)


def _generate(arguments: argparse.Namespace) -> None:
    answer, compression = GenerateResponse(), compression_of(arguments)
    with client_of(arguments) as client:
        prompt = prompt_of(arguments, client)
        updates = client.generate(
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
            for update in updates:
                answer.MergeFrom(update)  # which joins the tokens
                printer.put(update)
    if arguments.json:
        print(json_of(answer, text=printer.text))
    else:
        print(generate_table(answer), file=sys.stderr)


class _Printer:
    """Prints an answer on stdout as it comes: text if the prompt was text, otherwise token ids.

    The context ends the last line, also after an error or Ctrl-C in the middle of an answer, so that whatever is
    printed next on the terminal starts on a line of its own.
    """

    def __init__(self, prompt: Prompt, stops: Sequence[str], min_tokens: int, *, is_silent: bool) -> None:
        self._is_silent = is_silent
        self._is_terminal = sys.stdout.isatty()
        self._is_inside_line = False
        self._pieces: list[str] = []
        self._answer: AnswerText | None = None
        if prompt.tokenizer is not None:
            self._answer = AnswerText(prompt.tokenizer.stream(prompt.token_ids), stops, min_tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_inside_line:
            self._print("\n")

    @property
    def text(self) -> str | None:
        """The text so far; None if the prompt was no text."""
        return None if self._answer is None else "".join(self._pieces)

    def put(self, update: GenerateResponse) -> None:
        """Print the next part of the answer."""
        if self._answer is None:
            ids = " ".join(map(str, update.token_ids))
            # The space precedes the ids, because the last update may have none.
            self._print((" " if ids and self._is_inside_line else "") + ids)
            return
        piece = self._answer.put(update.token_ids) + (self._answer.end() if update.finished else "")
        self._pieces.append(piece)
        self._print(printable(piece, keep="\n\t") if self._is_terminal else piece)

    def _print(self, text: str) -> None:
        if text and not self._is_silent:
            print(text, end="", flush=True)
            self._is_inside_line = not text.endswith("\n")
