"""Fuzzes a server that it starts on loopback.

python -m bench.hostile.fuzz [--calls 100000] [--connections 10000] [--seed 1] [--json FILE]

The exit status is 1 if a call or a raw connection ended with an undocumented status, or if the server's memory grew by
more than 64 MB after the warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.hostile.fuzz.run import fuzz, make_server
from bench.parts.result_file import write_result

MAX_GROWTH_MB = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a server, fuzz it, print the statuses that it returned, and write JSON."""
    parser = argparse.ArgumentParser(description="Start a server, and fuzz it.")
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    process = make_server()
    with process as address:
        assert process.pid is not None, "a server that listens has a process"
        result = asyncio.run(fuzz(address, process.pid, options.calls, options.connections, options.seed))
    print(f"mutated messages: {result.statuses}\nraw connections: {result.raw}")
    print(f"valid calls in between, all answered: {result.served}")
    print(f"undocumented statuses: {result.undocumented or 'none'}")
    print(f"memory: {result.warm_mb:.0f} MB after the warm-up, {result.end_mb:.0f} MB at the end")
    write_result(options.json, "bench.hostile.fuzz", arguments, dataclasses.asdict(result))
    return int(bool(result.undocumented) or result.end_mb > result.warm_mb + MAX_GROWTH_MB)


if __name__ == "__main__":
    sys.exit(main())
