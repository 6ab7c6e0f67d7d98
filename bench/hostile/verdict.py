"""The bounds that a server and a well-behaved client must stay within during an attack."""

from __future__ import annotations

from bench.hostile.trial import Trial
from radixkv.config import ServerConfig
from radixkv.service.server.receive.grpc_options import WINDOW_BYTES

MAX_P99_RATIO = 3.0  # of the well-behaved client's p99 during an attack to its p99 alone
_NUM_STEPS = 2  # steps that a call may take longer during an attack
_MAX_MEMORY_RATIO = 1.3
_MAX_TIME_TO_IDLE_S = 10.0


def memory_budget_mb(config: ServerConfig, num_connections: int) -> float:
    """Return how much more memory than when idle a server may take according to its limits.

    The README of service.server.receive explains the sum. Its case of four messages of the maximum size is left out.
    """
    num_waiting = min(2 * config.max_calls, num_connections * config.max_connection_calls)
    windows = (num_waiting + num_connections) * WINDOW_BYTES
    return (config.max_receiving_bytes + 2 * config.max_held_bytes + windows) / 1e6


def broken_bounds(trial: Trial, budget_mb: float) -> list[str]:
    """Return the bounds that an attack broke, in words; empty if it broke none.

    The well-behaved client's p99 is at most three times its p99 alone, plus two steps; all of its calls are answered;
    memory is at most 1.3 times that of the idle server, plus a budget; the server is idle again 10 s after the attack.

    Args:
        trial: what was measured.
        budget_mb: the budget; see `memory_budget_mb`.
    """
    broken = []
    alone, under_attack = trial.alone, trial.under_attack
    max_mb = _MAX_MEMORY_RATIO * trial.idle_mb + budget_mb
    if alone.p99_ms is None or alone.step_ms is None or under_attack.p99_ms is None:
        broken.append("no answers")
    else:
        max_p99_ms = MAX_P99_RATIO * alone.p99_ms + _NUM_STEPS * alone.step_ms
        if under_attack.p99_ms > max_p99_ms:
            broken.append(f"p99 above {max_p99_ms:.1f} ms")
    if under_attack.refusals:
        broken.append("refusals")
    if trial.peak_mb > max_mb:
        broken.append(f"peak above {max_mb:.0f} MB")
    if trial.idle_after_s is None or trial.idle_after_s > _MAX_TIME_TO_IDLE_S:
        broken.append(f"busy after {_MAX_TIME_TO_IDLE_S:g} s")
    return broken


def format_number(value: float | None) -> str:
    """Return a number with one decimal place; "-" if nothing was measured."""
    return "-" if value is None else f"{value:.1f}"
