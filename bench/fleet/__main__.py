"""Simulates fleets over traces for each routing policy, and times routing decisions.

python -m bench.fleet [--trace FILE] [--json FILE]
python -m bench.fleet --only-decisions [--json FILE]

The traces are FILE, in a format of `radixkv simulate`, and one hour of agent sessions that `bench/fleet/agents.py`
generates. Hit rates are compared with those of one cache of the total size. The same command gives the same counts on
every machine; only the times of decisions differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.fleet.agents import agents_trace
from bench.fleet.decision import time_decisions
from bench.parts.result_file import write_result
from radixkv.planning.fleet_simulation import Fleet, FleetSimulation, simulate_fleet
from radixkv.planning.simulate import simulate
from radixkv.planning.trace import TraceRequest, load_trace
from radixkv.routing.policies import PREFIX, ROUTINGS
from radixkv.service.cli.argument_types import names, positive, whole

# Targets of prefix routing.
_MAX_SPREAD = 1.15  # load spread of the smallest fleet
_MIN_SHARES = {8: 0.95, 64: 0.9}  # hit rate, as a share of that of one cache of the total size, by number of replicas
# Number of replicas, tokens per second of each, and whether all routing policies are compared. With slower replicas,
# the queues are longer.
_FLEETS = ((8, 20_000, True), (8, 10_000, False), (8, 5_000, False), (64, 20_000, False), (64, 5_000, False))
# Tokens of an event block, and of a prompt before its last turn.
_DECISIONS = ((16, 8_192), (16, 32_768), (64, 8_192), (64, 32_768), (64, 131_072))


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, and time decisions. Returns 1 if prefix routing misses its targets for hit rate or load spread."""
    parser = argparse.ArgumentParser(description="Simulate fleets, and time routing decisions.")
    parser.add_argument(
        "--trace", type=Path, help="requests in a format of `radixkv simulate` (default: only the generated trace)"
    )
    parser.add_argument("--limit", type=positive, help="the first N requests of each trace (default: all)")
    parser.add_argument("--capacity-tokens", type=whole, default=3_000_000, help="capacity of each replica's cache")
    parser.add_argument(
        "--replicas", type=int, choices=sorted(_MIN_SHARES), help="only fleets of this size (default: both)"
    )
    parser.add_argument("--routing", type=names, default=list(ROUTINGS), help="policies to compare")
    parser.add_argument(
        "--decisions", type=positive, default=10_000, help="decisions to time, for each block size and prompt length"
    )
    parser.add_argument("--known-blocks", type=positive, default=1_000_000, help="blocks that the router knows")
    parser.add_argument("--only-decisions", action="store_true", help="simulate nothing")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    traces = {} if options.only_decisions else {"agents": agents_trace()}
    if options.trace is not None and not options.only_decisions:
        traces = {options.trace.name: load_trace(options.trace)} | traces
    rows: list[dict[str, Any]] = []
    for name, requests in traces.items():
        rows += _simulate(name, requests[: options.limit], options)
    decision_rows = [_time_case(block_size, prompt_tokens, options) for block_size, prompt_tokens in _DECISIONS]
    write_result(options.json, "bench.fleet", arguments, {"rows": rows, "decisions": decision_rows})
    return int(any(row["is_missed"] for row in rows))


def _simulate(name: str, requests: Sequence[TraceRequest], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Simulate all fleets over a trace. Returns a row for each fleet and routing policy."""
    print(f"{name}: {len(requests):,} requests, {sum(request.input_length for request in requests):,} tokens")
    rows: list[dict[str, Any]] = []
    single_cache_hit_rates: dict[int, float] = {}
    for replicas, tokens_per_s, compares_policies in _FLEETS:
        if options.replicas not in (None, replicas):
            continue
        if replicas not in single_cache_hit_rates:
            total_tokens = replicas * options.capacity_tokens
            single_cache_hit_rates[replicas] = simulate(
                requests, policy="adaptive", capacity_tokens=total_tokens
            ).token_hit_rate
        for routing in options.routing:
            if compares_policies or routing == PREFIX:
                fleet = Fleet(replicas, options.capacity_tokens, tokens_per_s)
                simulation = simulate_fleet(requests, fleet, routing=routing)
                rows.append(_row(name, simulation, single_cache_hit_rates[replicas]))
                print(_format_row(rows[-1]), flush=True)
    return rows


def _row(name: str, simulation: FleetSimulation, single_cache_hit_rate: float) -> dict[str, Any]:
    share = simulation.token_hit_rate / single_cache_hit_rate
    is_uneven = simulation.replicas == min(_MIN_SHARES) and simulation.load_spread > _MAX_SPREAD
    is_missed = simulation.routing == PREFIX and (share < _MIN_SHARES[simulation.replicas] or is_uneven)
    comparison = {
        "single_cache_hit_rate": single_cache_hit_rate,
        "share_of_single_cache": share,
        "is_missed": is_missed,
    }
    return {"trace": name} | dataclasses.asdict(simulation) | comparison


def _format_row(row: dict[str, Any]) -> str:
    return (
        f"  {row['replicas']:3} x {row['tokens_per_s']:6,} tokens/s  {row['routing']:15} "
        f"hit rate {row['token_hit_rate']:.4f} of {row['single_cache_hit_rate']:.4f} = "
        f"{row['share_of_single_cache']:.3f}  spread {row['load_spread']:.3f}  busy {row['busy']:.2f}  "
        f"TTFT {row['ttft_p50_s']:.2f} s, p99 {row['ttft_p99_s']:.2f} s{'  MISSED' if row['is_missed'] else ''}"
    )


def _time_case(block_size: int, prompt_tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """Time decisions in a fleet of 64 replicas. Prints and returns the result."""
    times = time_decisions(
        replicas=64,
        num_blocks=options.known_blocks,
        block_size=block_size,
        prompt_tokens=prompt_tokens,
        decisions=options.decisions,
    )
    print(
        f"decision: {times.replicas} replicas, {times.known_blocks:,} blocks of {block_size}, at the end "
        f"{times.end_blocks:,}, {times.refused_blocks:,} refused; prompts of {times.prompt_tokens:,} tokens: "
        f"p50 {times.p50_us:.0f} us, p99 {times.p99_us:.0f} us; recorded afterwards in p50 "
        f"{times.remember_p50_us:.0f} us, p99 {times.remember_p99_us:.0f} us",
        flush=True,
    )
    return dataclasses.asdict(times) | {"machine_load": os.getloadavg()[0]}


if __name__ == "__main__":
    sys.exit(main())
