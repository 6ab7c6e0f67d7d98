"""Commands that call a running service: prefill, generate, purge, stats."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from typing import Any

from radixkv.api.sampling import DEFAULT_MAX_NEW_TOKENS
from radixkv.config import ServerConfig
from radixkv.errors import ConfigError
from radixkv.service.client import Client
from radixkv.service.client.channel import MAX_RETRIES
from radixkv.service.commands import argument_types
from radixkv.service.commands.answer_tables import generate_table, json_of, prefill_table, purge_table, stats_table
from radixkv.service.commands.prompt_arguments import add_prompt, prompt_options, token_ids_of
from radixkv.v1.prefill_pb2 import GenerateResponse

_ADDRESS = f"{ServerConfig().host}:{ServerConfig().port}"
_WATCH_PERIOD_S = 2.0
_HOME_AND_CLEAR = "\x1b[H\x1b[J"  # cursor to the top left, then everything below it is erased


def add_client_commands(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the commands that call a service to the commands of a parser."""
    _add_prefill(commands)
    _add_generate(commands)
    _add_purge(commands)
    _add_stats(commands)


def _add_prefill(commands: argparse._SubParsersAction[Any]) -> None:
    prefill = commands.add_parser("prefill", help="prefill one prompt", description="Prefill one prompt.")
    add_prompt(prefill)
    prefill.add_argument(
        "--top-logprobs", metavar="N", type=argument_types.count, default=0, help="most likely next tokens to report"
    )
    _add_connection(prefill)
    prefill.set_defaults(command=_prefill)


def _add_generate(commands: argparse._SubParsersAction[Any]) -> None:
    generate = commands.add_parser(
        "generate",
        help="continue a prompt; prints token ids as they come",
        description=f"Continue a prompt; prints token ids as they come. {argument_types.COUNTS}",
    )
    add_prompt(generate)
    sampling = generate.add_argument_group("the answer")
    sampling.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=argument_types.positive,
        default=DEFAULT_MAX_NEW_TOKENS,
        help="tokens to generate at most",
    )
    sampling.add_argument(
        "--temperature", metavar="T", type=float, default=0.0, help="divides the logits; 0 takes the most likely token"
    )
    sampling.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        help="draw from the fewest tokens whose probability is P together (default: 1)",
    )
    sampling.add_argument(
        "--top-k",
        metavar="K",
        type=argument_types.count,
        default=0,
        help="draw from the K most likely tokens; 0 for all",
    )
    sampling.add_argument(
        "--min-p", metavar="P", type=float, default=0.0, help="draw from tokens at least P times as likely as the first"
    )
    sampling.add_argument(
        "--repetition-penalty",
        metavar="X",
        type=float,
        help="makes tokens of prompt and answer less likely if above 1 (default: 1)",
    )
    for name, when in (("presence", "if they are in the answer"), ("frequency", "each time they are in the answer")):
        sampling.add_argument(
            f"--{name}-penalty", metavar="X", type=float, default=0.0, help=f"taken from logits of tokens {when}"
        )
    sampling.add_argument(
        "--min-tokens",
        metavar="N",
        type=argument_types.count,
        default=0,
        help="tokens before which no stop token comes",
    )
    sampling.add_argument(
        "--seed", metavar="N", type=argument_types.seed, help="equal seeds draw equal tokens (default: random)"
    )
    sampling.add_argument(
        "--stop-tokens",
        metavar="1,2,3",
        type=argument_types.token_ids,
        default=[],
        help="token ids that end it (default: none)",
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="continue after the model's end of sequence")
    _add_connection(generate)
    generate.set_defaults(command=_generate)


def _add_purge(commands: argparse._SubParsersAction[Any]) -> None:
    about = "forget what is cached for a tenant, an adapter or a salt"
    purge = commands.add_parser("purge", help=about, description=f"{about.capitalize()}, or for all of them.")
    for name in ("tenant", "adapter", "salt"):
        purge.add_argument(f"--{name}", type=argument_types.name, help=f"name of the {name} (default: any)")
    purge.add_argument("--all", action="store_true", help="forget everything, in place of a name")
    _add_connection(purge)
    purge.set_defaults(command=_purge)


