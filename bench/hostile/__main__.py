"""Starts a server on loopback, and measures a well-behaved client before and during each of several attacks on it.

python -m bench.hostile [--attacks stalled unread] [--seconds 8] [--set server.max_calls=100] [--apart]
    [--equal-priority] [--step-ms 20] [--json FILE]

Server, attacker and well-behaved client are three processes. Real attackers have their own machines, so here the
attacker gets only the CPU time that the others leave; with `--equal-priority` it competes with them. With `--apart` the
attacker attacks a second server instead, so any slowdown of the well-behaved client is due to the shared machine, not
to its own server. `bench/hostile/verdict.py` has the bounds; that of the latency is a multiple of the latency without
an attack. By default the model takes no time, which makes this bound as strict as possible; with `--step-ms` each step
takes this long, as on a GPU. The exit status is 1 if an attack broke a bound.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.hostile.attacks.attack import Target
from bench.hostile.attacks.by_name import ATTACKS
from bench.hostile.trial import Trial, measure
from bench.hostile.verdict import broken_bounds, format_number, memory_budget_mb
from bench.parts.peers.workers.http_engine import free_port
from bench.parts.result_file import write_result
from bench.parts.server_process import ServerProcess, null_service_command
from radixkv.config import Config

_HEADING = (
    f"{'attack':<15} {'alone p50':>9} {'p99 ms':>7} {'attack p50':>10} {'p99 ms':>8} {'refused':>9} "
    f"{'idle MB':>8} {'peak':>6} {'after':>6} {'idle s':>6}  broken bounds; observed"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the attacks, each on a fresh server; print a table, and write JSON."""
    parser = argparse.ArgumentParser(description="Start a server, attack it, and measure a well-behaved client.")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each attack; default 8")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="A.B=V")
    parser.add_argument(
        "--apart", action="store_true", help="attack a second server, not that of the well-behaved client"
    )
    parser.add_argument(
        "--equal-priority", action="store_true", help="run attackers with the same priority as server and client"
    )
    parser.add_argument("--step-ms", type=float, default=0.0, help="time of each step of the model; default 0")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.apart and any(ATTACKS[name].is_http for name in options.attacks):
        parser.error("--apart: expected attacks on the gRPC port, since both servers would have the same HTTP port")
    parameters = {name: vars(options)[name] for name in ("seconds", "settings", "apart", "equal_priority", "step_ms")}
    print(_HEADING)
    rows: list[dict[str, Any]] = []
    for name in options.attacks:
        rows.append(_measure_attack(name, options))
        write_result(options.json, "bench.hostile", arguments, {"rows": rows, **parameters})
    return 1 if any(row["broken"] for row in rows) else 0


def _measure_attack(name: str, options: argparse.Namespace) -> dict[str, Any]:
    attack, seconds = ATTACKS[name], options.seconds
    http_port = free_port() if attack.is_http else None
    settings = [*attack.settings, *options.settings, *([f"server.http_port={http_port}"] if http_port else [])]
    model = ("--vocab-size", str(attack.vocab_size), "--step-ms", str(options.step_ms))
    command = null_service_command(settings, *model)
    process = ServerProcess(command)
    load_before = os.getloadavg()[0]
    with process as address, ServerProcess(command) if options.apart else contextlib.nullcontext() as second_address:
        http_address = f"127.0.0.1:{http_port}" if http_port else ""
        second_target = None if second_address is None else Target(second_address, seconds)
        has_low_priority = not options.equal_priority
        trial = asyncio.run(
            measure(
                name,
                Target(address, seconds, http_address=http_address),
                process.pid,
                second_target,
                has_low_priority=has_low_priority,
            )
        )
    budget_mb = memory_budget_mb(Config.load(None, settings).server, attack.num_connections)
    broken = broken_bounds(trial, budget_mb)
    _print_row(trial, broken)
    return {**dataclasses.asdict(trial), "budget_mb": budget_mb, "broken": broken, "load_before": load_before}


def _print_row(trial: Trial, broken: Sequence[str]) -> None:
    alone, attacked = trial.alone, trial.under_attack
    observed = {name: round(number, 1) for name, number in {**trial.prepared, **trial.observed}.items()}
    print(
        f"{trial.attack:<15} {format_number(alone.p50_ms):>9} {format_number(alone.p99_ms):>7} "
        f"{format_number(attacked.p50_ms):>10} {format_number(attacked.p99_ms):>8} "
        f"{attacked.refusals:>4}/{attacked.calls:<4} {trial.idle_mb:8.0f} {trial.peak_mb:6.0f} "
        f"{trial.after_mb:6.0f} {format_number(trial.idle_after_s):>6}  "
        f"{', '.join(broken) or 'none'}; {observed}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
