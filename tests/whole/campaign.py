"""Many real calls by clients that cancel, time out, stop reading and are killed.

    python -m tests.whole.campaign --calls 50000

Every result is compared with one computed without the cache: tokens, and logits bit by bit. At the end, nothing may be
leased, pinned, running or waiting, and the server's memory must not have grown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import xxhash

from bench.hostile.trial import resident_mb
from radixkv.api.retention import Retention
from radixkv.service.client import AsyncClient, Client
from tests.patience import PATIENCE_S

SETTINGS = (
    "cache.capacity_tokens=4096",  # less than all prompts need, so that blocks run out
    "cache.block_size=32",
    "engine.held_lease_ttl_s=1",
    "engine.max_running_requests=24",
    "engine.max_waiting_requests=8",  # fewer than there are clients, so that calls are rejected
    "engine.max_step_tokens=256",
)
NUM_PROMPTS, MAX_NEW_TOKENS, CONCURRENCY, NUM_WORKERS = 36, 12, 12, 3
TENANTS = ("acme", "globex", "")
EXPECTED_STATUSES = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: "rejected",
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline exceeded",
    grpc.StatusCode.CANCELLED: "cancelled",
}


@dataclass(frozen=True)
class ReferenceResult:
    """A prompt and its result without the cache."""

    prompt: list[int]
    next_token_id: int
    logits_digest: str
    generated: list[int]


def make_prompts(seed: int) -> list[list[int]]:
    """Make prompts with a few common prefixes, which also branch inside blocks."""
    rng = random.Random(seed)
    stems = [[rng.randrange(256) for _ in range(200)] for _ in range(4)]
    return [
        [*rng.choice(stems)[: rng.randint(10, 200)], *(rng.randrange(256) for _ in range(rng.randint(1, 60)))]
        for _ in range(NUM_PROMPTS)
    ]


def compute_without_cache(address: str, prompts: list[list[int]]) -> list[ReferenceResult]:
    """Send each prompt with the cache switched off; return the results, to which all later ones must be equal."""
    cache_off = {"read_cache": False, "write_cache": False}

    def compute(prompt: list[int]) -> ReferenceResult:
        prefilled = client.prefill(prompt, return_logits=True, **cache_off)
        chunks = client.generate(prompt, max_new_tokens=MAX_NEW_TOKENS, **cache_off)
        generated = [token_id for chunk in chunks for token_id in chunk.token_ids]
        digest = xxhash.xxh3_128_hexdigest(prefilled.logits)
        return ReferenceResult(prompt, prefilled.next_token_id, digest, generated)

    with Client(address, timeout_s=PATIENCE_S) as client, ThreadPoolExecutor(8) as threads:
        return list(threads.map(compute, prompts))


class Caller:
    """One of the clients of a worker process. Prints a line of JSON with the outcomes of every ten calls."""

    def __init__(self, client: AsyncClient, references: list[ReferenceResult], seed: int) -> None:
        self._client = client
        self._references = references
        self._random = random.Random(seed)
        self._outcomes: Counter[str] = Counter()
        self._weighted_calls: list[tuple[Callable[[], Awaitable[str]], int]] = [
            (self._prefill, 50),
            (self._generate, 30),
            (self._stop_reading, 5),
            (self._hold, 6),
            (self._probe, 5),
            (self._retain, 2),
            (self._purge, 1),
        ]

    async def call_until_killed(self) -> None:
        """Make calls until the process is killed."""
        while True:
            calls, weights = zip(*self._weighted_calls, strict=True)
            call = self._random.choices(calls, weights)[0]
            task = asyncio.ensure_future(self._make_call(call))
            if self._random.random() < 0.1:
                await asyncio.sleep(self._random.random() * 0.1)
                task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            self._outcomes["cancelled by us" if task.cancelled() else task.result()] += 1
            if self._outcomes.total() % 10 == 0:
                print(json.dumps(self._outcomes), flush=True)
                self._outcomes.clear()

    async def _make_call(self, call: Callable[[], Awaitable[str]]) -> str:
        """Make a call; return its outcome, which begins with `WRONG` or `UNEXPECTED` if the server made a mistake."""
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                retry_after_ms = int(dict(tuple(error.trailing_metadata()))["retry-after-ms"])
                await asyncio.sleep(0.2 * retry_after_ms / 1000)  # too early, so that calls are rejected repeatedly
            return EXPECTED_STATUSES.get(error.code(), f"UNEXPECTED {error.code().name} {error.details()}")

    def _random_timeout_s(self) -> float:
        return self._random.uniform(0.002, 0.1) if self._random.random() < 0.1 else PATIENCE_S

    async def _prefill(self) -> str:
        reference = self._random.choice(self._references)
        answer = await self._client.prefill(
            reference.prompt,
            tenant=self._random.choice(TENANTS),
            read_cache=self._random.random() < 0.95,
            write_cache=self._random.random() < 0.95,
            urgency=self._random.choice((None, 10, 90)),
            return_logits=True,
            timeout_s=self._random_timeout_s(),
        )
        usage = answer.usage
        if usage.cached_tokens + usage.computed_tokens != len(reference.prompt):
            return f"WRONG usage {usage}"
        digest = xxhash.xxh3_128_hexdigest(answer.logits)
        if (answer.next_token_id, digest) != (reference.next_token_id, reference.logits_digest):
            return f"WRONG logits of prompt {self._references.index(reference)}, {usage.cached_tokens} cached"
        return "prefilled"

    async def _generate(self) -> str:
        reference = self._random.choice(self._references)
        num_tokens, tokens = self._random.randint(1, MAX_NEW_TOKENS), []
        async for chunk in self._client.generate(
            reference.prompt,
            max_new_tokens=num_tokens,
            tenant=self._random.choice(TENANTS),
            timeout_s=self._random_timeout_s(),
        ):
            tokens += chunk.token_ids
        if tokens != reference.generated[:num_tokens]:
            return f"WRONG tokens of prompt {self._references.index(reference)}: {tokens}"
        return "generated"

    async def _stop_reading(self) -> str:
        reference = self._random.choice(self._references)
        stream = self._client.generate(reference.prompt, max_new_tokens=1000, tenant=self._random.choice(TENANTS))
        tokens = list((await anext(stream)).token_ids)[:MAX_NEW_TOKENS]
        await stream.aclose()
        return "stopped reading" if tokens == reference.generated[: len(tokens)] else f"WRONG first tokens {tokens}"

    async def _hold(self) -> str:
        tenant = self._random.choice(TENANTS)
        held = await self._client.prefill(self._random.choice(self._references).prompt, tenant=tenant, hold_lease=True)
        if not held.lease_id:
            return "purged before it was held"  # by another client of the tenant
        if self._random.random() < 0.7:
            try:
                await self._client.release(held.lease_id, tenant=tenant)
            except grpc.aio.AioRpcError as error:
                # A lease lives for one second, and on a busy machine the call that releases it may come later.
                is_expired = time.time() >= held.lease_expires_at.ToNanoseconds() / 1e9
                if error.code() is grpc.StatusCode.NOT_FOUND and is_expired:
                    return "held too long"
                raise
        return "held"

    async def _probe(self) -> str:
        prompt = self._random.choice(self._references).prompt
        probe = await self._client.probe(prompt, tenant=self._random.choice(TENANTS))
        return "probed" if probe.cached_tokens < len(prompt) else f"WRONG probe {probe}"

    async def _retain(self) -> str:
        retention = Retention(self._random.choice((20, 80)), ttl_s=self._random.choice((None, 0.5)))
        prompt = self._random.choice(self._references).prompt
        await self._client.retain(prompt, retention, tenant=self._random.choice(TENANTS))
        return "retained"

    async def _purge(self) -> str:
        await self._client.purge(tenant=self._random.choice(TENANTS))
        return "purged"


async def run_worker(address: str, seed: int) -> None:
    """Make calls to a server with several clients. The reference results are read from stdin, as a line of JSON."""
    references = [ReferenceResult(**fields) for fields in json.loads(sys.stdin.readline())]
    async with AsyncClient(address) as client:
        callers = [Caller(client, references, seed * 1000 + index) for index in range(CONCURRENCY)]
        await asyncio.gather(*(caller.call_until_killed() for caller in callers))


@contextmanager
def checked_server(
    settings: Sequence[str] = SETTINGS, log: Path = Path(os.devnull)
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a server that audits its cache, with its log in a file; yield the process and its address."""
    options = [argument for setting in settings for argument in ("--set", setting)]
    command = [sys.executable, "-m", "tests.whole.checked_server", *options]
    with (
        log.open("w", encoding="utf-8") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().removeprefix("listening on ").strip()
        finally:
            process.kill()


@dataclass
class Report:
    """The result of a campaign.

    Attributes:
        outcomes: numbers of calls by outcome.
        num_killed: worker processes that were killed.
        resident_mb: resident memory of the server, each time that another tenth of the calls had been made.
        last_output: what the server printed when it ended.
        left_behind: numbers of requests, leases and blocks that the server still had after all calls.
        pressure: counters which show that the pool was too small for all requests.
        seconds: the duration of the campaign.
    """

    outcomes: Counter[str]
    num_killed: int
    resident_mb: list[float]
    last_output: str
    left_behind: dict[str, int]
    pressure: dict[str, int]
    seconds: float

    @property
    def mistakes(self) -> list[str]:
        """Everything that must not have happened; empty after a successful campaign."""
        mistakes = [outcome for outcome in self.outcomes if outcome.startswith(("WRONG", "UNEXPECTED"))]
        mistakes += [f"{count} {name} left" for name, count in self.left_behind.items() if count]
        if self.last_output != "check passed, 0 leased, 0 pinned":
            mistakes.append(f"the server ended with {self.last_output!r}")
        return mistakes


class Workers:
    """Worker processes with clients. When one is killed during its calls, another replaces it."""

    def __init__(self, address: str, references: list[ReferenceResult], seed: int) -> None:
        self._address = address
        self._references_json = json.dumps([asdict(each) for each in references])
        self._random = random.Random(seed)
        self._num_started = 0
        self.num_killed = 0
        self.outcomes: Counter[str] = Counter()
        self._listeners: list[threading.Thread] = []
        self._running = [self._start() for _ in range(NUM_WORKERS)]

    def kill_random_worker(self, *, is_replaced: bool = True) -> None:
        """Kill a worker process during its calls, and start another one in its place if `is_replaced`."""
        worker = self._running.pop(self._random.randrange(len(self._running)))
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        assert worker.stdin is not None
        worker.stdin.close()
        self.num_killed += 1
        if is_replaced:
            self._running.append(self._start())

    def stop(self) -> None:
        """Kill all worker processes, and wait until their output is read."""
        while self._running:
            self.kill_random_worker(is_replaced=False)
        for listener in self._listeners:
            listener.join()

    def _start(self) -> subprocess.Popen[str]:
        self._num_started += 1
        command = [
            sys.executable,
            "-m",
            "tests.whole.campaign",
            "--worker",
            self._address,
            "--seed",
            str(self._num_started),
        ]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert worker.stdin is not None
        worker.stdin.write(self._references_json + "\n")
        worker.stdin.flush()
        self._listeners.append(threading.Thread(target=self._count_outcomes, args=(worker,)))
        self._listeners[-1].start()
        return worker

    def _count_outcomes(self, worker: subprocess.Popen[str]) -> None:
        assert worker.stdout is not None
        with worker.stdout:
            for line in worker.stdout:
                with suppress(json.JSONDecodeError):  # a killed worker may have written its last line in part
                    self.outcomes.update(json.loads(line))


def run_campaign(num_calls: int, seed: int = 0, calls_per_kill: int = 2500) -> Report:
    """Make at least `num_calls` calls, and kill a worker process after every `calls_per_kill`."""
    start_s = time.monotonic()
    with checked_server() as (server, address):
        workers = Workers(address, compute_without_cache(address, make_prompts(seed)), seed)
        resident_samples_mb: list[float] = []
        while workers.outcomes.total() < num_calls and server.poll() is None:
            time.sleep(0.05)
            if workers.outcomes.total() >= num_calls * (len(resident_samples_mb) + 1) / 10:
                resident_samples_mb.append(resident_mb(server.pid))
            if workers.outcomes.total() >= calls_per_kill * (workers.num_killed + 1):
                workers.kill_random_worker()
        workers.stop()
        left_behind = wait_until_idle(address)
        with Client(address, timeout_s=PATIENCE_S) as client:
            stats = client.stats()
        pressure = {
            "preemptions": stats.requests.pauses,
            "recomputed tokens": stats.tokens.recomputed,
            "evicted blocks": stats.evicted_blocks,
        }
        server.terminate()
        assert server.stdout is not None
        last_output = server.stdout.read().strip()
        server.wait(PATIENCE_S)
    return Report(
        workers.outcomes,
        workers.num_killed,
        resident_samples_mb,
        last_output,
        left_behind,
        pressure,
        time.monotonic() - start_s,
    )


def wait_until_idle(address: str) -> dict[str, int]:
    """Wait until all requests have ended and been cleaned up. Return how many requests, leases and blocks remain."""
    end_s = time.monotonic() + PATIENCE_S
    with Client(address, timeout_s=PATIENCE_S) as client:
        while True:
            stats = client.stats()
            requests, blocks = stats.requests, stats.blocks
            num_left = {
                "running requests": requests.running,
                "waiting requests": requests.waiting,
                "following requests": requests.following,
                "held leases": stats.held_leases,
                "leased blocks": blocks.leased,
                "pinned blocks": blocks.pinned,
                "lost blocks": blocks.total - blocks.free - blocks.leased - blocks.published,
            }
            if not any(num_left.values()) or time.monotonic() > end_s:
                return num_left
            time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make many calls, and kill client processes during their calls.")
    parser.add_argument("--calls", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        asyncio.run(run_worker(options.worker, options.seed))
    report = run_campaign(options.calls, options.seed)
    print(f"{report.outcomes.total()} calls in {report.seconds:.0f} s, {report.num_killed} client processes killed")
    print(json.dumps(dict(report.outcomes.most_common()), indent=2))
    print(f"server's resident memory in MB: {[round(each) for each in report.resident_mb]}; {report.last_output}")
    print(report.pressure)
    for mistake in report.mistakes:
        print(f"MISTAKE: {mistake}")
    return 1 if report.mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
