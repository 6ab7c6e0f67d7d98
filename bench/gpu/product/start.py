"""Starts the two servers that the next stages share, E in exact mode and F in fast mode, and reads their logs.

python -m bench.gpu.product.start --json build/start.json
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence

from bench.gpu.product.product_server import ProductServer
from bench.gpu.product.run_state import (
    device_memory_mib,
    num_compiled_files,
    read_state,
    update_state,
    use_triton_cache,
)
from bench.gpu.product.stage_report import StageReport, open_report
from radixkv.model.attention.refused_attention import SPECIALIZED

# Both servers share one GPU, so their pools have fixed sizes. E also has both local tiers.
SERVERS = {
    "E": (
        "cache.capacity_tokens=65536",
        "tiers.host_bytes=8589934592",
        "tiers.disk_path=rkv",
        "tiers.disk_bytes=8000000000",
    ),
    "F": ("model.exactness=fast", "cache.capacity_tokens=131072"),
}
# The same servers with the embedded model, and with smaller pools and tiers, which a few short prompts fill.
DRY_SERVERS = {
    "E": (
        "cache.capacity_tokens=2048",
        "tiers.host_bytes=10000000",
        "tiers.disk_path=rkv",
        "tiers.disk_bytes=100000000",
    ),
    "F": ("model.exactness=fast", "cache.capacity_tokens=8192"),
}

# Messages about captured steps in the log of a start; `test_product.py` checks that they exist.
CAPTURED_STEPS = re.compile(r"captured and checked (\d+) steps")
DROPPED_STEP = re.compile(r"a captured step is not used")

_LISTEN_S, _DRY_LISTEN_S = 105.0, 1000.0


def main() -> int:
    """Start both servers, and leave them running. Returns 1 if one does not listen, or dropped a captured step."""
    report = open_report("Start the servers that the next stages share.")
    use_triton_cache()
    device = "cpu" if report.is_dry_run else "cuda"
    model = read_state().get("model", "tiny")
    end_s = time.monotonic() + (_DRY_LISTEN_S if report.is_dry_run else _LISTEN_S)
    servers = {
        name: ProductServer.launch(name, model, settings, device=device)
        for name, settings in (DRY_SERVERS if report.is_dry_run else SERVERS).items()
    }
    update_state(servers={name: server.facts() for name, server in servers.items()})
    summary: list[str] = []
    for server in servers.values():
        _report_start(report, server, end_s - time.monotonic(), summary)
    # The stage `quiet` checks later that no kernel was compiled, and that about as much memory is used.
    update_state(quiet_since={"compiled_files": num_compiled_files(), "device_mib": _used_device_mib()})
    return report.finish("; ".join(summary))


def _used_device_mib() -> float | None:
    memory = device_memory_mib()
    return None if memory is None else memory["used"]


def _report_start(report: StageReport, server: ProductServer, timeout_s: float, summary: list[str]) -> None:
    """Wait until a server listens, and add a row about its start. Adds the time of the start to the summary."""
    with report.row(f"server {server.name}") as row:
        try:
            listening = server.wait_until_listening(max(0.0, timeout_s))
        finally:
            row["log"] = server.log_lines()
        update_state(servers={**read_state()["servers"], server.name: listening.facts()})
        row |= read_start(row["log"])
        row["device_mib"] = _used_device_mib()
        row["is_right"] = row["dropped_steps"] == 0
        row["is_goal_met"] = report.goal(SPECIALIZED in row["ready"])
        row["text"] = f"listens after {row['listening_s']:.1f} s: {row['ready']}; dropped {row['dropped_steps']} steps"
        summary.append(f"{server.name} listens after {row['listening_s']:.0f} s")


def read_start(log: Sequence[tuple[float, str]]) -> dict[str, object]:
    """Summarize a start from the lines of its log, each with the seconds since the process was started."""
    messages = [message for _, message in log]
    captured_steps = [int(match[1]) for message in messages if (match := CAPTURED_STEPS.search(message))]
    listening_s, ready = next(((seconds, text) for seconds, text in log if text.startswith("ready after ")), (0.0, ""))
    return {
        "captured_steps": sum(captured_steps),
        "dropped_steps": sum(bool(DROPPED_STEP.search(message)) for message in messages),
        "listening_s": listening_s,
        "ready": ready.partition(": ")[2],  # model, attention kernels, pool
    }


if __name__ == "__main__":
    sys.exit(main())
