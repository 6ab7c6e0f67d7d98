"""Command line of `bench.replay`."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.parts.workloads import (
    MAX_SEED,
    WorkItem,
    assign_in_turn,
    mooncake,
    poisson_arrivals,
    shared_prefix,
    trace_arrivals,
)
from radixkv.config.needed_package import missing_package
from radixkv.errors import ConfigError
from radixkv.planning.trace import load_trace
from radixkv.service.cli.argument_types import positive_number

DEFAULT_CONCURRENCY = 4
DEFAULT_REQUESTS = 1000
DEFAULT_BASELINE_S = 120.0


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Arguments of `python -m bench.replay`, whose `--help` explains them, with defaults filled in.

    Attributes:
        concurrency: requests in flight; None in an open loop.
        rate: mean arrivals per second of a Poisson process; None for other arrivals.
        time_limit_s: time limit of the whole run; None for no limit.
        baseline_requests: None for as many as time allows; 0 for no pass without the cache.
        baseline_seconds: limit of the pass without the cache; infinite for no limit.
    """

    workload: str
    address: str | None
    model: str | None
    device: str | None
    settings: tuple[str, ...]
    adapters: int
    tenants: int
    public_prefix: bool
    requests: int
    prefix_tokens: int
    suffix_tokens: int
    groups: int
    tokenizer: str | None
    trace: Path | None
    limit: int | None
    scale: float
    pace: str
    speedup: float
    concurrency: int | None
    rate: float | None
    timeout_s: float
    vocab_size: int
    seed: int
    time_limit_s: float | None
    baseline_requests: int | None
    baseline_seconds: float
    json: Path | None
    plot: Path | None
    progress: bool

    def build_items(self) -> list[WorkItem]:
        """Build the whole workload.

        Raises:
            ConfigError: the trace or the tokenizer can't be read, or the tokenizer has no chat template.
        """
        if self.trace is not None:
            items = mooncake(load_trace(self.trace, limit=self.limit), self.vocab_size, self.scale)
        elif self.tokenizer is not None:
            from bench.parts.document_questions import document_questions
            from radixkv.service.text.tokenizer import Tokenizer  # needs the extra text

            try:
                tokenizer = Tokenizer.load(self.tokenizer)
            except ValueError as error:
                raise ConfigError(f"--tokenizer: {error}") from error
            try:
                items = document_questions(tokenizer, self.requests)
            except ValueError as error:  # no chat template
                raise ConfigError(f"--tokenizer: {error}") from error
        else:
            items = shared_prefix(
                self.requests, self.prefix_tokens, self.suffix_tokens, self.groups, self.vocab_size, self.seed
            )
        items = assign_in_turn(items, self.adapters, self.tenants)
        if self.rate is not None:
            return poisson_arrivals(items, self.rate, self.seed)
        return trace_arrivals(items, self.speedup) if self.pace == "trace" else items

    def describe_workload(self, items: Sequence[WorkItem]) -> str:
        """Describe the workload in words."""
        num_tokens = sum(len(item.token_ids) for item in items)
        if self.tokenizer is not None:
            kind = "questions about one document"
        elif self.trace is None:
            groups = "1 group" if self.groups == 1 else f"{self.groups:,} groups"
            kind = f"{self.prefix_tokens:,} shared + {self.suffix_tokens:,} own tokens each, {groups}"
        else:
            kind = f"{self.trace.name}, scale {self.scale:g}"
        assignment = f", {self.adapters} adapters in turn" if self.adapters else ""
        assignment += f", {self.tenants} tenants" if self.tenants > 1 else ""
        assignment += ", public prefixes" if self.public_prefix else ""
        return f"{len(items):,} requests, {kind}, {num_tokens:,} tokens in all{assignment}"

    def describe_traffic(self) -> str:
        """Describe how the requests are sent, in words."""
        if self.rate is not None:
            return f"open loop, Poisson arrivals at {self.rate:g} requests/s"
        if self.pace == "trace":
            return f"open loop, arrivals of the trace at {self.speedup:g}x speed"
        return f"closed loop, {self.concurrency} requests at a time"


