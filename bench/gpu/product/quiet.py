"""Checks that servers E and F compiled no kernel while they served, and use about as much memory as at their start.

python -m bench.gpu.product.quiet --json build/quiet.json
"""

from __future__ import annotations

import sys

from bench.gpu.product.product_server import running_server
from bench.gpu.product.run_state import device_memory_mib, num_compiled_files, read_state
from bench.gpu.product.stage_report import open_report

_MAX_MEMORY_CHANGE = 0.01  # of the device's memory
_MIN_SERIES = 30  # fewer time series mean that metrics are missing
_STEP_FAILURES = "radixkv_step_failures_total"


def main() -> int:
    """Check compilations, memory and metrics. Returns 1 if a kernel was compiled, memory changed, or a step failed."""
    report = open_report("Check that the servers compiled nothing and did not grow.")
    at_start = read_state().get("quiet_since", {})
    with report.row("kernels compiled after the start") as row:
        row["compiled_files"] = num_compiled_files() - at_start["compiled_files"]
        row["is_right"] = row["compiled_files"] == 0
        row["text"] = f"{row['compiled_files']} new files in the Triton cache"
    with report.row("device memory") as row:
        memory = device_memory_mib()
        if memory is None or at_start["device_mib"] is None:
            row["text"] = "no GPU"
        else:
            row["growth_mib"] = memory["used"] - at_start["device_mib"]
            row["is_right"] = abs(row["growth_mib"]) <= _MAX_MEMORY_CHANGE * memory["total"]
            row["text"] = f"{row['growth_mib']:+.0f} MiB of {memory['total']:.0f}"
    for name in ("E", "F"):
        with report.row(f"metrics of {name}") as row:
            metrics = running_server(name).metrics()
            row |= {
                "series": len(metrics),
                "step_failures": metrics.get(_STEP_FAILURES),
                "up": metrics.get("radixkv_up"),
            }
            row["is_right"] = len(metrics) >= _MIN_SERIES and row["step_failures"] == 0 and row["up"] == 1
            row["text"] = f"{len(metrics)} series, {row['step_failures']} failed steps"
    return report.finish("no compilation, no growth" if report.is_right else "not quiet")


if __name__ == "__main__":
    sys.exit(main())
