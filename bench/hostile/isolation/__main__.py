"""Searches for cross-tenant hits in the cache, then times prompts over gRPC, on a server that it starts.

python -m bench.hostile.isolation [--trials 1000000] [--samples 250] [--seed 1] [--json FILE]

The exit status is 1 if the server revealed something about another tenant, or if the benchmark would not have detected
it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.hostile.isolation.cache_trials import search
from bench.hostile.isolation.timing import audit
from bench.parts.result_file import write_result
from bench.parts.server_process import ServerProcess, serve_command

_MIN_P = 0.01


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both searches, print what they found, and write JSON."""
    parser = argparse.ArgumentParser(description="Search for what one namespace can learn of another.")
    parser.add_argument("--trials", type=int, default=1_000_000)
    parser.add_argument("--samples", type=int, default=250)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    cache_result = search(options.trials, options.seed)
    print(cache_result, flush=True)
    with ServerProcess(serve_command("tiny", "cpu", [])) as address:
        timing_result = asyncio.run(audit(address, options.samples, options.seed))
    print(timing_result)
    outcome = {"cache": dataclasses.asdict(cache_result), "timing": dataclasses.asdict(timing_result)}
    write_result(options.json, "bench.hostile.isolation", arguments, outcome)
    leaks_nothing = not cache_result.cross_hits and not timing_result.cross_hits and timing_result.p_other > _MIN_P
    detects_hits = cache_result.control_hits == cache_result.controls and timing_result.p_own < _MIN_P
    return 0 if leaks_nothing and detects_hits else 1


if __name__ == "__main__":
    sys.exit(main())
