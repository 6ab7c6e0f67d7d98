"""An hour of mixed calls: memory must not grow, no answer may be wrong, and no block, lease or request may remain.

    python -m tests.whole.soak --minutes 60 --warm-up-minutes 10

The callers of the campaign cancel, time out, hold leases, purge and are killed. Next to them, others use adapters,
tiers, n > 1, grammars, log probabilities, stop strings, the gateway's API, events, metrics, new tenants, and new
connections, while the Redis below the server is restarted. Tables with a limit are small here, so that they are full
when the measurement begins. Memory is the anonymous memory of the server process, sampled every ten seconds: after the
warm-up it may grow by at most 1 MB per 10,000 calls, by the median of the slopes between all samples (Theil and Sen).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from bench.parts.adapter_files import write_adapters
from radixkv.gateway.vllm_engine_pb2 import GenerateRequest, SamplingParams, TokenizedInput
from radixkv.gateway.vllm_engine_pb2_grpc import VllmEngineStub
from radixkv.service.client import AsyncClient
from radixkv.v1.prefill_pb2 import TokenLogprobs
from tests.offload.tiers.redis_server import SERVER, RedisServer
from tests.patience import PATIENCE_S
from tests.whole.campaign import (
    EXPECTED_STATUSES,
    SETTINGS,
    Known,
    Workers,
    ask_without_cache,
    checked_server,
    make_prompts,
    wait_until_idle,
)

# A subscriber to events may fall behind by more than `events.buffer_steps`.
_EXPECTED_STATUSES = {**EXPECTED_STATUSES, grpc.StatusCode.DATA_LOSS: "fell behind the events"}
MAX_GROWTH_BYTES = 1_000_000  # per 10,000 calls
_SAMPLE_S = 10.0
_REDIS_RESTART_S = 120.0
_KILL_S = 60.0
_CALLERS = 6
_NUM_ASKED = 4  # prompts with which questions are asked
_NEW_TOKENS = 4
_NUM_ADAPTERS = 2
_TENANT, _GATEWAY_TENANT = "soak", "gate"
_REGEX = "[a-z]{3,8}( [a-z]{1,9}){0,3}"
_SCHEMA = json.dumps({"type": "object", "properties": {"id": {"type": "integer", "maximum": 99}}, "required": ["id"]})
_TEXT = "And the Lord said unto Moses, speak"
# The answers of these are compared with those without the cache.
_QUESTIONS: dict[str, dict[str, Any]] = {
    "n": {"n": 3, "temperature": 0.8, "seed": 7},
    "regex": {"regex": _REGEX},
    "schema": {"json_schema": _SCHEMA},
    "log probabilities": {"logprobs": 3, "temperature": 0.5, "seed": 3},
    "prompt log probabilities": {"prompt_logprobs": 2},
    "penalties": {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {65: 2.0}},
    "adapter": {"adapter": "bench-0"},
    "other adapter": {"adapter": "bench-1"},
}


class Sample(NamedTuple):
    """Memory of the server at one time.

    Attributes:
        time_s: since the start.
        calls: made until then.
        anonymous, file_backed, resident: bytes.
        threads, descriptors: of the process.
    """

    time_s: float
    calls: int
    anonymous: int
    file_backed: int
    resident: int
    threads: int
    descriptors: int


def sample(pid: int, time_s: float, calls: int) -> Sample:
    """Read the memory, threads and descriptors of a process."""
    rollup = {
        words[0].rstrip(":"): int(words[1]) * 1024
        for words in map(str.split, Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    }
    status = Path(f"/proc/{pid}/status").read_text()
    threads = int(status.partition("Threads:")[2].split()[0])
    num_files = len(os.listdir(f"/proc/{pid}/fd"))
    anonymous, resident = rollup["Anonymous"], rollup["Rss"]
    return Sample(time_s, calls, anonymous, resident - anonymous, resident, threads, num_files)


def growth_per_10k_calls(samples: list[Sample]) -> float:
    """Return the bytes by which anonymous memory grows in 10,000 calls: the median slope over all pairs of samples."""
    slopes = [
        (later.anonymous - earlier.anonymous) / (later.calls - earlier.calls)
        for index, earlier in enumerate(samples)
        for later in samples[index + 1 :]
        if later.calls > earlier.calls
    ]
    return 10_000 * statistics.median(slopes) if slopes else 0.0


@dataclass
class Report:
    """The result of a soak."""

    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    num_redis_restarts: int = 0
    num_killed: int = 0
    samples: list[Sample] = field(default_factory=list)
    warm: list[Sample] = field(default_factory=list)
    left_behind: dict[str, int] = field(default_factory=dict)
    last_output: str = ""

    @property
    def growth_bytes(self) -> float:
        """Growth of anonymous memory per 10,000 calls after the warm-up."""
        return growth_per_10k_calls(self.warm)

    @property
    def mistakes(self) -> list[str]:
        """Everything that must not have happened; empty after a successful soak."""
        found = [f"{count} {each}" for each, count in self.outcomes.items() if each.startswith(("WRONG", "UNEXPECTED"))]
        found += [f"{count} {name} left" for name, count in self.left_behind.items() if count]
        if self.last_output != "check passed, 0 leased, 0 pinned":
            found.append(f"the server ended with {self.last_output!r}")
        if len(self.warm) < 10:
            found.append(f"expected at least 10 samples after the warm-up, got {len(self.warm)}")
        elif self.growth_bytes > MAX_GROWTH_BYTES:
            found.append(f"anonymous memory grew by {self.growth_bytes / 1e6:.2f} MB per 10,000 calls")
        if self.warm and self.warm[-1].threads > self.warm[0].threads + 4:
            found.append(f"{self.warm[-1].threads - self.warm[0].threads} threads left")
        if self.warm and self.warm[-1].descriptors > self.warm[0].descriptors + 64:
            found.append(f"{self.warm[-1].descriptors - self.warm[0].descriptors} descriptors left")
        return found


async def answer_of(client: AsyncClient, ids: list[int], **options: Any) -> list[Any]:
    """Return what a completion is compared by: of each choice its tokens, their log probabilities and the prompt's.

    Into how many responses they are divided is not compared: while a response waits, further tokens join it.
    """
    choices: dict[int, tuple[list[int], list[Any], list[Any]]] = {}
    async for part in client.generate(ids, max_new_tokens=_NEW_TOKENS, **options):
        token_ids, logprobs, prompt_logprobs = choices.setdefault(part.index, ([], [], []))
        token_ids += part.token_ids
        logprobs += map(_numbers_of, part.logprobs)
        prompt_logprobs += map(_numbers_of, part.prompt_logprobs)
    return sorted(choices.items())


def _numbers_of(row: TokenLogprobs) -> tuple[float, list[tuple[int, float]]]:
    return row.logprob, [(each.token_id, each.logprob) for each in row.top]


class Mix:
    """Callers in this process, whose calls are of the kinds that the campaign does not have."""

    def __init__(self, address: str, metrics_url: str, known: list[Known], adapter: str, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._address = address
        self._metrics_url = metrics_url
        self._known = known
        self._adapter = adapter
        self._random = random.Random(seed)
        self._expected: dict[tuple[str, int], list[Any]] = {}
        self._adapter_lock = asyncio.Lock()
        self._num_visitors = 0
        self._kinds: list[tuple[Callable[[AsyncClient], Awaitable[str]], int]] = [
            (self._question, 40),
            (self._fresh, 20),
            (self._visitor, 10),
            (self._gateway, 10),
            (self._text, 5),
            (self._cancelled, 10),
            (self._events, 2),
            (self._look_around, 2),
            (self._connect, 2),
            (self._change_adapter, 1),
            (self._purge, 1),
        ]

    async def ask_without_cache(self) -> None:
        """Collect the answers to all questions without the cache. Later answers must be equal to them."""
        async with AsyncClient(self._address, timeout_s=PATIENCE_S) as client:
            questions = [(kind, index) for kind in _QUESTIONS for index in range(_NUM_ASKED)]
            for start in range(0, len(questions), _CALLERS):
                part = questions[start : start + _CALLERS]
                answers = await asyncio.gather(*(self._answer_without_cache(client, *question) for question in part))
                self._expected |= dict(zip(part, answers, strict=True))

    async def run(self, is_over: threading.Event) -> None:
        """Make calls until the event is set."""
        async with AsyncClient(self._address, timeout_s=PATIENCE_S) as client:
            await asyncio.gather(*(self._call_until(client, is_over) for _ in range(_CALLERS)))

    async def _answer_without_cache(self, client: AsyncClient, kind: str, index: int) -> list[Any]:
        off = {"read_cache": False, "write_cache": False, "tenant": _TENANT}
        return await answer_of(client, self._known[index].ids, **_QUESTIONS[kind], **off)

    async def _call_until(self, client: AsyncClient, is_over: threading.Event) -> None:
        calls, weights = zip(*self._kinds, strict=True)
        while not is_over.is_set():
            call = self._random.choices(calls, weights)[0]
            try:
                outcome = await call(client)
            except grpc.aio.AioRpcError as error:
                outcome = _EXPECTED_STATUSES.get(error.code(), f"UNEXPECTED {error.code().name} {error.details()}")
                await asyncio.sleep(0.02)
            self.outcomes[outcome] += 1

    async def _question(self, client: AsyncClient) -> str:
        kind, index = self._random.choice(list(self._expected))
        answer = await answer_of(client, self._known[index].ids, tenant=_TENANT, **_QUESTIONS[kind])
        return kind if answer == self._expected[kind, index] else f"WRONG {kind} of prompt {index}"

    async def _fresh(self, client: AsyncClient) -> str:
        """Send a new prompt, so that blocks are evicted to the tiers."""
        ids = [*self._random.choice(self._known).ids[:32], *(self._random.randrange(256) for _ in range(100))]
        usage = (await client.prefill(ids, tenant=_TENANT)).usage
        return "fresh" if usage.cached_tokens + usage.computed_tokens == len(ids) else f"WRONG usage {usage}"

    async def _visitor(self, client: AsyncClient) -> str:
        """Send a request as a tenant, or with a salt, that no other request has."""
        self._num_visitors += 1
        known, name = self._random.choice(self._known), f"visitor-{self._num_visitors}"
        tenant, salt = (name, "") if self._random.random() < 0.5 else (_TENANT, name)
        answer = await client.prefill(known.ids, tenant=tenant, salt=salt)
        is_right = answer.next_token_id == known.next_token_id and not answer.usage.cached_tokens
        return "visitor" if is_right else f"WRONG answer to {name}"

    async def _gateway(self, _: AsyncClient) -> str:
        known = self._random.choice(self._known)
        async with grpc.aio.insecure_channel(self._address) as channel:
            request = GenerateRequest(
                request_id=f"soak-{self._random.random()}",
                tokenized=TokenizedInput(input_ids=known.ids),
                sampling_params=SamplingParams(max_tokens=_NEW_TOKENS, temperature=0.0),
                stream=False,
            )
            tokens = [
                token
                async for response in VllmEngineStub(channel).Generate(request, timeout=PATIENCE_S)
                for token in response.complete.output_ids
            ]
        return "gateway" if tokens == known.generated[: len(tokens)] else f"WRONG tokens of the gateway {tokens}"

    async def _text(self, client: AsyncClient) -> str:
        text = await client.generate(_TEXT, max_new_tokens=_NEW_TOKENS, tenant=_TENANT, stop=["the", "and"]).read()
        return "text" if isinstance(text, str) else f"WRONG text {text!r}"

    async def _cancelled(self, client: AsyncClient) -> str:
        kind, index = self._random.choice(list(self._expected))
        ask = asyncio.ensure_future(answer_of(client, self._known[index].ids, tenant=_TENANT, **_QUESTIONS[kind]))
        await asyncio.sleep(self._random.random() * 0.05)
        ask.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await ask
        return "cancelled"

    async def _events(self, client: AsyncClient) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                async for _ in client.subscribe(stores=self._random.random() < 0.5):
                    pass
        return "events"

    async def _look_around(self, client: AsyncClient) -> str:
        await client.stats(max_tenants=10)
        await client.segments(tenant=_TENANT, page_size=20)
        with await asyncio.to_thread(urllib.request.urlopen, self._metrics_url, timeout=PATIENCE_S) as response:
            return "looked around" if b"radixkv_" in response.read() else "WRONG metrics"

    async def _connect(self, _: AsyncClient) -> str:
        async with AsyncClient(self._address, timeout_s=PATIENCE_S) as client:
            known = self._random.choice(self._known)
            answer = await client.prefill(known.ids, tenant=_TENANT)
        return "connected" if answer.next_token_id == known.next_token_id else "WRONG answer on a new connection"

    async def _change_adapter(self, client: AsyncClient) -> str:
        async with self._adapter_lock:
            await client.load_adapter("changing", self._adapter)
            try:
                await client.prefill(self._random.choice(self._known).ids, tenant=_TENANT, adapter="changing")
            finally:
                await client.unload_adapter("changing")
        return "changed an adapter"

    async def _purge(self, client: AsyncClient) -> str:
        if self._random.random() < 0.1:
            await client.purge(everything=True)
        else:
            await client.purge(tenant=_TENANT)
        return "purged"


@contextlib.contextmanager
def _redis(folder: Path) -> Iterator[RedisServer | None]:
    if SERVER is None:
        yield None
        return
    server = RedisServer(folder, "--maxmemory", "32mb", "--maxmemory-policy", "allkeys-lru")
    try:
        yield server
    finally:
        server.stop()


def _settings(folder: Path, adapters: list[str], redis: RedisServer | None) -> list[str]:
    secret = folder / "secret"
    secret.write_bytes(bytes(range(64)))
    secret.chmod(0o600)
    settings = [
        *SETTINGS,
        "cache.evicted_prefixes=2048",
        "events.buffer_steps=1000",
        "engine.max_waiting_requests=64",
        "model.max_adapters=4",
        f"model.adapter_directory={folder}",
        *adapters,
        "tiers.host_bytes=8000000",
        f"tiers.disk_path={folder / 'disk'}",
        "tiers.disk_bytes=32000000",
        "gateway.enabled=true",
        f"gateway.tenant={_GATEWAY_TENANT}",
        "server.metrics_port=0",
    ]
    if redis is not None:
        settings += [f"tiers.redis_url={redis.url}", f"tiers.secret_file={secret}", "tiers.known_blocks=1024"]
    return settings


def run_soak(
    minutes: float, warm_up_minutes: float, seed: int = 0, on_sample: Callable[[Sample], None] = lambda _: None
) -> Report:
    """Make mixed calls for some minutes, and call `on_sample` with each sample of the server's memory."""
    report = Report()
    with tempfile.TemporaryDirectory() as name, _redis(Path(name)) as redis:
        folder = Path(name)
        adapters = write_adapters("tiny", folder, _NUM_ADAPTERS)
        with checked_server(_settings(folder, adapters, redis), folder / "log") as (server, address):
            metrics_url = _metrics_url(folder / "log")
            known = ask_without_cache(address, make_prompts(seed))
            mix, is_over = Mix(address, metrics_url, known, str(folder / "adapter-0"), seed), threading.Event()
            asyncio.run(mix.ask_without_cache())
            thread = threading.Thread(target=lambda: asyncio.run(mix.run(is_over)), daemon=True)
            start_s = time.monotonic()
            workers = Workers(address, known, seed)
            try:
                thread.start()
                next_restart_s, next_kill_s = _REDIS_RESTART_S, _KILL_S
                while (elapsed_s := time.monotonic() - start_s) < 60 * minutes and server.poll() is None:
                    time.sleep(_SAMPLE_S)
                    calls = workers.outcomes.total() + mix.outcomes.total()
                    report.samples.append(sample(server.pid, time.monotonic() - start_s, calls))
                    on_sample(report.samples[-1])
                    if redis is not None and elapsed_s > next_restart_s:
                        redis.stop()
                        redis.start()
                        report.num_redis_restarts += 1
                        next_restart_s += _REDIS_RESTART_S
                    if elapsed_s > next_kill_s:
                        workers.kill_one()
                        next_kill_s += _KILL_S
            finally:
                is_over.set()
                workers.stop()
                thread.join(PATIENCE_S)
            report.seconds = time.monotonic() - start_s
            report.outcomes = workers.outcomes + mix.outcomes
            report.num_killed = workers.num_killed
            report.warm = [each for each in report.samples if each.time_s >= 60 * warm_up_minutes]
            report.left_behind = wait_until_idle(address)
            server.terminate()
            assert server.stdout is not None
            report.last_output = server.stdout.read().strip()
            server.wait(PATIENCE_S)
    return report


def _metrics_url(log: Path) -> str:
    return f"http://{log.read_text(encoding='utf-8').partition('metrics on ')[2].split()[0]}/metrics"


def _show(each: Sample) -> None:
    print(
        f"{each.time_s:6.0f} s {each.calls:8,} calls  anonymous {each.anonymous / 1e6:7.1f} MB, files "
        f"{each.file_backed / 1e6:6.1f} MB, {each.threads} threads, {each.descriptors} descriptors",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Make mixed calls for an hour; fail if the server's memory grows.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm-up-minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report = run_soak(options.minutes, options.warm_up_minutes, options.seed, _show)
    print(f"{report.outcomes.total():,} calls in {report.seconds:.0f} s, {report.num_killed} callers killed")
    print(json.dumps(dict(report.outcomes.most_common()), indent=2))
    print(f"Redis was restarted {report.num_redis_restarts} times; {report.last_output}")
    print(f"anonymous memory after the warm-up: {report.growth_bytes / 1e6:+.3f} MB per 10,000 calls")
    for mistake in report.mistakes:
        print(f"MISTAKE: {mistake}")
    return 1 if report.mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
