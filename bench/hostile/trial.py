"""One attack beside an innocent caller: latencies, refusals, memory, and the way back to idle."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from bench.hostile.attacks import Attack
from radixkv.service.client import AsyncClient

_PERIOD_S = 0.05
_NUM_TOKENS = 120
_IDLE_TIMEOUT_S = 10.0


async def innocent(address: str, seconds: float, seed: int) -> dict[str, Any]:
    """Send a new prompt of another tenant every 50 ms, and say how long answers took.

    Returns:
        p50_ms, p99_ms, calls, and refusals.
    """
    loop, numbers = asyncio.get_running_loop(), np.random.default_rng(seed)
    took_ms: list[float] = []
    num_refused = 0

    async def call(client: AsyncClient) -> None:
        nonlocal num_refused
        start_s = loop.time()
        try:
            await client.prefill(numbers.integers(1, 200, _NUM_TOKENS), tenant="innocent", timeout_s=60)
        except grpc.aio.AioRpcError:
            num_refused += 1
        else:
            took_ms.append((loop.time() - start_s) * 1000)

    async with AsyncClient(address) as client:
        calls = []
        for _ in range(max(1, round(seconds / _PERIOD_S))):
            calls.append(asyncio.create_task(call(client)))
            await asyncio.sleep(_PERIOD_S)
        await asyncio.gather(*calls)
    p50, p99 = np.percentile(took_ms, [50, 99]) if took_ms else (float("inf"), float("inf"))
    return {"p50_ms": float(p50), "p99_ms": float(p99), "calls": len(calls), "refusals": num_refused}


async def measure(address: str, pid: int, name: str, attack: Attack, seconds: float) -> dict[str, Any]:
    """Measure the innocent alone, then beside an attack; then wait until the engine is idle, 10 s at most."""
    alone = await innocent(address, seconds, 0)
    idle_mb = peak_mb = resident_mb(pid)
    attacking = asyncio.ensure_future(attack(address, seconds))
    beside = asyncio.ensure_future(innocent(address, seconds, 1))
    while not (attacking.done() and beside.done()):
        peak_mb = max(peak_mb, resident_mb(pid))
        await asyncio.sleep(_PERIOD_S)
    idle_after_s = await _seconds_to_idle(address)
    return {
        "attack": name,
        "seen": await attacking,
        "alone": alone,
        "beside": await beside,
        "idle_mb": idle_mb,
        "peak_mb": peak_mb,
        "after_mb": resident_mb(pid),
        "idle_after_s": idle_after_s,
    }


def resident_mb(pid: int) -> float:
    """Return the memory of a process in RAM, by Linux's count."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def _seconds_to_idle(address: str) -> float | None:
    """Return the seconds until no request is unfinished; None if some are after 10 s."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    async with AsyncClient(address) as client:
        while loop.time() - start_s < _IDLE_TIMEOUT_S:
            requests = (await client.stats()).requests
            if not requests.running + requests.waiting + requests.following:
                return loop.time() - start_s
            await asyncio.sleep(_PERIOD_S)
    return None
