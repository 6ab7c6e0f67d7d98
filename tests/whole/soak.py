"""An hour of mixed calls: memory must not grow, no answer may be wrong, and no block, lease or request may remain.

    python -m tests.whole.soak --minutes 60 --warm-up-minutes 10

The clients of the campaign cancel, time out, hold leases, purge and are killed. At the same time, other clients use
adapters, tiers, n > 1, grammars, log probabilities, stop strings, the gateway's API, events, metrics, new tenants, and
new connections, while the Redis server in which blocks are stored is restarted. The tables of the server that have a
maximum size are configured to be small, so that they are full when the measurement begins. What is measured is the
anonymous memory of the server process, every ten seconds: after the warm-up it may grow by at most 1 MB per 10,000
calls. The growth is the median of the slopes between all pairs of samples (the estimator of Theil and Sen).
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
    ReferenceResult,
    Workers,
    checked_server,
    compute_without_cache,
    make_prompts,
    wait_until_idle,
)

# A subscriber to events may fall behind by more than `events.buffer_steps`.
_EXPECTED_STATUSES = {**EXPECTED_STATUSES, grpc.StatusCode.DATA_LOSS: "fell behind the events"}
MAX_GROWTH_BYTES = 1_000_000  # per 10,000 calls
_MAX_NEW_THREADS, _MAX_NEW_DESCRIPTORS = 4, 64  # from the end of the warm-up to the end of the soak
_MIN_SAMPLES = 10
_SAMPLE_PERIOD_S = 10.0
_REDIS_RESTART_PERIOD_S = 120.0
_KILL_PERIOD_S = 60.0
_NUM_CALLERS = 6
_NUM_QUESTION_PROMPTS = 4
_NEW_TOKENS = 4
_NUM_ADAPTERS = 2
_TENANT, _GATEWAY_TENANT = "soak", "gate"
_REGEX = "[a-z]{3,8}( [a-z]{1,9}){0,3}"
_SCHEMA = json.dumps({"type": "object", "properties": {"id": {"type": "integer", "maximum": 99}}, "required": ["id"]})
_TEXT = "And the Lord said unto Moses, speak"
# Options of the completions that are compared with their results without the cache.
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
        time_s: since the start of the soak.
        num_calls: made until then.
        anonymous_bytes, file_backed_bytes: the two parts of the resident memory.
        num_threads, num_descriptors: of the process.
    """

    time_s: float
    num_calls: int
    anonymous_bytes: int
    file_backed_bytes: int
    num_threads: int
    num_descriptors: int


def take_sample(pid: int, time_s: float, num_calls: int) -> Sample:
    """Read the memory, threads and descriptors of a process."""
    _, *lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    memory_bytes = {}
    for line in lines:
        name, kilobytes, *_ = line.split()
        memory_bytes[name.rstrip(":")] = 1024 * int(kilobytes)
    anonymous_bytes = memory_bytes["Anonymous"]
    file_backed_bytes = memory_bytes["Rss"] - anonymous_bytes

    status = Path(f"/proc/{pid}/status").read_text()
    num_threads = int(status.partition("Threads:")[2].split()[0])
    num_descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return Sample(time_s, num_calls, anonymous_bytes, file_backed_bytes, num_threads, num_descriptors)


def growth_bytes_per_10k_calls(samples: list[Sample]) -> float:
    """Return by how much anonymous memory grows in 10,000 calls: the median of the slopes of all pairs of samples."""
    slopes = [
        (later.anonymous_bytes - earlier.anonymous_bytes) / (later.num_calls - earlier.num_calls)
        for index, earlier in enumerate(samples)
        for later in samples[index + 1 :]
        if later.num_calls > earlier.num_calls
    ]
    return 10_000 * statistics.median(slopes) if slopes else 0.0


