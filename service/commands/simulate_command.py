"""What `radixkv simulate` does: replays with a progress bar, then a table, JSON, or a picture."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from radixkv.errors import ConfigError
from radixkv.planning.simulate import OPTIMAL, Simulation, check_simulation, simulate
from radixkv.planning.trace import TraceRequest, load_trace


def run_simulations(
    trace: str,
    *,
    capacities_tokens: Sequence[int],
    policies: Sequence[str],
    block_size: int,
    limit: int | None,
    plot: str | None,
    as_json: bool,
) -> str:
    """Replay a trace for each policy and capacity.

    Args:
        trace: a Mooncake JSONL file, plain or compressed with gzip.
        capacities_tokens: tokens that the cache holds.
        policies: names from `SIMULATED_POLICIES`.
        block_size: tokens a block.
        limit: how many requests to replay at most; None for all.
        plot: a PNG file to write, or None. The optimum is drawn also if it is not among the policies.
        as_json: a list of objects instead of a table.

    Returns:
        What to print.

    Raises:
        ConfigError: something of it makes no sense; said before anything is replayed.
    """
    for policy, capacity_tokens in itertools.product(policies, capacities_tokens):
        check_simulation(policy=policy, capacity_tokens=capacity_tokens, block_size=block_size)
    if plot is not None:
        _require_plottable(Path(plot))
    requests = load_trace(trace, limit=limit)
    simulations = _simulate_all(requests, policies, capacities_tokens, block_size)
    if plot is not None:
        from radixkv.service.commands.hit_rate_plot import draw_hit_rates

        unasked = [] if OPTIMAL in policies else [OPTIMAL]
        bound = _simulate_all(requests, unasked, capacities_tokens, block_size)
        draw_hit_rates(Path(plot), [*simulations, *bound], Path(trace).name)
    if as_json:
        return json.dumps([dataclasses.asdict(simulation) for simulation in simulations], indent=2)
    return simulation_table(simulations)


def simulation_table(simulations: Sequence[Simulation]) -> str:
    """One line for each policy and capacity; the first line names the columns."""
    rows = [("policy", "capacity", "hit rate", "cached", "evicted", "time")]
    for each in simulations:
        rows.append(
            (
                each.policy,
                f"{each.capacity_tokens:,}",
                f"{each.token_hit_rate:.4f}",
                f"{each.cached_tokens:,}",
                f"{each.evicted_tokens:,}",
                f"{each.seconds:.1f} s",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    first = simulations[0]
    about = f"{first.requests:,} requests, {first.prompt_tokens:,} prompt tokens, blocks of {first.block_size}"
    return "\n".join([about, "", *lines])


def _simulate_all(
    requests: Sequence[TraceRequest], policies: Sequence[str], capacities_tokens: Sequence[int], block_size: int
) -> list[Simulation]:
    simulations = []
    for policy, capacity_tokens in itertools.product(policies, capacities_tokens):
        advance, finish = _progress(f"{policy} at {capacity_tokens:,}", len(requests))
        simulations.append(
            simulate(
                requests,
                policy=policy,
                capacity_tokens=capacity_tokens,
                block_size=block_size,
                on_request=advance,
            )
        )
        finish()
    return simulations


def _progress(what: str, total: int) -> tuple[Callable[[], object] | None, Callable[[], object]]:
    """A bar on a terminal's stderr; nothing elsewhere, or where there is no tqdm."""
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        return None, lambda: None
    from tqdm import tqdm

    bar = tqdm(total=total, desc=what, unit=" requests", leave=False, file=sys.stderr)
    return bar.update, bar.close


def _require_plottable(plot: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot: the package matplotlib is missing; install radixkv[dev]")
    if plot.suffix.lower() != ".png":
        raise ConfigError(f"--plot: expected a file name ending in .png, got {plot}")
    if not plot.parent.is_dir():
        raise ConfigError(f"--plot: expected an existing directory, got {plot.parent}")
