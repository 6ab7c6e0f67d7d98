"""Measures one attack: latencies of a well-behaved client, memory of the server, and its return to idle."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import grpc.aio
import numpy as np
import numpy.typing as npt

from bench.hostile.attacker import AttackerProcess
from bench.hostile.attacks.attack import Figures, Target
from bench.parts.peers.process_tree import resident_bytes
from bench.parts.report import distribution
from radixkv.service.client import AsyncClient
from radixkv.v1.cache_pb2 import StatsResponse

_PERIOD_S = 0.05
_NUM_TOKENS = 120
_TENANT = "well-behaved"
_TIMEOUT_S = 60.0
_WARM_UP_S = 1.0
_IDLE_TIMEOUT_S = 30.0

SendPrompt = Callable[[npt.NDArray[np.int64]], Awaitable[float]]
"""Sends a prompt and waits for its answer. Returns the milliseconds of computation, 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies and statuses of a well-behaved client's calls.

    Attributes:
        p50_ms, p99_ms: latency of the answered calls; None if none was answered.
        step_ms: median time that the server computed for a call; 0 over HTTP, which does not report it, and None if no
            call was answered.
        calls: prompts sent.
        refusals: prompts that were not answered.
        statuses: number of calls by status and error message.
    """

    p50_ms: float | None
    p99_ms: float | None
    step_ms: float | None
    calls: int
    refusals: int
    statuses: dict[str, int]


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome of one attack.

    Attributes:
        prepared, observed: what the attacker reported of its preparation and of the attack: numbers of calls by
            status, and other numbers.
        alone, under_attack: calls of the well-behaved client before the attack, and during it.
        idle_mb, peak_mb, after_mb: resident memory of the server before, during and after the attack.
        idle_after_s: seconds from the end of the attack until no request was unfinished and no lease was held; None if
            that took more than 30 s.
    """

    attack: str
    prepared: Figures
    observed: Figures
    alone: Latencies
    under_attack: Latencies
    idle_mb: float
    peak_mb: float
    after_mb: float
    idle_after_s: float | None


async def well_behaved_calls(target: Target, seconds: float, seed: int) -> Latencies:
    """Send a new prompt every 50 ms, for a tenant that no attacker uses, and measure the answers."""
    loop, rng = asyncio.get_running_loop(), np.random.default_rng(seed)
    took_ms: list[float] = []
    steps_ms: list[float] = []
    statuses: Counter[str] = Counter()

    async def call(send: SendPrompt) -> None:
        start_s = loop.time()
        try:
            step_ms = await send(rng.integers(1, 200, _NUM_TOKENS))
        except grpc.aio.AioRpcError as error:
            statuses[f"{error.code().name}: {error.details()}"] += 1
            return
        except (aiohttp.ClientError, TimeoutError) as error:
            statuses[f"{type(error).__name__}: {error}"] += 1
            return
        statuses["OK"] += 1
        took_ms.append((loop.time() - start_s) * 1000)
        steps_ms.append(step_ms)

    async with _open_sender(target) as send:
        calls = []
        for _ in range(max(1, round(seconds / _PERIOD_S))):
            calls.append(asyncio.create_task(call(send)))
            await asyncio.sleep(_PERIOD_S)
        await asyncio.gather(*calls)
    latency_ms = distribution(took_ms)
    return Latencies(
        p50_ms=latency_ms["p50"],
        p99_ms=latency_ms["p99"],
        step_ms=distribution(steps_ms)["p50"],
        calls=len(calls),
        refusals=len(calls) - statuses["OK"],
        statuses=dict(statuses),
    )


@contextlib.asynccontextmanager
async def _open_sender(target: Target) -> AsyncIterator[SendPrompt]:
    if not target.http_address:
        async with AsyncClient(target.address) as client:

            async def send_grpc(token_ids: npt.NDArray[np.int64]) -> float:
                answer = await client.prefill(token_ids, tenant=_TENANT, timeout_s=_TIMEOUT_S)
                return float(answer.timing.prefill_us / 1000)

            yield send_grpc
        return

    # Each prompt has a new connection, so that it is delayed if other clients occupy the port.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_TIMEOUT_S), connector=connector) as session:

        async def send_http(token_ids: npt.NDArray[np.int64]) -> float:
            body = {"prompt": token_ids.tolist(), "max_tokens": 1}
            url, headers = f"http://{target.http_address}/v1/completions", {"radixkv-tenant": _TENANT}
            async with session.post(url, json=body, headers=headers, raise_for_status=True) as response:
                await response.read()
            return 0.0

        yield send_http


async def calls_alone(target: Target) -> Latencies:
    """Measure the well-behaved client without an attack, for the duration of one, after a warm-up of a second."""
    await well_behaved_calls(target, min(_WARM_UP_S, target.seconds), 0)
    return await well_behaved_calls(target, target.seconds, 1)


async def measure(
    name: str, target: Target, pid: int, attacked: Target | None = None, *, has_low_priority: bool = True
) -> Trial:
    """Measure the well-behaved client alone, then during an attack; then wait until the server is idle, 30 s at most.

    Args:
        name: name of the attack.
        target: the server of the well-behaved client.
        pid: id of its process.
        attacked: the server that is attacked; None for `target`.
        has_low_priority: whether the attacker uses only CPU time that other processes leave.
    """
    alone = await calls_alone(target)
    idle_mb = resident_mb(pid)
    async with (
        PeakMemory(pid) as peak,
        AttackerProcess(name, attacked or target, has_low_priority=has_low_priority) as attacker,
    ):
        prepared = await attacker.wait_until_prepared()
        under_attack, observed = await asyncio.gather(well_behaved_calls(target, target.seconds, 2), attacker.attack())
        idle_after_s = await _wait_until_idle(target.address)
    return Trial(name, prepared, observed, alone, under_attack, idle_mb, peak.max_mb, resident_mb(pid), idle_after_s)


class PeakMemory:
    """Samples the resident memory of a process every 50 ms while the context is open.

    Attributes:
        max_mb: the highest sample so far, in MB.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.max_mb = 0.0
        self._watch_task: asyncio.Task[None]

    async def __aenter__(self) -> PeakMemory:
        """Begin to sample."""
        self._watch_task = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watch_task.cancel()
        await asyncio.gather(self._watch_task, return_exceptions=True)

    async def _sample(self) -> None:
        while True:
            self.max_mb = max(self.max_mb, resident_mb(self._pid))
            await asyncio.sleep(_PERIOD_S)


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process; 0 if it has ended."""
    return resident_bytes([pid]) / 1e6


async def _wait_until_idle(address: str) -> float | None:
    """Wait until the server is idle. Returns the seconds that it took; None if it took longer than the time limit."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    async with AsyncClient(address) as client:
        while loop.time() - start_s < _IDLE_TIMEOUT_S:
            if _is_idle(await client.stats()):
                return loop.time() - start_s
            await asyncio.sleep(_PERIOD_S)
    return None


def _is_idle(stats: StatsResponse) -> bool:
    requests = stats.requests
    return not (requests.running + requests.waiting + requests.following + stats.held_leases)
