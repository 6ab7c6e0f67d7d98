"""`radixkv simulate`: replays a trace, then prints the hit rates as a table or JSON, or plots them."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radixkv.config import CacheConfig
from radixkv.config.needed_package import missing_package
from radixkv.errors import ConfigError
from radixkv.planning.simulate import (
    HINTS,
    NO_HINTS,
    OPTIMAL,
    SIMULATED_POLICIES,
    Latency,
    Simulation,
    check_simulation,
    simulate,
)
from radixkv.planning.tiers import TierCapacity, TierUsage
from radixkv.planning.time_model import TimeModel
from radixkv.planning.trace import TraceRequest
from radixkv.service.cli.argument_types import COUNTS, capacities, names, positive, share
from radixkv.service.cli.model_options import MODEL_OPTIONS, format_of, layout_of, model_of
from radixkv.service.cli.options import Option, add_options, flag
from radixkv.service.cli.simulate_fleet import FLEET_OPTIONS, fleets_of, run_fleets
from radixkv.service.cli.terminal import align_columns
from radixkv.service.cli.tier_options import tier_capacities, tier_option
from radixkv.service.cli.trace_options import TRACE_OPTIONS, requests_of
from radixkv.service.progress_bar import progress_bar

_RECORDED = "recorded"
_OPTIONS = (
    Option("--capacity-tokens", "N[,N...]", capacities, "capacity of the cache in tokens", more={"required": True}),
    Option("--policy", "P[,P...]", names, f"eviction policies: {', '.join(SIMULATED_POLICIES)}", "adaptive"),
    Option("--block-size", "B", positive, "tokens per block", 512),
    Option(
        "--probation-share",
        "X",
        share,
        "share of the cache for one-shot prompts, as cache.probation_share (whose default is "
        f"{CacheConfig().probation_share}); with 1 the policy alone decides",
        1.0,
    ),
    Option(
        "--hints",
        "H",
        None,
        f"what the cache knows about sessions: {', '.join(HINTS)}; with stop, it knows why each answer ended, and with "
        "end which answer of a session is the last",
        NO_HINTS,
    ),
    tier_option(),
    Option(
        "--time-model",
        f"FILE|{_RECORDED}",
        None,
        "how long prefills and loads take: a JSON file of `radixkv plan`, or what the server measured while it "
        "recorded the trace; prints times to the first token, and loads sessions before their next turn (default: they "
        "take no time)",
    ),
    flag("--json", "print a JSON list with one object per policy and capacity"),
    Option(
        "--plot",
        "FILE.png",
        None,
        "plot the hit rate against the capacity; needs matplotlib, from the extra `plot` (default: no plot)",
    ),
)


def add_arguments(simulate: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    simulate.description = f"Replay a trace without a model to find the hit rate for each capacity and policy. {COUNTS}"
    add_options(simulate, (*TRACE_OPTIONS, *_OPTIONS))
    fleet = simulate.add_argument_group("a fleet", "Several servers, each with a cache of --capacity-tokens.")
    add_options(fleet, FLEET_OPTIONS)
    model = simulate.add_argument_group("the model", "Needed only for tiers whose size is in bytes.")
    add_options(model, MODEL_OPTIONS)
    simulate.set_defaults(command=_simulate)


def _simulate(arguments: argparse.Namespace) -> None:
    fleets = fleets_of(arguments)
    print(_run_simulations(arguments) if fleets is None else run_fleets(arguments, fleets))


def _run_simulations(arguments: argparse.Namespace) -> str:
    """Replay the trace for each policy and capacity, and draw the plot if requested. Returns the text to print.

    A plot always includes the optimum.

    Raises:
        ConfigError: an argument is invalid; raised before anything is replayed.
    """

    def token_bytes_of(subject: str) -> int:
        model = model_of(arguments)
        return layout_of(model, subject).token_bytes(format_of(model, arguments))

    policies, capacities_tokens, block_size = arguments.policy, arguments.capacity_tokens, arguments.block_size
    tiers = tier_capacities(arguments.tiers, token_bytes_of, block_size)
    for policy, capacity_tokens in itertools.product(policies, capacities_tokens):
        check_simulation(
            policy=policy,
            capacity_tokens=capacity_tokens,
            block_size=block_size,
            tiers=tiers,
            hints=arguments.hints,
        )
    plot = None if arguments.plot is None else Path(arguments.plot)
    if plot is not None:
        _require_plottable(plot)
    time_model = None if arguments.time_model in (None, _RECORDED) else TimeModel.read(Path(arguments.time_model))
    requests, probation_share = requests_of(arguments), arguments.probation_share
    if arguments.time_model == _RECORDED:
        time_model = _recorded_times(requests, tiers)
    simulations = _simulate_all(
        requests, policies, capacities_tokens, block_size, probation_share, tiers, arguments.hints, time_model
    )
    if plot is not None:
        from radixkv.service.cli.hit_rate_plot import draw_hit_rates

        missing_policies = [] if OPTIMAL in policies else [OPTIMAL]
        optima = _simulate_all(requests, missing_policies, capacities_tokens, block_size, probation_share, tiers)
        draw_hit_rates(plot, [*simulations, *optima], Path(arguments.trace).name)
    if arguments.json:
        return json.dumps([_object_of(simulation) for simulation in simulations], indent=2)
    return simulation_table(simulations)


def _recorded_times(requests: Sequence[TraceRequest], tiers: Sequence[TierCapacity]) -> TimeModel:
    """Fit a time model to what the server measured."""
    measured = [each.measured for each in requests if each.measured is not None]
    if not measured:
        raise ConfigError(
            f"--time-model {_RECORDED}: expected requests with `ttft_ms`, which a server records with "
            "server.record_path, got none"
        )
    times = TimeModel.fit(measured)
    for tier in tiers:
        if tier.name not in times.tiers:
            raise ConfigError(
                f"--time-model {_RECORDED}: expected requests that loaded from the tier {tier.name}, got none; "
                "write a time model with the rate of the tier with `radixkv plan --time-model`"
            )
    return times


def simulation_table(simulations: Sequence[Simulation]) -> str:
    """Return a table with one line per policy and capacity; with tiers, also the hits and writes of each tier."""
    tier_names = list(dict.fromkeys(tier.tier for each in simulations for tier in each.tiers))
    rate_columns = ["device", *tier_names] if tier_names else []
    block_columns = [f"{name} {verb}" for name in tier_names for verb in ("written", "loaded")]
    has_latencies = any(each.latency for each in simulations)
    latency_columns = ["TTFT p50", "p95", "returns", "ready", "timely"] if has_latencies else []
    rows = [
        (
            "policy",
            "capacity",
            "hit rate",
            *rate_columns,
            "cached",
            "evicted",
            *block_columns,
            *latency_columns,
            "time",
        )
    ]
    for each in simulations:
        tiers = {tier.tier: tier for tier in each.tiers}
        rates = {"device": each.device_tokens / each.prompt_tokens} if tiers else {}
        rates |= {name: tier.token_hit_rate for name, tier in tiers.items()}
        rows.append(
            (
                each.policy,
                f"{each.capacity_tokens:,}",
                f"{each.token_hit_rate:.4f}",
                *(f"{rates[column]:.4f}" if column in rates else "-" for column in rate_columns),
                f"{each.cached_tokens:,}",
                f"{each.evicted_tokens:,}",
                *(_block_cell(tiers.get(name), verb) for name in tier_names for verb in ("written", "loaded")),
                *_latency_cells(each.latency, len(latency_columns)),
                f"{each.seconds:.1f} s",
            )
        )
    first = simulations[0]
    summary = f"{first.requests:,} requests, {first.prompt_tokens:,} prompt tokens, blocks of {first.block_size}"
    notes = ["hit rates count tokens, writes and loads count blocks"] if tier_names else []
    if has_latencies:
        notes.append("returns: requests after a tool call; ready: what they repeat was on the device")
        notes.append("timely: TTFT at most 1.1 times what it would have been if the return had been ready")
    return "\n".join([summary, *notes, "", *align_columns(rows, is_right=True)])


def _block_cell(usage: TierUsage | None, verb: str) -> str:
    if usage is None:
        return "-"
    return f"{usage.written_blocks if verb == 'written' else usage.loaded_blocks:,}"


def _latency_cells(latency: Latency | None, num_cells: int) -> list[str]:
    if latency is None:
        return ["-"] * num_cells
    shares = (f"{latency.ready_share:.1%}", f"{latency.timely_share:.1%}") if latency.num_returns else ("-", "-")
    return [f"{latency.ttft_p50_s:.3f} s", f"{latency.ttft_p95_s:.3f} s", f"{latency.num_returns:,}", *shares]


def _object_of(simulation: Simulation) -> dict[str, Any]:
    """Return the fields of a simulation for JSON; fields of tiers and of latencies only if it has them."""
    fields = dataclasses.asdict(simulation)
    if simulation.latency is None:
        del fields["latency"]
    if not simulation.tiers:
        del fields["tiers"]
        return fields
    device = {"device_tokens": simulation.device_tokens}
    return fields | device | {"device_hit_rate": simulation.device_tokens / simulation.prompt_tokens}


def _simulate_all(
    requests: Sequence[TraceRequest],
    policies: Sequence[str],
    capacities_tokens: Sequence[int],
    block_size: int,
    probation_share: float,
    tiers: Sequence[TierCapacity],
    hints: str = NO_HINTS,
    times: TimeModel | None = None,
) -> list[Simulation]:
    simulations = []
    for policy, capacity_tokens in itertools.product(policies, capacities_tokens):
        with progress_bar(f"{policy} at {capacity_tokens:,}", len(requests)) as advance:
            simulations.append(
                simulate(
                    requests,
                    policy=policy,
                    capacity_tokens=capacity_tokens,
                    block_size=block_size,
                    probation_share=probation_share,
                    tiers=tiers,
                    hints=hints,
                    times=times,
                    on_request=advance,
                )
            )
    return simulations


def _require_plottable(plot: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot: {missing_package('matplotlib', 'plot')}")
    if plot.suffix.lower() != ".png":
        raise ConfigError(f"--plot: expected a file name ending in .png, got {plot}")
    if not plot.parent.is_dir():
        raise ConfigError(f"--plot: expected an existing directory, got {plot.parent}")
    if plot.is_dir() or not os.access(plot if plot.exists() else plot.parent, os.W_OK):
        raise ConfigError(f"--plot: expected a file that can be written, got {plot}")
