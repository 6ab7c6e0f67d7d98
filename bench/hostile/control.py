"""Measures a well-behaved client of an empty gRPC server during attacks: the delays that no gRPC service can prevent.

python -m bench.hostile.control [--attacks stalled unread cancels] [--seconds 8] [--equal-priority] [--json FILE]

The attackers and the well-behaved client are those of `bench.hostile`, but the server only parses each message and
responds immediately: it has no interceptor, no engine and no limit on the calls of a connection. The bound is that of
`bench.hostile`, three times the p99 that the client has without an attack, since steps take no time.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.hostile.attacker import AttackerProcess
from bench.hostile.attacks.attack import Target
from bench.hostile.attacks.by_name import ATTACKS
from bench.hostile.trial import calls_alone, well_behaved_calls
from bench.hostile.verdict import MAX_P99_RATIO, format_number
from bench.parts.result_file import write_result
from bench.parts.server_process import ServerProcess, echo_command
from radixkv.v1 import prefill_pb2

_DEFAULT_ATTACKS = ("stalled", "unread", "cancels")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the attacks, each on a new server; print a line for each, and write JSON."""
    parser = argparse.ArgumentParser(description="Attack a gRPC server that does nothing but respond.")
    grpc_attacks = [name for name, attack in ATTACKS.items() if not attack.is_http]
    parser.add_argument("--attacks", nargs="+", choices=grpc_attacks, default=list(_DEFAULT_ATTACKS))
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each attack; default 8")
    parser.add_argument(
        "--equal-priority", action="store_true", help="run attackers with the same priority as server and client"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    for name in options.attacks:
        rows.append(_measure_and_print(name, options.seconds, has_low_priority=not options.equal_priority))
        write_result(options.json, "bench.hostile.control", arguments, {"rows": rows, "seconds": options.seconds})


def _measure_and_print(name: str, seconds: float, *, has_low_priority: bool) -> dict[str, Any]:
    answer = prefill_pb2.PrefillResponse(next_token_id=1).SerializeToString()
    with ServerProcess(echo_command(answer)) as address:
        row = asyncio.run(measure(name, Target(address, seconds), has_low_priority=has_low_priority))
    alone, attacked = row["alone"], row["under_attack"]
    max_p99_ms = None if alone["p99_ms"] is None else MAX_P99_RATIO * alone["p99_ms"]
    print(
        f"{name:<10} alone p50 {format_number(alone['p50_ms'])} p99 {format_number(alone['p99_ms'])} ms, "
        f"attack p50 {format_number(attacked['p50_ms'])} p99 {format_number(attacked['p99_ms'])} ms, "
        f"bound {format_number(max_p99_ms)} ms, refused {attacked['refusals']}; {row['observed']}",
        flush=True,
    )
    return row


async def measure(name: str, target: Target, *, has_low_priority: bool) -> dict[str, Any]:
    """Measure the well-behaved client alone, then during an attack that needs no preparation."""
    alone = await calls_alone(target)
    async with AttackerProcess(name, target, has_low_priority=has_low_priority) as attacker:
        await attacker.wait_until_prepared()
        under_attack, observed = await asyncio.gather(well_behaved_calls(target, target.seconds, 2), attacker.attack())
    return {"attack": name, "alone": asdict(alone), "under_attack": asdict(under_attack), "observed": observed}


if __name__ == "__main__":
    main()
