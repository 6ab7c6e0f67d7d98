"""Measures an innocent client of an empty gRPC server during attacks: delays that no gRPC service can prevent.

python -m bench.hostile.control [--attacks stalled unread cancels] [--seconds 8] [--equal-priority] [--json FILE]

Attacker and innocent client are those of `bench.hostile`, but the server parses each message and answers at once: it
has no interceptor, no engine and no limit on a connection's calls. The bound is that of `bench.hostile`, three times
the innocent client's p99 alone; steps take no time.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.hostile.attacker import AttackerProcess
from bench.hostile.attacks.attack import Target
from bench.hostile.attacks.by_name import ATTACKS
from bench.hostile.trial import innocent, innocent_alone
from bench.hostile.verdict import TIMES_ALONE
from bench.parts.environment import describe_run
from bench.parts.result_file import write_json
from bench.parts.server_process import ServerProcess
from radixkv.v1 import prefill_pb2

_BURSTS = ("stalled", "unread", "cancels")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the bursts, each on a fresh server; print a line each, and write JSON."""
    parser = argparse.ArgumentParser(description="Attack a gRPC server that only answers.")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(_BURSTS))
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each attack; default 8")
    parser.add_argument("--equal-priority", action="store_true", help="attackers run at the priority of the others")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    command = shlex.join(["python", "-m", "bench.hostile.control", *(sys.argv[1:] if arguments is None else arguments)])
    rows = []
    for name in options.attacks:
        rows.append(_row(name, options.seconds, is_yielding=not options.equal_priority))
        if options.json:
            write_json(options.json, {"rows": rows, "seconds": options.seconds, "command": command, **describe_run()})


def _row(name: str, seconds: float, *, is_yielding: bool) -> dict[str, Any]:
    answer = prefill_pb2.PrefillResponse(next_token_id=1).SerializeToString().hex()
    process = ServerProcess([sys.executable, "-m", "bench.parts.null_service", "echo", answer])
    with process as address:
        row = asyncio.run(measure(name, Target(address, seconds), is_yielding=is_yielding))
    alone, beside = row["alone"], row["beside"]
    print(
        f"{name:<10} alone p50 {alone['p50_ms']:.1f} p99 {alone['p99_ms']:.1f} ms, beside {beside['p50_ms']:.1f} "
        f"{beside['p99_ms']:.1f}, allowed {TIMES_ALONE * alone['p99_ms']:.1f}, refused {beside['refusals']}; "
        f"{row['seen']}",
        flush=True,
    )
    return row


async def measure(name: str, target: Target, *, is_yielding: bool) -> dict[str, Any]:
    """Measure the innocent client alone, then during an attack that prepares nothing."""
    alone = await innocent_alone(target)
    async with AttackerProcess(name, target, is_yielding=is_yielding) as attacker:
        await attacker.prepared()
        beside, seen = await asyncio.gather(innocent(target.address, target.seconds, 2), attacker.attack())
    return {"attack": name, "alone": asdict(alone), "beside": asdict(beside), "seen": seen}


if __name__ == "__main__":
    main()
