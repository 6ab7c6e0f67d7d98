"""Measures a fleet on Ray: prefix routing compared with round-robin, the effect of a kill, and the ingress overhead.

python -m bench.fleet.real [--json FILE] [--geometry 83x3,150x5] [--replicas 2] [--concurrency 16]
    [--rates 0.5,0.8,1.0,1.2,1.4]

The replicas serve the embedded model. The traffic is that of llm-d's benchmark, scaled down: groups of prompts with a
common prefix, in random order. The cache of each replica can hold some of the groups. Two fleets, one per routing
policy, are measured in turn, and the caches of a fleet are purged before each of its passes:

1. Capacity: prompts per second in a closed loop.
2. Open loop: prompts arrive at random times, at several rates. The rates are fractions of the capacity of round-robin.
   As in llm-d's benchmark, times to first token diverge at rates at which the queue grows with only one of the
   policies.

Then a replica of the fleet that routes by prefixes is killed under load. The exit status is 0 if no call of the
comparison failed, and after the kill no answer was wrong and no call failed before its first token.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.fleet.fleet_process import FleetProcess
from bench.fleet.grouped_prompts import Geometry, PromptOutcome, random_arrivals, run_pass, summarize
from bench.fleet.killing import MAX_RESTART_S, format_kill, kill_one
from bench.parts.result_file import write_result
from radixkv.errors import ConfigError
from radixkv.service.cli.argument_types import positive, positive_number
from radixkv.service.client import Client

_PREFIX, _ROUND_ROBIN = "prefix", "round-robin"
_PURGE_S = 1.0  # time until the routers have received the events of a purge
_BLOCK_TOKENS = 64
_MAX_IN_OPEN_LOOP = 256  # prompts in flight. If a prompt waited for a thread, this would count as time to first token.
_TENANT = "acme"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the result. Returns the exit status."""
    options = _parser().parse_args(arguments)
    sizes = (options.prefix_tokens, options.question_tokens, options.new_tokens)
    geometries = [Geometry(groups, prompts, *sizes) for groups, prompts in options.geometry]
    rows: list[dict[str, Any]] = []
    kill_result, costs = None, None
    for geometry in geometries:
        prompts = geometry.make_prompts(options.seed)
        with _fleet(geometry, _PREFIX, options) as prefix_fleet:
            with _fleet(geometry, _ROUND_ROBIN, options) as round_robin_fleet:
                fleets = {_ROUND_ROBIN: round_robin_fleet, _PREFIX: prefix_fleet}
                outcomes = _compare(fleets, geometry, prompts, options, rows)
            if geometry is geometries[-1]:
                costs = call_costs(prefix_fleet, prompts[0], options.calls)
                print(_format_costs(costs), flush=True)
                kill_result = kill_one(prefix_fleet, geometry, prompts, outcomes, options.concurrency)
                print(format_kill(kill_result), flush=True)
    is_right = kill_result is not None and not (
        kill_result["wrong_answers"] or kill_result["failed_before_first_token"]
    )
    result = {"rows": rows, "ratios": ratios(rows), "kill": kill_result, "costs": costs}
    write_result(options.json, "bench.fleet.real", arguments, result)
    return int(not is_right or any(row["errors"] for row in rows))


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ratio of times to first token, round-robin divided by prefix routing, for each geometry and rate."""
    result = []
    for prefix_row, round_robin_row in itertools.product(rows, rows):
        if (prefix_row["routing"], round_robin_row["routing"]) != (_PREFIX, _ROUND_ROBIN):
            continue
        if any(prefix_row[key] != round_robin_row[key] for key in ("groups", "prompts", "rate")):
            continue
        prefix_ms, round_robin_ms = prefix_row["ttft_ms"], round_robin_row["ttft_ms"]
        if prefix_ms is None or round_robin_ms is None:  # no call succeeded
            continue
        ttft_ratios = {name: round_robin_ms[name] / prefix_ms[name] for name in ("p50", "p99")}
        result.append({key: prefix_row[key] for key in ("groups", "prompts", "rate", "of_capacity")} | ttft_ratios)
    return result


@contextlib.contextmanager
def _fleet(geometry: Geometry, routing: str, options: argparse.Namespace) -> Iterator[FleetProcess]:
    with FleetProcess(options.replicas, _settings(geometry, routing, options)) as fleet:
        _wait_for_all(fleet, options.replicas)
        yield fleet


def _compare(
    fleets: Mapping[str, FleetProcess],
    geometry: Geometry,
    prompts: Sequence[Sequence[int]],
    options: argparse.Namespace,
    rows: list[dict[str, Any]],
) -> list[PromptOutcome]:
    """Measure both fleets in turn, and add a row for each pass. Returns the last outcomes of prefix routing.

    Args:
        fleets: the fleet with round-robin, whose capacity defines the rates, then that with prefix routing.
        geometry: sizes of the prompts.
        prompts: token ids.
        options: the options of the command.
        rows: the rows so far.
    """
    capacity_per_s: dict[str, float] = {}
    outcomes: list[PromptOutcome] = []
    for fraction in (None, *options.rates):
        for routing, fleet in fleets.items():
            with Client(fleet.address) as client:
                client.purge(everything=True)
            time.sleep(_PURGE_S)
            rate = None if fraction is None else fraction * capacity_per_s[_ROUND_ROBIN]
            outcomes = _pass(fleet, prompts, geometry, rate, options)
            rows.append(_row(geometry, routing, rate, fraction, outcomes, prompts))
            capacity_per_s.setdefault(routing, len(prompts) / rows[-1]["seconds"])
            print(_format_row(rows[-1]), flush=True)
        if fraction is not None:
            print("  ".join(f"{name} {ratios(rows)[-1][name]:.2f} times lower" for name in ("p50", "p99")), flush=True)
    return outcomes


def _pass(
    fleet: FleetProcess,
    prompts: Sequence[Sequence[int]],
    geometry: Geometry,
    rate: float | None,
    options: argparse.Namespace,
) -> list[PromptOutcome]:
    if rate is None:
        return run_pass(fleet.address, prompts, geometry.new_tokens, options.concurrency)
    arrivals_s = random_arrivals(len(prompts), rate, options.seed)
    return run_pass(fleet.address, prompts, geometry.new_tokens, _MAX_IN_OPEN_LOOP, arrivals_s=arrivals_s)


def call_costs(fleet: FleetProcess, prompt: Sequence[int], num_calls: int) -> dict[str, float]:
    """Time a cached prompt through the ingress and directly, and `Route`, in turn. Returns medians in milliseconds."""
    with Client(fleet.address) as client:
        for _ in range(3):  # so that the prompt is cached
            client.prefill(prompt, tenant=_TENANT)
        with Client(client.route(prompt, tenant=_TENANT).address) as replica:
            calls: dict[str, Callable[[], object]] = {
                "ingress": lambda: client.prefill(prompt, tenant=_TENANT),
                "direct": lambda: replica.prefill(prompt, tenant=_TENANT),
                "route": lambda: client.route(prompt, tenant=_TENANT),
            }
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(num_calls):
                for name, call in calls.items():
                    start_s = time.perf_counter()
                    call()
                    times[name].append(1e3 * (time.perf_counter() - start_s))
    medians = {f"{name}_ms": statistics.median(each) for name, each in times.items()}
    return {**medians, "ingress_cost_ms": medians["ingress_ms"] - medians["direct_ms"], "calls": num_calls}


def _wait_for_all(fleet: FleetProcess, replicas: int) -> None:
    end_s = time.monotonic() + MAX_RESTART_S
    while len(fleet.replicas()) < replicas:
        if time.monotonic() > end_s:
            raise ConfigError(f"fleet: not all {replicas} replicas were healthy within {MAX_RESTART_S:g} s")
        time.sleep(0.2)


def _settings(geometry: Geometry, routing: str, options: argparse.Namespace) -> list[str]:
    """Return settings of a fleet. Each cache can hold the prefixes of some groups, and the requests in flight."""
    request_tokens = geometry.prefix_tokens + geometry.question_tokens + geometry.new_tokens
    cached_prefix_tokens = round(options.capacity_share * geometry.groups * geometry.prefix_tokens)
    in_flight_tokens = options.concurrency * (request_tokens + 2 * _BLOCK_TOKENS)
    return [
        f"cache.capacity_tokens={cached_prefix_tokens + in_flight_tokens}",
        f"fleet.routing={routing}",
        f"fleet.least_match_tokens={geometry.prefix_tokens // 2}",
        "server.drain_timeout_s=2",
    ]


def _row(
    geometry: Geometry,
    routing: str,
    rate: float | None,
    fraction: float | None,
    outcomes: Sequence[PromptOutcome],
    prompts: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Describe a pass, with its rate also as a fraction of the capacity of round-robin; None in the closed loop."""
    labels = {"groups": geometry.groups, "prompts": geometry.prompts, "routing": routing}
    return {**labels, "rate": rate, "of_capacity": fraction, **summarize(outcomes, prompts)}


