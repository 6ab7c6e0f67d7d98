"""`radixkv simulate --replicas`: replays a trace through a fleet, and prints the hit rates of each routing policy."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

from radixkv.errors import ConfigError
from radixkv.planning.fleet_simulation import Fleet, FleetSimulation, check_fleet, simulate_fleet
from radixkv.planning.simulate import NO_HINTS, Simulation, simulate
from radixkv.planning.trace import TraceRequest
from radixkv.routing.policies import PREFIX, ROUTINGS
from radixkv.service.cli.argument_types import names, positive, whole
from radixkv.service.cli.options import Option
from radixkv.service.cli.terminal import align_columns
from radixkv.service.cli.trace_options import requests_of
from radixkv.service.progress_bar import progress_bar

_TOKENS_PER_S = 20_000
_MAX_REPLICAS = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class FleetComparison:
    """The simulation of a fleet compared with that of one cache.

    Attributes:
        fleet: the simulated fleet.
        single: one cache with the capacity of all replicas together.
    """

    fleet: FleetSimulation
    single: Simulation

    @property
    def share(self) -> float:
        """Hit rate of the fleet divided by that of one cache; 1 if both are 0."""
        return self.fleet.token_hit_rate / self.single.token_hit_rate if self.single.cached_tokens else 1.0


FLEET_OPTIONS = (
    Option("--replicas", "N", positive, "number of servers (default: one cache without queues)"),
    Option("--routing", "R[,R...]", names, f"routing policies: {', '.join(ROUTINGS)} (default: {PREFIX})"),
    Option(
        "--tokens-per-s",
        "X",
        whole,
        f"tokens that a server computes per second, one prompt at a time (default: {_TOKENS_PER_S:g})",
    ),
)


def fleets_of(arguments: argparse.Namespace) -> list[Fleet] | None:
    """Return the requested fleets, one per capacity; None without `--replicas`.

    Raises:
        ConfigError: options exclude each other, or are out of range.
    """
    if arguments.replicas is None:
        for option in ("routing", "tokens_per_s"):
            if getattr(arguments, option) is not None:
                raise ConfigError(f"--{option.replace('_', '-')}: requires --replicas")
        return None
    if arguments.replicas > _MAX_REPLICAS:
        raise ConfigError(f"--replicas: expected at most {_MAX_REPLICAS}, got {arguments.replicas}")
    unsupported = {
        "--tier": bool(arguments.tiers),
        "--plot": arguments.plot is not None,
        "--hints": arguments.hints != NO_HINTS,
        "--time-model": arguments.time_model is not None,
    }
    for option, is_set in unsupported.items():
        if is_set:
            raise ConfigError(f"{option}: can't be combined with --replicas")
    tokens_per_s = _TOKENS_PER_S if arguments.tokens_per_s is None else arguments.tokens_per_s
    return [Fleet(arguments.replicas, capacity, tokens_per_s) for capacity in arguments.capacity_tokens]


def run_fleets(arguments: argparse.Namespace, fleets: Sequence[Fleet]) -> str:
    """Replay a trace through each fleet with each routing and eviction policy. Returns the text to print.

    Raises:
        ConfigError: an argument is invalid; raised before anything is replayed.
    """
    routings, block_size = arguments.routing or [PREFIX], arguments.block_size
    for policy, fleet, routing in itertools.product(arguments.policy, fleets, routings):
        check_fleet(fleet, routing=routing, policy=policy, block_size=block_size)
    requests = requests_of(arguments)
    results = [
        result
        for policy, fleet in itertools.product(arguments.policy, fleets)
        for result in _compare(requests, fleet, routings, policy, block_size, arguments.probation_share)
    ]
    if arguments.json:
        return json.dumps([_object_of(result) for result in results], indent=2)
    return fleet_table(results)


def fleet_table(results: Sequence[FleetComparison]) -> str:
    """Return a table with one line per simulation."""
    rows = [("routing", "policy", "capacity", "hit rate", "one cache", "share", "spread", "busy", "p50", "p99", "time")]
    for result in results:
        fleet = result.fleet
        rows.append(
            (
                fleet.routing,
                fleet.policy,
                f"{fleet.replicas} x {fleet.capacity_tokens:,}",
                f"{fleet.token_hit_rate:.4f}",
                f"{result.single.token_hit_rate:.4f}",
                f"{result.share:.3f}",
                f"{fleet.load_spread:.3f}",
                f"{fleet.busy:.2f}",
                f"{fleet.ttft_p50_s:.2f} s",
                f"{fleet.ttft_p99_s:.2f} s",
                f"{fleet.seconds:.1f} s",
            )
        )
    first = results[0].fleet
    summary = (
        f"{first.requests:,} requests, {first.prompt_tokens:,} prompt tokens, blocks of {first.block_size}, "
        f"{first.tokens_per_s:g} tokens/s per server"
    )
    notes = (
        "share: hit rate divided by that of one cache with the capacity of all replicas",
        "spread: computed tokens of the busiest server divided by the mean; p50, p99: time to first token",
    )
    return "\n".join([summary, *notes, "", *align_columns(rows, is_right=True)])


def _compare(
    requests: Sequence[TraceRequest],
    fleet: Fleet,
    routings: Sequence[str],
    policy: str,
    block_size: int,
    probation_share: float,
) -> list[FleetComparison]:
    total_tokens = fleet.replicas * fleet.capacity_tokens
    with progress_bar(f"{policy} at {total_tokens:,}", len(requests)) as advance:
        single = simulate(
            requests,
            policy=policy,
            capacity_tokens=total_tokens,
            block_size=block_size,
            probation_share=probation_share,
            on_request=advance,
        )
    results = []
    for routing in routings:
        with progress_bar(f"{routing}, {fleet.replicas} x {fleet.capacity_tokens:,}", len(requests)) as advance:
            simulated = simulate_fleet(
                requests,
                fleet,
                routing=routing,
                policy=policy,
                block_size=block_size,
                probation_share=probation_share,
                on_request=advance,
            )
        results.append(FleetComparison(simulated, single))
    return results


def _object_of(result: FleetComparison) -> dict[str, Any]:
    compared = {"single_cache_hit_rate": result.single.token_hit_rate, "share_of_single_cache": result.share}
    return dataclasses.asdict(result.fleet) | compared
