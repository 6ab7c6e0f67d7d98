"""vllm-router reads the events of two servers and chooses the one that has a prompt.

The router calls its workers with a protocol that radixkv does not implement. Its workers are therefore two fakes, which
only count requests, but the events that the router reads are those of two real servers.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from bench.parts.server_process import ServerProcess, serve_command
from radixkv.model.tiny_files import write_tiny_files
from radixkv.service.client import Client
from tests.patience import PATIENCE_S, wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("vllm_router") is None, reason="needs vllm-router"),
    pytest.mark.usefixtures("forked_servers"),
]

# A vllm.GenerateResponse: token 5, finished by length.
RESPONSE = bytes.fromhex("0a020801 120b 1801 220105 42040801 1001")
EARLY_PROMPTS = np.random.default_rng(5).integers(0, 256, (4, 320)).tolist()


class CountingWorker(grpc.GenericRpcHandler):
    """Imitates a vLLM server: it is healthy, and answers each request with one token.

    Attributes:
        num_requests: requests so far.
    """

    def __init__(self) -> None:
        self.num_requests = 0

    def service(self, call: Any) -> Any:
        if call.method == "/vllm.Inference/GenerateStream":
            return grpc.unary_stream_rpc_method_handler(self._generate)
        if call.method == "/grpc.health.v1.Health/Check":
            serving = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
            return grpc.unary_unary_rpc_method_handler(lambda request, context: serving.SerializeToString())
        return None

    def _generate(self, request: bytes, context: Any) -> Iterator[bytes]:
        self.num_requests += 1
        yield RESPONSE


@dataclass
class Routed:
    """Two servers, and a router that reads their events and sends requests to fake workers, one per server."""

    url: str
    metrics_url: str
    servers: list[Client]
    workers: list[CountingWorker]

    def num_hits(self) -> int:
        """Return for how many requests the router has found a worker that has the prompt."""
        with urllib.request.urlopen(self.metrics_url, timeout=PATIENCE_S) as page:
            match = re.search(
                r'^vllm_router_kv_placement_lookups_total\{result="hit"\} (\d+)$', page.read().decode(), re.M
            )
        return int(match[1]) if match else 0

    def send(self, prompt: list[int]) -> tuple[int, bool]:
        """Send a prompt through the router; return the chosen worker, and whether the router knew that it is cached."""
        num_requests_before = [worker.num_requests for worker in self.workers]
        num_hits_before = self.num_hits()
        body = {"model": "tiny", "prompt": [*prompt, 1], "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            assert len(json.load(response)["choices"]) == 1
        (chosen,) = (
            index for index, worker in enumerate(self.workers) if worker.num_requests > num_requests_before[index]
        )
        return chosen, self.num_hits() > num_hits_before

    def wait_for_all_events(self, prompts: Iterator[list[int]]) -> None:
        """Wait until the router has read all published events, by new prompts whose events come after these."""
        for index, server in enumerate(self.servers):
            for _ in range(20):  # events before the router has subscribed are lost
                prompt = next(prompts)
                server.prefill(prompt)
                if self._becomes_known(prompt, index):
                    break
            else:
                pytest.fail("expected the router to read events, got none")

    def _becomes_known(self, prompt: list[int], server: int) -> bool:
        """Return whether the router sends a prompt to the given server, as one that is cached, within 40 attempts."""
        for _ in range(40):
            if self.send(prompt) == (server, True):
                return True
            time.sleep(0.02)
        return False


def free_ports(count: int) -> list[int]:
    """Return ports outside the range that the system assigns to other sockets while the servers load."""
    ports: list[int] = []
    for port in random.sample(range(20_000, 32_000), 1000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise AssertionError(f"of 1,000 ports {len(ports)} are free")


@contextmanager
def run_worker() -> Iterator[tuple[CountingWorker, str]]:
    worker = CountingWorker()
    server = grpc.server(ThreadPoolExecutor(2), handlers=(worker,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield worker, f"grpc://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@contextmanager
def run_router(folder: Path, options: list[str]) -> Iterator[tuple[str, str]]:
    """Run the router with the embedded model's tokenizer; yield its URL and that of its metrics."""
    write_tiny_files(folder)
    port, metrics_port = free_ports(2)
    command = [
        *(sys.executable, "-m", "vllm_router.launch_router", "--policy", "kv_aware", "--kv-event-model", "tiny"),
        *("--host", "127.0.0.1", "--port", str(port), "--kv-event-block-size", "16"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), *options),
    ]
    env = {**os.environ, "VLLM_ROUTER_TOKENIZER": str(folder)}
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            return urllib.request.urlopen(f"{url}/health", timeout=PATIENCE_S).status == 200
        except OSError:
            return False

    with (folder / "log").open("w") as log, subprocess.Popen(command, env=env, stdout=log, stderr=log) as process:
        try:
            wait_until(is_ready)
            yield url, f"http://127.0.0.1:{metrics_port}/metrics"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def routed() -> Iterator[Routed]:
    ports = free_ports(4)
    with ExitStack() as stack:
        workers = [stack.enter_context(run_worker()) for _ in range(2)]
        servers, options = [], ["--worker-urls", *(url for _, url in workers)]
        for (_, worker_url), port, replay_port in zip(workers, ports[:2], ports[2:], strict=True):
            events, replays = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}"
            settings = (f"events.zmq_endpoint={events}", f"events.replay_endpoint={replays}", "events.form=plain_map")
            servers.append(ServerProcess(serve_command("tiny", "cpu", (*settings, "cache.capacity_tokens=65536"))))
            options += ["--kv-event-source", f"{worker_url}={events}"]
            options += ["--kv-event-replay-source", f"{worker_url}={replays}"]
        with ThreadPoolExecutor(2) as threads:  # the servers load their models at the same time
            addresses = list(threads.map(stack.enter_context, servers))
        clients = [stack.enter_context(Client(address, timeout_s=PATIENCE_S)) for address in addresses]
        for number, prompt in enumerate(EARLY_PROMPTS):  # before the router starts
            clients[number % 2].prefill(prompt)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="radixkv-router-")))
        url, metrics_url = stack.enter_context(run_router(folder, options))
        yield Routed(url, metrics_url, clients, [worker for worker, _ in workers])