def _add_stats(commands: argparse._SubParsersAction[Any]) -> None:
    about = "show what the cache holds and what the service did"
    stats = commands.add_parser("stats", help=about, description=f"{about.capitalize()}.")
    stats.add_argument(
        "--watch",
        metavar="S",
        type=argument_types.positive_number,
        nargs="?",
        const=_WATCH_PERIOD_S,
        help=f"refresh every S seconds, {_WATCH_PERIOD_S:g} without a number, until Ctrl-C; a terminal is redrawn, "
        "elsewhere tables follow each other, and with --json each is one line (default: show once)",
    )
    _add_connection(stats)
    stats.set_defaults(command=_stats)


def _add_connection(command: argparse.ArgumentParser) -> None:
    service = command.add_argument_group("the service")
    service.add_argument("--address", metavar="HOST:PORT", default=_ADDRESS, help="where it listens")
    service.add_argument("--timeout-s", metavar="S", type=float, help="seconds for a call (default: no limit)")
    service.add_argument(
        "--retries", metavar="N", type=int, default=0, help=f"further attempts after UNAVAILABLE, at most {MAX_RETRIES}"
    )
    service.add_argument("--json", action="store_true", help="print the whole answer as JSON")


def _prefill(arguments: argparse.Namespace) -> None:
    token_ids = token_ids_of(arguments)
    options = prompt_options(arguments, len(token_ids))
    with _client(arguments) as client:
        answer = client.prefill(token_ids, top_logprobs=arguments.top_logprobs, **options)
    print(json_of(answer) if arguments.json else prefill_table(answer))


def _generate(arguments: argparse.Namespace) -> None:
    token_ids = token_ids_of(arguments)
    options = prompt_options(arguments, len(token_ids))
    answer = GenerateResponse()
    with _client(arguments) as client:
        for news in client.generate(
            token_ids,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            seed=arguments.seed,
            stop_token_ids=arguments.stop_tokens,
            ignore_eos=arguments.ignore_eos,
            top_k=arguments.top_k,
            min_p=arguments.min_p,
            repetition_penalty=arguments.repetition_penalty,
            presence_penalty=arguments.presence_penalty,
            frequency_penalty=arguments.frequency_penalty,
            min_tokens=arguments.min_tokens,
            **options,
        ):
            answer.MergeFrom(news)  # which joins the tokens
            if not arguments.json:
                print(*news.token_ids, end="\n" if news.finished else " ", flush=True)
    print(json_of(answer) if arguments.json else generate_table(answer))


def _purge(arguments: argparse.Namespace) -> None:
    names = {"tenant": arguments.tenant, "adapter": arguments.adapter, "salt": arguments.salt}
    if arguments.all is not (set(names.values()) == {None}):
        raise ConfigError("purge: expected either --all, or one or more of --tenant, --adapter, --salt")
    with _client(arguments) as client:
        purged = client.purge(**names, everything=arguments.all)
    print(json_of(purged) if arguments.json else purge_table(purged))


def _stats(arguments: argparse.Namespace) -> None:
    with _client(arguments) as client:
        if arguments.watch is None:
            stats = client.stats()
            print(json_of(stats) if arguments.json else stats_table(stats))
        else:
            _watch(client, arguments.watch, as_json=arguments.json)


def _watch(client: Client, period_s: float, *, as_json: bool) -> None:
    """Print the stats until Ctrl-C, which is how it ends in the ordinary way."""
    is_redrawn = sys.stdout.isatty() and not as_json
    try:
        while True:
            stats = client.stats()
            if as_json:
                print(json_of(stats, indent=None), flush=True)
            elif is_redrawn:
                lines = stats_table(stats).splitlines()[: shutil.get_terminal_size().lines - 1]
                print(_HOME_AND_CLEAR + "\n".join(lines), flush=True)
            else:
                print(stats_table(stats), end="\n\n", flush=True)
            time.sleep(period_s)
    except KeyboardInterrupt:
        return


def _client(arguments: argparse.Namespace) -> Client:
    try:
        return Client(arguments.address, timeout_s=arguments.timeout_s, retries=arguments.retries)
    except ValueError as error:
        raise ConfigError(str(error)) from error