def parse_options(arguments: Sequence[str] | None = None) -> ReplayOptions:
    """Parse the command line, and refuse options that contradict each other, before anything is started.

    Raises:
        SystemExit: the arguments are wrong, or `--help` is one of them.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    conflict = _first_conflict(args)
    if conflict is not None:
        parser.error(conflict)
    for file in (args.json, args.plot):
        if file is not None and not file.absolute().parent.is_dir():
            parser.error(f"expected a directory, got none at {file.absolute().parent}")
    fields = vars(args)
    fields["baseline_requests"] = 0 if fields.pop("no_baseline") else args.baseline_requests
    fields["requests"] = args.requests or DEFAULT_REQUESTS
    fields["concurrency"] = None if _is_open_loop(args) else (args.concurrency or DEFAULT_CONCURRENCY)
    fields["settings"] = tuple(args.settings)
    return ReplayOptions(**fields)


def _is_open_loop(args: argparse.Namespace) -> bool:
    return args.rate is not None or args.pace == "trace"


def _first_conflict(args: argparse.Namespace) -> str | None:
    is_trace = args.workload == "mooncake"
    is_document = args.workload == "document"
    starts_server = args.address is None
    rules = (
        (is_trace and args.trace is None, "--workload mooncake needs --trace FILE"),
        (is_document and args.tokenizer is None, "--workload document needs --tokenizer SOURCE"),
        (not is_document and args.tokenizer is not None, "--tokenizer needs --workload document"),
        (is_document and args.public_prefix, "--public-prefix is for shared-prefix"),
        (is_trace and args.requests is not None, "--requests is for the other workloads; a trace takes --limit"),
        (is_trace and args.public_prefix, "--public-prefix is for shared-prefix"),
        (not is_trace and args.trace is not None, "--trace needs --workload mooncake"),
        (not is_trace and args.limit is not None, "--limit is for mooncake; other workloads take --requests"),
        (not is_trace and args.pace == "trace", "--pace trace needs --workload mooncake"),
        (args.rate is not None and args.pace == "trace", "--rate and --pace trace exclude each other"),
        (args.pace != "trace" and args.speedup != 1, "--speedup needs --pace trace"),
        (_is_open_loop(args) and args.concurrency is not None, "--concurrency excludes --rate and --pace trace"),
        (args.no_baseline and args.baseline_requests is not None, "--no-baseline excludes --baseline-requests"),
        (not starts_server and args.model is not None, "--model is for a server started here, not for --address"),
        (not starts_server and args.device is not None, "--device is for a server started here, not for --address"),
        (not starts_server and args.adapters > 0, "--adapters is for a server started here, not for --address"),
        (not starts_server and bool(args.settings), "--set is for a server started here, not for --address"),
        (
            args.plot is not None and importlib.util.find_spec("matplotlib") is None,
            f"--plot: {missing_package('matplotlib', 'plot')}",
        ),
    )
    return next((message for is_wrong, message in rules if is_wrong), None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.replay",
        description="Replay traffic with the cache, then without it, on the same server; compare.",
        allow_abbrev=False,
    )
    parser.add_argument("--workload", required=True, choices=("shared-prefix", "document", "mooncake"))
    document = parser.add_argument_group("document")
    document.add_argument("--tokenizer", metavar="SOURCE", help="the model's: a directory, a GGUF file or ORG/NAME")
    shared = parser.add_argument_group("shared-prefix")
    shared.add_argument(
        "--requests", type=_integer(1), metavar="N", help=f"also of document; default {DEFAULT_REQUESTS}"
    )
    shared.add_argument("--prefix-tokens", type=_integer(0), default=2048, metavar="N", help="default 2048")
    shared.add_argument("--suffix-tokens", type=_integer(1), default=64, metavar="N", help="default 64")
    shared.add_argument("--groups", type=_integer(1), default=1, metavar="N", help="different prefixes; default 1")
    shared.add_argument("--public-prefix", action="store_true", help="register the prefixes as public")
    trace = parser.add_argument_group("mooncake")
    trace.add_argument("--trace", type=Path, metavar="FILE", help="requests in a format of `radixkv simulate`")
    trace.add_argument("--limit", type=_integer(1), metavar="N", help="the first N requests only")
    trace.add_argument("--scale", type=positive_number, default=1.0, metavar="X", help="shorten all prompts; default 1")
    trace.add_argument("--pace", choices=("fast", "trace"), default="fast", help="trace: send at the timestamps")
    trace.add_argument("--speedup", type=positive_number, default=1.0, metavar="X", help="with --pace trace; default 1")
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--concurrency", type=_integer(1), metavar="N", help=f"requests in flight; default {DEFAULT_CONCURRENCY}"
    )
    traffic.add_argument(
        "--adapters", type=_integer(0), default=0, metavar="N", help="random adapters, used in turn; default 0"
    )
    traffic.add_argument(
        "--tenants", type=_integer(1), default=1, metavar="M", help="tenants, assigned in turn; default 1"
    )
    traffic.add_argument("--rate", type=positive_number, metavar="R", help="Poisson arrivals, R requests/s")
    traffic.add_argument(
        "--timeout-s", type=positive_number, default=600.0, metavar="S", help="per request; default 600"
    )
    traffic.add_argument(
        "--vocab-size", type=_integer(1), default=256, metavar="N", help="token ids below N; default 256 fits any model"
    )
    traffic.add_argument(
        "--time-limit-s",
        type=positive_number,
        metavar="S",
        help="end the whole run, including the start of the server, within S seconds, and report what was measured",
    )
    traffic.add_argument("--seed", type=_integer(0, MAX_SEED - 1), default=0, metavar="N", help="default 0")
    baseline = parser.add_argument_group("without cache")
    baseline.add_argument(
        "--baseline-requests",
        type=_integer(1),
        metavar="N",
        help="replay at most N requests, spread evenly, or the first N in an open loop; default all that time allows",
    )
    baseline.add_argument(
        "--baseline-seconds",
        type=_positive_or_inf,
        default=DEFAULT_BASELINE_S,
        metavar="S",
        help=f"send for at most S seconds; inf for no limit; default {DEFAULT_BASELINE_S:g}",
    )
    baseline.add_argument("--no-baseline", action="store_true", help="skip the pass without cache")
    server = parser.add_argument_group("server")
    server.add_argument("--address", metavar="HOST:PORT", help="a running server; default: start one for this run")
    server.add_argument(
        "--model", metavar="M", help="as for `radixkv serve`; with --adapters, tiny (the default) or a directory"
    )
    server.add_argument("--device", choices=("auto", "cpu", "cuda"))
    server.add_argument("--set", dest="settings", action="append", default=[], metavar="A.B=V", help="may be repeated")
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE")
    output.add_argument("--plot", type=Path, metavar="FILE.png")
    output.add_argument(
        "--progress", action="store_true", help="if stderr is not a terminal, print a line every few seconds"
    )
    return parser


def _integer(min_value: int, max_value: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < min_value or (max_value is not None and value > max_value):
            limits = f"at least {min_value}" if max_value is None else f"{min_value} to {max_value}"
            raise argparse.ArgumentTypeError(f"expected {limits}, got {value}")
        return value

    parse.__name__ = "whole number"  # argparse calls the type so in its error messages
    return parse


def _positive_or_inf(text: str) -> float:
    return float("inf") if text == "inf" else positive_number(text)