def _format_row(row: dict[str, Any]) -> str:
    ttft_ms = row["ttft_ms"] or {"p50": 0.0, "p99": 0.0}
    rate = "at capacity" if row["rate"] is None else f"{row['rate']:4.1f}/s ({row['of_capacity']:.2f})"
    return (
        f"{row['groups']:4} x {row['prompts']}  {row['routing']:12} {rate:12} hit rate {row['token_hit_rate']:.3f}  "
        f"TTFT p50 {ttft_ms['p50']:.0f} ms, p99 {ttft_ms['p99']:.0f} ms  {row['seconds']:.1f} s  {row['errors']} errors"
    )


def _format_costs(costs: dict[str, float]) -> str:
    return (
        f"a cached prompt: {costs['ingress_ms']:.2f} ms through the ingress, {costs['direct_ms']:.2f} ms without; "
        f"Route {costs['route_ms']:.2f} ms: medians"
    )


def _geometries(text: str) -> list[tuple[int, int]]:
    geometries = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)x(\d+)", item)
        if match is None:
            raise argparse.ArgumentTypeError(f"expected GROUPSxPROMPTS,..., got {text!r}")
        geometries.append((int(match[1]), int(match[2])))
    return geometries


def _rates(text: str) -> list[float]:
    return [positive_number(each) for each in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure a fleet on Ray.")
    parser.add_argument("--geometry", type=_geometries, default="83x3,150x5", help="groups x prompts per group")
    parser.add_argument("--prefix-tokens", type=positive, default=1200)
    parser.add_argument("--question-tokens", type=positive, default=240)
    parser.add_argument("--new-tokens", type=positive, default=8)
    parser.add_argument("--replicas", type=positive, default=2)
    parser.add_argument("--concurrency", type=positive, default=16, help="prompts in flight in the closed loop")
    parser.add_argument(
        "--rates", type=_rates, default="0.5,0.8,1.0,1.2,1.4", help="fractions of the capacity of round-robin"
    )
    parser.add_argument(
        "--capacity-share",
        type=float,
        default=0.6,
        help="share of all prefixes that the cache of a replica can hold",
    )
    parser.add_argument("--calls", type=positive, default=200, help="calls that time the ingress")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