@pytest.fixture(scope="module")
def prompts() -> Iterator[list[int]]:
    """New prompts of 320 tokens without end."""
    rng = np.random.default_rng(6)
    return (rng.integers(0, 256, 320).tolist() for _ in itertools.count())


def test_the_server_that_has_the_prompt_is_chosen(routed: Routed, prompts: Iterator[list[int]]) -> None:
    cached = list(itertools.islice(prompts, 12))
    routed.wait_for_all_events(prompts)
    for number, prompt in enumerate(cached):  # without the router
        routed.servers[number % 2].prefill(prompt)
    routed.wait_for_all_events(prompts)
    assert [routed.send(prompt) for prompt in cached] == [(0, True), (1, True)] * 6


def test_the_router_learns_what_was_cached_before_it_started(routed: Routed, prompts: Iterator[list[int]]) -> None:
    routed.wait_for_all_events(prompts)
    assert [routed.send(prompt) for prompt in EARLY_PROMPTS] == [(0, True), (1, True)] * 2


def test_prompts_with_a_salt_or_a_tenant_are_unknown_to_the_router(
    routed: Routed, prompts: Iterator[list[int]]
) -> None:
    hidden, public = list(itertools.islice(prompts, 8)), next(prompts)
    for number, prompt in enumerate(hidden):
        namespace = {"salt": "secret"} if number < 4 else {"tenant": "other"}
        routed.servers[number % 2].prefill(prompt, **namespace)
    routed.servers[0].prefill(public)
    routed.wait_for_all_events(prompts)
    assert [routed.send(prompt)[1] for prompt in hidden] == [False] * 8
    assert routed.send(public) == (0, True)
