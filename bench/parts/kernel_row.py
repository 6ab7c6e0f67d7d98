"""Measures one row of the kernel benchmark: error, time, and ratios to the peers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bench.parts.device_time import Call, DeviceRates, measure

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Contestant:
    """A kernel and its inputs.

    Attributes:
        calls: calls that do the same work on different inputs, together larger than the cache.
        error: returns the relative error of the first call's output; see `worst_error`.
    """

    calls: list[Call]
    error: Callable[[], float]


Prepare = Callable[[], Contestant]


@dataclass(frozen=True, slots=True)
class KernelWork:
    """The minimum work of one call, and how exact its output must be.

    Attributes:
        flops: FLOPs of its matmuls.
        num_bytes: bytes to read and write.
        tolerance: maximum relative error of a correct output.
    """

    flops: float
    num_bytes: int
    tolerance: float


def measure_row(
    work: KernelWork,
    ours: Prepare,
    peers: Mapping[str, Prepare],
    rates: DeviceRates,
    device: torch.device,
) -> Iterator[Row]:
    """Check and time a kernel, then its peers one by one. If one fails, the row has the reason.

    Yields:
        The same row several times: first with the result of our kernel, its rates, and its floor, which is the time of
        the minimum work at the peak rates of this run; then with one more peer each time, by name. The ratio of a peer
        is its time divided by ours.
    """
    row = _check_and_time(ours, work.tolerance, device)
    row["peers"] = {}
    if row["is_right"]:
        row |= _rates_and_shares(work, row["ms"] / 1e3, rates)
    yield row
    for name, prepare in peers.items():
        peer = row["peers"][name] = _check_and_time(prepare, work.tolerance, device)
        if row["is_right"] and peer["is_right"]:
            peer["ratio"] = peer["ms"] / row["ms"]
        yield row


def _rates_and_shares(work: KernelWork, seconds: float, rates: DeviceRates) -> Row:
    """Return the rates that a kernel with this time reaches, and their shares of the peak rates of the device."""
    matrix_s, copy_s = work.flops / rates.flops_per_s, work.num_bytes / rates.bytes_per_s
    return {
        "tflops": work.flops / seconds / 1e12,
        "gb_per_s": work.num_bytes / seconds / 1e9,
        "matrix_share": matrix_s / seconds,
        "copy_share": copy_s / seconds,
        "floor_ms": max(matrix_s, copy_s) * 1e3,
        "floor_share": max(matrix_s, copy_s) / seconds,
    }


def guarded_row(kernel: str, case: str, make: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """Measure a row; see `measure_row`. If inputs or reference cannot be computed, the row has the reason.

    Yields:
        The same row after each measurement, with the names of kernel and case.
    """
    row: Row = {"kernel": kernel, "case": case}
    try:
        for measured in make():
            row.update(measured)
            yield row
    except Exception as raised:  # noqa: BLE001 - out of memory, or a device that an earlier kernel broke
        row |= {"is_right": False, "error": None, "reason": describe_error(raised), "peers": {}}
        yield row


def _check_and_time(prepare: Prepare, tolerance: float, device: torch.device) -> Row:
    """Check and time one kernel. Returns its error and times, or the reason why it failed."""
    try:
        contestant = prepare()
        error = contestant.error()
        if not error <= tolerance:
            finite_error = error if math.isfinite(error) else None  # JSON has no infinity
            return {
                "is_right": False,
                "error": finite_error,
                "reason": f"wrong: off by {error:.3g}, at most {tolerance:g}",
            }
        timing = measure(contestant.calls, device)
    except Exception as raised:  # noqa: BLE001 - whatever one kernel raises, the others are measured
        return {"is_right": False, "error": None, "reason": describe_error(raised)}
    return {"is_right": True, "error": error, "ms": timing.device_ms, "host_ms": timing.host_ms}


def describe_error(error: Exception) -> str:
    """Return the exception's type and the first line of its message."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


HEADER = (
    f"{'kernel':<16} {'case':<44} {'ms':>9} {'host ms':>8} {'TFLOP/s':>8} {'GB/s':>7} {'matrix':>7} {'copy':>7} "
    f"{'floor':>7}"
)


def format_row(row: Row) -> str:
    """Format a row below `HEADER`, without its peers."""
    start = f"{row['kernel']:<16} {row['case']:<44} "
    if not row["is_right"]:
        return f"{start}FAILED  {row['reason']}"
    return (
        f"{start}{row['ms']:>9.4f} {row['host_ms']:>8.3f} {row['tflops']:>8.1f} {row['gb_per_s']:>7.0f} "
        f"{row['matrix_share']:>7.1%} {row['copy_share']:>7.1%} {row['floor_share']:>7.1%}"
    )


def format_peer(row: Row, name: str) -> str:
    """Format a peer of a row, below the row; empty if it was not measured."""
    peer = row["peers"][name]
    if not peer["is_right"]:
        return ""
    ratio = f"  {peer['ratio']:.2f} times as long" if "ratio" in peer else ""
    return f"{'':<16} {name:>44} {peer['ms']:>9.4f} {peer['host_ms']:>8.3f}{ratio}"


def format_failures(rows: list[Row]) -> list[str]:
    """Format the peers that were not measured, once for each reason."""
    num_rows: Counter[tuple[str, str]] = Counter()
    for row in rows:
        for name, peer in row["peers"].items():
            if not peer["is_right"]:
                num_rows[name, peer["reason"]] += 1
    return [f"{name}, not measured in {number} of the rows: {reason}" for (name, reason), number in num_rows.items()]
