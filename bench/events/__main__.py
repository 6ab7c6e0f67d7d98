"""Measures prefills while other clients subscribe to cache events.

    python -m bench.events --json FILE

Sends prompts of which nothing is cached, one after another, in three passes: without subscribers; with as many
subscribers as the server accepts, half of them slow and half stalled; and with many more clients, most of which the
server refuses; the refused clients retry.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.parts.peers.process_tree import resident_bytes
from bench.parts.report import distribution
from bench.parts.result_file import write_result
from bench.parts.server_process import ServerProcess, serve_command
from radixkv.service.client import Client

VOCAB_SIZE = 256
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class EventMeasurement:
    """One pass.

    Attributes:
        callers: number of callers of Subscribe.
        accepted, refused: callers by the result of their first call.
        ttft_ms: time to first token, measured by the client.
        server_mib: memory of the server's process after the pass; None if the system does not report it.
    """

    callers: int
    accepted: int
    refused: int
    ttft_ms: dict[str, float | None]
    server_mib: float | None


@contextmanager
def run_callers(address: str, num_callers: int) -> Iterator[tuple[int, int]]:
    """Run callers in another process. Yields how many the server accepted, and how many it refused."""
    if num_callers == 0:
        yield 0, 0
        return
    command = [sys.executable, "-m", "bench.events.callers", address, str(num_callers)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            accepted, refused = map(int, process.stdout.readline().split())
            yield accepted, refused
            assert process.poll() is None, "the process of the callers runs until the pass is over"
        finally:
            process.kill()


def prefill_times_ms(client: Client, num_prompts: int, num_tokens: int, rng: random.Random) -> list[float]:
    """Prefill new prompts one after another. Returns the time of each."""
    times_ms = []
    for _ in range(num_prompts):
        prompt = rng.choices(range(VOCAB_SIZE), k=num_tokens)
        start_s = time.perf_counter()
        client.prefill(prompt)
        times_ms.append((time.perf_counter() - start_s) * 1000)
    return times_ms


def measure(options: argparse.Namespace) -> list[EventMeasurement]:
    """Measure all passes on one server."""
    rng = random.Random(options.seed)
    server = ServerProcess(serve_command(options.model, None, ()))
    passes = []
    with server as address, Client(address, timeout_s=_TIMEOUT_S) as client:
        prefill_times_ms(client, options.warm_up, options.tokens, rng)
        for num_callers in (0, options.readers, options.callers):
            with run_callers(address, num_callers) as (accepted, refused):
                times_ms = prefill_times_ms(client, options.requests, options.tokens, rng)
                server_mib = resident_bytes([server.pid]) / 2**20 or None
                passes.append(EventMeasurement(num_callers, accepted, refused, distribution(times_ms), server_mib))
    return passes


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.events",
        description="Measure prefills while clients subscribe to events.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=400, help="prefills per pass")
    parser.add_argument("--warm-up", type=int, default=50, help="prefills before the first pass")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per prompt")
    parser.add_argument("--readers", type=int, default=64, help="callers of the second pass")
    parser.add_argument("--callers", type=int, default=1000, help="callers of the third pass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", metavar="tiny|DIR")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    passes = measure(options)
    print("callers  accepted  refused  TTFT p50 ms  TTFT p99 ms  server MiB")
    for each in passes:
        p50, p99 = each.ttft_ms["p50"] or float("nan"), each.ttft_ms["p99"] or float("nan")
        server_mib = each.server_mib or float("nan")
        print(f"{each.callers:7} {each.accepted:9} {each.refused:8} {p50:12.1f} {p99:12.1f} {server_mib:11.0f}")
    result = {"requests": options.requests, "tokens": options.tokens, "passes": [asdict(each) for each in passes]}
    write_result(options.json, "bench.events", arguments, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
