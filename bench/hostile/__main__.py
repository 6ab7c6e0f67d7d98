"""Attacks a server of its own on loopback, with an innocent caller beside each attack.

python -m bench.hostile [--attacks stalled unread] [--seconds 10] [--set server.max_calls=100] [--json FILE]

Refusals of the innocent should be 0. All callers share one process, so its latency includes their own work.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.hostile.attacks import ATTACKS
from bench.hostile.trial import measure
from bench.parts.environment import describe_run
from bench.parts.result_file import write_json
from bench.parts.server_process import ServerProcess

_HEADING = (
    f"{'attack':<16} {'alone p50':>9} {'p99 ms':>8} {'beside p50':>10} {'p99 ms':>8} {'refused':>7} "
    f"{'idle MB':>8} {'peak':>7} {'after':>7} {'idle after s':>12}  seen"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the attacks, each on a fresh server; print a table, and write JSON."""
    parser = argparse.ArgumentParser(description="Attack a server of its own, with an innocent caller beside.")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each attack; default 10")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="A.B=V")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    command = shlex.join(["python", "-m", "bench.hostile", *(sys.argv[1:] if arguments is None else arguments)])
    settings = [argument for setting in options.settings for argument in ("--set", setting)]
    print(_HEADING)
    rows = []
    for name in options.attacks:
        process = ServerProcess([sys.executable, "-m", "bench.parts.null_service", "engine", *settings])
        with process as address:
            assert process.pid is not None, "a server that listens has a process"
            row = asyncio.run(measure(address, process.pid, name, ATTACKS[name], options.seconds))
        rows.append(row)
        alone, beside = row["alone"], row["beside"]
        idle_after = "-" if row["idle_after_s"] is None else f"{row['idle_after_s']:.1f}"
        print(
            f"{name:<16} {alone['p50_ms']:9.1f} {alone['p99_ms']:8.1f} {beside['p50_ms']:10.1f} "
            f"{beside['p99_ms']:8.1f} {beside['refusals']:7} {row['idle_mb']:8.0f} {row['peak_mb']:7.0f} "
            f"{row['after_mb']:7.0f} {idle_after:>12}  {row['seen']}",
            flush=True,
        )
    if options.json:
        asked = {"seconds": options.seconds, "settings": options.settings}
        write_json(options.json, {"rows": rows, **asked, "command": command, **describe_run()})


if __name__ == "__main__":
    main()