@dataclass
class Report:
    """The result of a soak.

    Attributes:
        seconds: the duration of the soak.
        outcomes: numbers of calls by outcome.
        num_redis_restarts: how often Redis was restarted.
        num_killed: client processes that were killed.
        samples: all samples of the server's memory.
        warm_samples: the samples after the warm-up.
        left_behind: numbers of requests, leases and blocks that the server still had after all calls.
        last_output: what the server printed when it ended.
    """

    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    num_redis_restarts: int = 0
    num_killed: int = 0
    samples: list[Sample] = field(default_factory=list)
    warm_samples: list[Sample] = field(default_factory=list)
    left_behind: dict[str, int] = field(default_factory=dict)
    last_output: str = ""

    @property
    def growth_bytes(self) -> float:
        """Growth of anonymous memory per 10,000 calls after the warm-up."""
        return growth_bytes_per_10k_calls(self.warm_samples)

    @property
    def mistakes(self) -> list[str]:
        """Everything that must not have happened; empty after a successful soak."""
        mistakes = [
            f"{count} {outcome}"
            for outcome, count in self.outcomes.items()
            if outcome.startswith(("WRONG", "UNEXPECTED"))
        ]
        mistakes += [f"{count} {name} left" for name, count in self.left_behind.items() if count]
        if self.last_output != "check passed, 0 leased, 0 pinned":
            mistakes.append(f"the server ended with {self.last_output!r}")

        if len(self.warm_samples) < _MIN_SAMPLES:
            mistakes.append(f"expected at least {_MIN_SAMPLES} samples after the warm-up, got {len(self.warm_samples)}")
        elif self.growth_bytes > MAX_GROWTH_BYTES:
            mistakes.append(f"anonymous memory grew by {self.growth_bytes / 1e6:.2f} MB per 10,000 calls")
        if self.warm_samples:
            first, last = self.warm_samples[0], self.warm_samples[-1]
            num_new_threads = last.num_threads - first.num_threads
            if num_new_threads > _MAX_NEW_THREADS:
                mistakes.append(f"{num_new_threads} threads left")
            num_new_descriptors = last.num_descriptors - first.num_descriptors
            if num_new_descriptors > _MAX_NEW_DESCRIPTORS:
                mistakes.append(f"{num_new_descriptors} descriptors left")
        return mistakes


async def complete(client: AsyncClient, prompt: list[int], **options: Any) -> list[Any]:
    """Generate a completion; return by choice its tokens, their log probabilities, and those of the prompt.

    Two completions are equal if these are. Their responses may divide the tokens differently, because tokens that are
    generated while a response waits to be sent are added to it.
    """
    choices: dict[int, tuple[list[int], list[Any], list[Any]]] = {}
    async for response in client.generate(prompt, max_new_tokens=_NEW_TOKENS, **options):
        token_ids, logprobs, prompt_logprobs = choices.setdefault(response.index, ([], [], []))
        token_ids += response.token_ids
        logprobs += map(_logprobs_of, response.logprobs)
        prompt_logprobs += map(_logprobs_of, response.prompt_logprobs)
    return sorted(choices.items())


def _logprobs_of(row: TokenLogprobs) -> tuple[float, list[tuple[int, float]]]:
    return row.logprob, [(each.token_id, each.logprob) for each in row.top]


