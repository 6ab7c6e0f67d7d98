"""The `radixkv` command.

Exit codes: 0 done, 1 the service refused or can't be reached, 2 the command line or the configuration is wrong. Errors
are one line on stderr.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import grpc

from radixkv import __version__
from radixkv.api.retention import Retention
from radixkv.api.sampling import DEFAULT_MAX_NEW_TOKENS
from radixkv.config import Config
from radixkv.errors import ConfigError, InvalidRequest, RadixKVError
from radixkv.service.client import Client
from radixkv.service.commands import argument_types
from radixkv.service.commands.answer_tables import generate_table, json_of, prefill_table, purge_table, stats_table
from radixkv.service.commands.plan_command import add_plan_command
from radixkv.service.server.listen_address import require_free
from radixkv.v1.prefill_pb2 import GenerateResponse

_logger = logging.getLogger(__name__)

# Top-level modules that the extra `engine` brings.
_ENGINE_MODULES = frozenset(
    {
        "torch",
        "triton",
        "transformers",
        "safetensors",
        "grpc_health",
        "grpc_reflection",
        "prometheus_client",
        "tokenizers",
    }
)


class _Parser(argparse.ArgumentParser):
    """Refuses in one line; argparse would print the usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` defaults to the process's arguments.

    Returns:
        The exit code.

    Raises:
        SystemExit: after --help, --version, or an argument that does not parse.
    """
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], None] = arguments.command
    try:
        command(arguments)
        sys.stdout.flush()
    except ConfigError as error:
        return _complain(2, str(error))
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in _ENGINE_MODULES:
            raise
        return _complain(2, f"the package {package} is missing; install radixkv[engine]")
    except grpc.RpcError as error:
        return _complain(1, _text_of(error))
    except RadixKVError as error:
        return _complain(1, str(error))
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain when it ends
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return _complain(1, "output: no space left on the device")
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="radixkv", description="A prefix-caching prefill service for large language models.")
    parser.add_argument("--version", action="version", version=f"radixkv {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model until SIGTERM")
    serve.add_argument("--model", metavar="tiny|DIR", help="the embedded model, or a directory with its weights")
    serve.add_argument("--device", choices=("auto", "cpu", "cuda"))
    serve.add_argument("--host")
    serve.add_argument("--port", type=int, help="0 picks a free one")
    serve.add_argument("--metrics-port", type=int, help="Prometheus metrics over HTTP; 0 picks a free one")
    serve.add_argument("--config", metavar="F", help="a TOML file")
    serve.add_argument(
        "--set",
        metavar="a.b=v",
        action="append",
        default=[],
        help="one key of the configuration; wins over --config, the options above win over it",
    )
    serve.set_defaults(command=_serve)

    prefill = commands.add_parser("prefill", help="prefill one prompt")
    _add_connection(prefill)
    _add_prompt(prefill)
    prefill.add_argument("--top-logprobs", metavar="N", type=argument_types.count, default=0)
    prefill.add_argument(
        "--priority",
        metavar="0..100",
        type=argument_types.count,
        help="retention: how much it is worth to keep; others: 50",
    )
    prefill.add_argument("--ttl-s", metavar="S", type=float, help="for so long; without it, as long as it is cached")
    prefill.set_defaults(command=_prefill)

    generate = commands.add_parser("generate", help="go on with a prompt; prints token ids as they come")
    _add_connection(generate)
    _add_prompt(generate)
    generate.add_argument("--max-new-tokens", metavar="N", type=argument_types.positive, default=DEFAULT_MAX_NEW_TOKENS)
    generate.add_argument("--temperature", metavar="T", type=float, default=0.0, help="0 takes the most likely token")
    generate.add_argument("--top-p", metavar="P", type=float, help="draw from the fewest tokens that have so much")
    generate.add_argument("--seed", metavar="N", type=argument_types.seed, help="the same one draws the same tokens")
    generate.add_argument(
        "--stop-tokens", metavar="1,2,3", type=argument_types.token_ids, default=[], help="each ends it"
    )
    generate.add_argument("--ignore-eos", action="store_true", help="go on after the model's own end")
    generate.set_defaults(command=_generate)

    purge = commands.add_parser("purge", help="forget what is cached for a tenant, an adapter or a salt")
    _add_connection(purge)
    purge.add_argument("--tenant", type=argument_types.name)
    purge.add_argument("--adapter", type=argument_types.name)
    purge.add_argument("--salt", type=argument_types.name)
    purge.add_argument("--all", action="store_true", help="of everybody")
    purge.set_defaults(command=_purge)

    stats = commands.add_parser("stats", help="what the cache holds and what it did")
    _add_connection(stats)
    stats.set_defaults(command=_stats)

    simulate = commands.add_parser(
        "simulate", help="replay a trace without a model: which hit rate does a capacity buy?"
    )
    simulate.add_argument("trace", metavar="TRACE", help="requests in Mooncake's JSONL format, plain or gzip")
    simulate.add_argument(
        "--capacity-tokens",
        metavar="N[,N...]",
        type=argument_types.capacities,
        required=True,
        help="tokens that the cache holds; 2.56M is 2560000",
    )
    simulate.add_argument(
        "--policy", metavar="P[,P...]", type=argument_types.names, default="adaptive", help="default %(default)s"
    )
    simulate.add_argument(
        "--block-size", metavar="B", type=argument_types.positive, default=512, help="default %(default)s tokens"
    )
    simulate.add_argument("--limit", metavar="N", type=argument_types.positive, help="the first N requests only")
    simulate.add_argument("--json", action="store_true", help="a list of objects, one for each policy and capacity")
    simulate.add_argument("--plot", metavar="FILE.png", help="draw hit rate against capacity, below the optimum")
    simulate.set_defaults(command=_simulate)
    add_plan_command(commands)
    return parser


def _add_connection(command: argparse.ArgumentParser) -> None:
    command.add_argument("--address", metavar="A", required=True, help="HOST:PORT of the service")
    command.add_argument("--timeout-s", metavar="S", type=float, help="give up after so many seconds")
    command.add_argument("--json", action="store_true", help="the whole answer as JSON")


def _add_prompt(command: argparse.ArgumentParser) -> None:
    prompt = command.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--tokens", metavar="1,2,3", type=argument_types.token_ids, help="token ids")
    prompt.add_argument("--text", metavar="T", help="its UTF-8 bytes are the token ids, unless there is a --tokenizer")
    command.add_argument("--tokenizer", metavar="DIR", help="a directory that transformers can load, for --text")
    command.add_argument("--tenant", type=argument_types.name, default="")
    command.add_argument("--adapter", type=argument_types.name, default="")
    command.add_argument("--salt", type=argument_types.name, default="")
    command.add_argument("--no-read-cache", action="store_true", help="compute every token")
    command.add_argument("--no-write-cache", action="store_true", help="publish nothing for later requests")


def _serve(arguments: argparse.Namespace) -> None:
    config = Config.load(arguments.config, [*arguments.set, *_settings(arguments)])
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    require_free(config.server)
    # Only here: a client needs neither a model nor a server.
    from radixkv.service.server.metrics_port import Telemetry
    from radixkv.service.server.server import run
    from radixkv.startup.build_engine import build_engine

    telemetry = Telemetry(config)
    engine = build_engine(config, telemetry.observer)
    limits = engine.limits
    _logger.info(
        "model %s on %s, %d tokens of K/V in blocks of %d",
        limits.model,
        limits.device,
        engine.pool_tokens,
        limits.block_size,
    )
    with telemetry.serving(engine):
        run(engine, config.server)


def _prefill(arguments: argparse.Namespace) -> None:
    token_ids = _encoded(arguments) if arguments.tokens is None else arguments.tokens
    if arguments.priority is None and arguments.ttl_s is not None:
        raise ConfigError("--ttl-s: expected a --priority with it, got none")
    retention = None if arguments.priority is None else Retention(arguments.priority, arguments.ttl_s)
    if retention is not None:
        try:
            retention.range_in(max(1, len(token_ids)))
        except InvalidRequest as error:
            raise ConfigError(str(error)) from error
    with _client(arguments) as client:
        answer = client.prefill(
            token_ids,
            tenant=arguments.tenant,
            adapter=arguments.adapter,
            salt=arguments.salt,
            read_cache=not arguments.no_read_cache,
            write_cache=not arguments.no_write_cache,
            retention=retention,
            top_logprobs=arguments.top_logprobs,
        )
    print(json_of(answer) if arguments.json else prefill_table(answer))


def _generate(arguments: argparse.Namespace) -> None:
    token_ids = _encoded(arguments) if arguments.tokens is None else arguments.tokens
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
            tenant=arguments.tenant,
            adapter=arguments.adapter,
            salt=arguments.salt,
            read_cache=not arguments.no_read_cache,
            write_cache=not arguments.no_write_cache,
        ):
            answer.MergeFrom(news)  # which joins the tokens
            if not arguments.json:
                print(*news.token_ids, end="\n" if news.finished else " ", flush=True)
    print(json_of(answer) if arguments.json else generate_table(answer))


def _stats(arguments: argparse.Namespace) -> None:
    with _client(arguments) as client:
        stats = client.stats()
    print(json_of(stats) if arguments.json else stats_table(stats))


def _purge(arguments: argparse.Namespace) -> None:
    names = {"tenant": arguments.tenant, "adapter": arguments.adapter, "salt": arguments.salt}
    if arguments.all is not (set(names.values()) == {None}):
        raise ConfigError("purge: expected either --all, or one or more of --tenant, --adapter, --salt")
    with _client(arguments) as client:
        purged = client.purge(**names, everything=arguments.all)
    print(json_of(purged) if arguments.json else purge_table(purged))


def _simulate(arguments: argparse.Namespace) -> None:
    from radixkv.service.commands.simulate_command import run_simulations

    output = run_simulations(
        arguments.trace,
        capacities_tokens=arguments.capacity_tokens,
        policies=arguments.policy,
        block_size=arguments.block_size,
        limit=arguments.limit,
        plot=arguments.plot,
        as_json=arguments.json,
    )
    print(output)


def _client(arguments: argparse.Namespace) -> Client:
    try:
        return Client(arguments.address, timeout_s=arguments.timeout_s)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _settings(arguments: argparse.Namespace) -> list[str]:
    named = {
        "model.path": arguments.model,
        "model.device": arguments.device,
        "server.host": arguments.host,
        "server.port": arguments.port,
        "server.metrics_port": arguments.metrics_port,
    }
    # A JSON string is a TOML string.
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in named.items() if value is not None]


def _encoded(arguments: argparse.Namespace) -> list[int]:
    if arguments.tokenizer is None:
        return list(arguments.text.encode("utf-8", "surrogateescape"))  # the very bytes of the command line
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(arguments.tokenizer, local_files_only=True)
    except OSError as error:
        raise ConfigError(f"--tokenizer: expected a directory with a tokenizer, got {arguments.tokenizer}") from error
    token_ids: list[int] = tokenizer.encode(arguments.text)
    return token_ids


def _text_of(error: grpc.RpcError) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error)


def _complain(code: int, message: str) -> int:
    print(f"radixkv: {' '.join(message.split())}", file=sys.stderr)
    return code