class MixedCalls:
    """Clients in this process, which make the kinds of calls that the clients of the campaign do not make."""

    def __init__(
        self, address: str, metrics_url: str, references: list[ReferenceResult], adapter_path: str, seed: int
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self._address = address
        self._metrics_url = metrics_url
        self._references = references
        self._adapter_path = adapter_path
        self._random = random.Random(seed)
        self._expected_answers: dict[tuple[str, int], list[Any]] = {}  # by key of `_QUESTIONS` and index of the prompt
        self._adapter_lock = asyncio.Lock()
        self._num_new_names = 0
        self._weighted_calls: list[tuple[Callable[[AsyncClient], Awaitable[str]], int]] = [
            (self._ask_question, 40),
            (self._send_new_prompt, 20),
            (self._send_as_new_tenant, 10),
            (self._generate_through_gateway, 10),
            (self._generate_text, 5),
            (self._cancel, 10),
            (self._read_events, 2),
            (self._read_statistics, 2),
            (self._connect, 2),
            (self._change_adapter, 1),
            (self._purge, 1),
        ]

    async def ask_questions_without_cache(self) -> None:
        """Collect the answers to all questions without the cache. Later answers must be equal to these."""
        async with AsyncClient(self._address, timeout_s=PATIENCE_S) as client:
            questions = [(kind, index) for kind in _QUESTIONS for index in range(_NUM_QUESTION_PROMPTS)]
            for start in range(0, len(questions), _NUM_CALLERS):
                asked = questions[start : start + _NUM_CALLERS]
                answers = await asyncio.gather(*(self._answer_without_cache(client, *question) for question in asked))
                self._expected_answers |= dict(zip(asked, answers, strict=True))

    async def run(self, is_over: threading.Event) -> None:
        """Make calls until the event is set."""
        async with AsyncClient(self._address, timeout_s=PATIENCE_S) as client:
            await asyncio.gather(*(self._call_until(client, is_over) for _ in range(_NUM_CALLERS)))

    async def _answer_without_cache(self, client: AsyncClient, kind: str, index: int) -> list[Any]:
        cache_off = {"read_cache": False, "write_cache": False}
        prompt = self._references[index].prompt
        return await complete(client, prompt, tenant=_TENANT, **_QUESTIONS[kind], **cache_off)

    async def _call_until(self, client: AsyncClient, is_over: threading.Event) -> None:
        calls, weights = zip(*self._weighted_calls, strict=True)
        while not is_over.is_set():
            call = self._random.choices(calls, weights)[0]
            try:
                outcome = await call(client)
            except grpc.aio.AioRpcError as error:
                outcome = _EXPECTED_STATUSES.get(error.code(), f"UNEXPECTED {error.code().name} {error.details()}")
                await asyncio.sleep(0.02)
            self.outcomes[outcome] += 1

    async def _ask_question(self, client: AsyncClient) -> str:
        kind, index = self._random.choice(list(self._expected_answers))
        answer = await complete(client, self._references[index].prompt, tenant=_TENANT, **_QUESTIONS[kind])
        return kind if answer == self._expected_answers[kind, index] else f"WRONG {kind} of prompt {index}"

    async def _send_new_prompt(self, client: AsyncClient) -> str:
        """Send a new prompt, so that blocks are evicted to the tiers."""
        known_prefix = self._random.choice(self._references).prompt[:32]
        prompt = [*known_prefix, *(self._random.randrange(256) for _ in range(100))]
        usage = (await client.prefill(prompt, tenant=_TENANT)).usage
        return "fresh" if usage.cached_tokens + usage.computed_tokens == len(prompt) else f"WRONG usage {usage}"

    async def _send_as_new_tenant(self, client: AsyncClient) -> str:
        """Send a request as a tenant, or with a salt, that no other request has."""
        self._num_new_names += 1
        reference, name = self._random.choice(self._references), f"visitor-{self._num_new_names}"
        tenant, salt = (name, "") if self._random.random() < 0.5 else (_TENANT, name)
        answer = await client.prefill(reference.prompt, tenant=tenant, salt=salt)
        is_right = answer.next_token_id == reference.next_token_id and not answer.usage.cached_tokens
        return "visitor" if is_right else f"WRONG answer to {name}"

    async def _generate_through_gateway(self, _: AsyncClient) -> str:
        reference = self._random.choice(self._references)
        async with grpc.aio.insecure_channel(self._address) as channel:
            request = GenerateRequest(
                request_id=f"soak-{self._random.random()}",
                tokenized=TokenizedInput(input_ids=reference.prompt),
                sampling_params=SamplingParams(max_tokens=_NEW_TOKENS, temperature=0.0),
                stream=False,
            )
            tokens = [
                token
                async for response in VllmEngineStub(channel).Generate(request, timeout=PATIENCE_S)
                for token in response.complete.output_ids
            ]
        return "gateway" if tokens == reference.generated[: len(tokens)] else f"WRONG tokens of the gateway {tokens}"

    async def _generate_text(self, client: AsyncClient) -> str:
        stop_strings = ["the", "and"]
        text = await client.generate(_TEXT, max_new_tokens=_NEW_TOKENS, tenant=_TENANT, stop=stop_strings).read()
        return f"WRONG text {text!r}" if any(stop in text for stop in stop_strings) else "text"

    async def _cancel(self, client: AsyncClient) -> str:
        kind, index = self._random.choice(list(self._expected_answers))
        call = asyncio.ensure_future(
            complete(client, self._references[index].prompt, tenant=_TENANT, **_QUESTIONS[kind])
        )
        await asyncio.sleep(self._random.random() * 0.05)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await call
        return "cancelled"

    async def _read_events(self, client: AsyncClient) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                async for _ in client.subscribe(stores=self._random.random() < 0.5):
                    pass
        return "events"

    async def _read_statistics(self, client: AsyncClient) -> str:
        await client.stats(max_tenants=10)
        await client.segments(tenant=_TENANT, page_size=20)
        with await asyncio.to_thread(urllib.request.urlopen, self._metrics_url, timeout=PATIENCE_S) as response:
            return "looked around" if b"radixkv_" in response.read() else "WRONG metrics"

    async def _connect(self, _: AsyncClient) -> str:
        async with AsyncClient(self._address, timeout_s=PATIENCE_S) as client:
            reference = self._random.choice(self._references)
            answer = await client.prefill(reference.prompt, tenant=_TENANT)
        return "connected" if answer.next_token_id == reference.next_token_id else "WRONG answer on a new connection"

    async def _change_adapter(self, client: AsyncClient) -> str:
        async with self._adapter_lock:
            await client.load_adapter("changing", self._adapter_path)
            try:
                await client.prefill(self._random.choice(self._references).prompt, tenant=_TENANT, adapter="changing")
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
def _run_redis(folder: Path) -> Iterator[RedisServer | None]:
    """Run a Redis server; yield None if it is not installed."""
    if SERVER is None:
        yield None
        return
    server = RedisServer(folder, "--maxmemory", "32mb", "--maxmemory-policy", "allkeys-lru")
    try:
        yield server
    finally:
        server.stop()


def _settings(folder: Path, adapter_settings: list[str], redis: RedisServer | None) -> list[str]:
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
        *adapter_settings,
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
    with tempfile.TemporaryDirectory() as folder_name, _run_redis(Path(folder_name)) as redis:
        folder = Path(folder_name)
        adapter_settings = write_adapters("tiny", folder, _NUM_ADAPTERS)
        with checked_server(_settings(folder, adapter_settings, redis), folder / "log") as (server, address):
            metrics_url = _metrics_url(folder / "log")
            references = compute_without_cache(address, make_prompts(seed))
            mixed_calls = MixedCalls(address, metrics_url, references, str(folder / "adapter-0"), seed)
            asyncio.run(mixed_calls.ask_questions_without_cache())

            is_over = threading.Event()
            thread = threading.Thread(target=lambda: asyncio.run(mixed_calls.run(is_over)), daemon=True)
            start_s = time.monotonic()
            workers = Workers(address, references, seed)
            try:
                thread.start()
                next_restart_s, next_kill_s = _REDIS_RESTART_PERIOD_S, _KILL_PERIOD_S
                while (elapsed_s := time.monotonic() - start_s) < 60 * minutes and server.poll() is None:
                    time.sleep(_SAMPLE_PERIOD_S)
                    num_calls = workers.outcomes.total() + mixed_calls.outcomes.total()
                    report.samples.append(take_sample(server.pid, time.monotonic() - start_s, num_calls))
                    on_sample(report.samples[-1])
                    if redis is not None and elapsed_s > next_restart_s:
                        redis.stop()
                        redis.start()
                        report.num_redis_restarts += 1
                        next_restart_s += _REDIS_RESTART_PERIOD_S
                    if elapsed_s > next_kill_s:
                        workers.kill_random_worker()
                        next_kill_s += _KILL_PERIOD_S
            finally:
                is_over.set()
                workers.stop()
                thread.join(PATIENCE_S)

            report.seconds = time.monotonic() - start_s
            report.outcomes = workers.outcomes + mixed_calls.outcomes
            report.num_killed = workers.num_killed
            report.warm_samples = [each for each in report.samples if each.time_s >= 60 * warm_up_minutes]
            report.left_behind = wait_until_idle(address)
            server.terminate()
            assert server.stdout is not None
            report.last_output = server.stdout.read().strip()
            server.wait(PATIENCE_S)
    return report


def _metrics_url(log: Path) -> str:
    """Return the address that `checked_server` printed in its log."""
    return f"http://{log.read_text(encoding='utf-8').partition('metrics on ')[2].split()[0]}/metrics"


def _print_sample(sample: Sample) -> None:
    print(
        f"{sample.time_s:6.0f} s {sample.num_calls:8,} calls  anonymous {sample.anonymous_bytes / 1e6:7.1f} MB, files "
        f"{sample.file_backed_bytes / 1e6:6.1f} MB, {sample.num_threads} threads, {sample.num_descriptors} descriptors",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Make mixed calls for an hour; fail if the server's memory grows.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm-up-minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report = run_soak(options.minutes, options.warm_up_minutes, options.seed, _print_sample)
    print(f"{report.outcomes.total():,} calls in {report.seconds:.0f} s, {report.num_killed} client processes killed")
    print(json.dumps(dict(report.outcomes.most_common()), indent=2))
    print(f"Redis was restarted {report.num_redis_restarts} times; {report.last_output}")
    print(f"anonymous memory after the warm-up: {report.growth_bytes / 1e6:+.3f} MB per 10,000 calls")
    for mistake in report.mistakes:
        print(f"MISTAKE: {mistake}")
    return 1 if report.mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
