import asyncio
import gc
import socket
import threading

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import radixkv.service.server.server as server_module
from radixkv.config import ServerConfig
from radixkv.errors import ConfigError, InvariantViolation
from radixkv.service.client import AsyncClient
from radixkv.service.server.server import SERVICES, Server
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import becomes_true, refusal_of, serving, slow_line

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(address):
    """Return the statuses that the server and its two main services have."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        names = ("", "radixkv.v1.PrefillService", "radixkv.v1.CacheService")
        return {
            (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_S)).status for name in names
        }


def test_every_service_is_healthy_after_the_start():
    async def run():
        async with serving(FakeEngine()) as (_, address):
            return await health_of(address)

    assert asyncio.run(run()) == {SERVING}


def test_objects_from_before_serving_are_not_traversed_by_garbage_collection(monkeypatch):
    frozen = []

    async def serve(*_):
        frozen.append(gc.get_freeze_count())

    monkeypatch.setattr(server_module, "serve_until_signal", serve)
    try:
        server_module.run(FakeEngine(), ServerConfig())
    finally:
        gc.unfreeze()
    assert frozen[0] > 10_000


def test_an_unknown_service_has_no_health_and_a_check_of_it_logs_no_error(caplog):
    async def run():
        async with serving(FakeEngine()) as (_, address), grpc.aio.insecure_channel(address) as channel:
            request = health_pb2.HealthCheckRequest(service="nothing")
            return (await refusal_of(health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE_S))).code()

    assert asyncio.run(run()) is grpc.StatusCode.NOT_FOUND
    assert caplog.records == []


def test_health_follows_the_engine(monkeypatch):
    monkeypatch.setattr(server_module, "_HEALTH_PERIOD_S", 0.01)

    async def run():
        engine = FakeEngine()
        async with serving(engine) as (_, address):
            for is_healthy, status in ((False, NOT_SERVING), (True, SERVING)):
                engine.is_healthy = is_healthy
                while await health_of(address) != {status}:
                    await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))  # fails if the health does not change in time


def test_an_engine_whose_thread_ends_ends_the_process_after_its_last_answer(monkeypatch):
    """The error is no ConfigError, so the exit code is 1, after which a supervisor restarts the server."""
    monkeypatch.setattr(server_module, "_HEALTH_PERIOD_S", 0.01)

    async def run():
        engine, addresses = FakeEngine(is_gated=True), []

        class RecordingServer(Server):
            """Records its address."""

            async def start(self):
                addresses.append(await super().start())
                return addresses[0]

        ending = asyncio.create_task(
            server_module.serve_until_signal(engine, lambda: RecordingServer(engine, ServerConfig()))
        )
        assert await becomes_true(lambda: addresses)
        async with AsyncClient(addresses[0], timeout_s=PATIENCE_S) as client:
            waiting = asyncio.create_task(client.prefill([7]))
            assert await becomes_true(lambda: engine.futures)
            engine.is_alive = False
            engine.futures[0].cancel()
            refusal = await refusal_of(waiting)
        with pytest.raises(InvariantViolation, match="its thread ended"):
            await asyncio.wait_for(ending, PATIENCE_S)
        return refusal.code()

    assert asyncio.run(run()) is grpc.StatusCode.UNAVAILABLE


def test_reflection_lists_and_describes_the_services():
    async def ask(address, **question):
        async with grpc.aio.insecure_channel(address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            requests = iter([reflection_pb2.ServerReflectionRequest(**question)])
            return await anext(aiter(stub.ServerReflectionInfo(requests, timeout=PATIENCE_S)))

    async def run():
        async with serving(FakeEngine()) as (_, address):
            return (
                await ask(address, list_services=""),
                await ask(address, file_containing_symbol="radixkv.v1.PrefillService"),
            )

    listed, described = asyncio.run(run())
    names = {service.name for service in listed.list_services_response.service}
    assert names == {*SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert described.file_descriptor_response.file_descriptor_proto


def test_a_port_in_use_is_a_config_error_that_names_the_address():
    async def run():
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            with pytest.raises(ConfigError, match=rf"expected a free address of this machine, got 127\.0\.0\.1:{port}"):
                await Server(FakeEngine(), ServerConfig(port=port)).start()

    asyncio.run(run())


def test_two_servers_do_not_share_a_port():
    async def run():
        async with serving(FakeEngine()) as (_, address):
            config = ServerConfig(port=int(address.rpartition(":")[2]))
            with pytest.raises(ConfigError, match="free address"):
                await Server(FakeEngine(), config).start()

    asyncio.run(run())


def test_invalid_bytes_on_the_socket_do_not_stop_the_server():
    async def run():
        async with serving(FakeEngine()) as (_, address), AsyncClient(address) as client:
            _, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
            writer.write(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)))
            await writer.drain()
            writer.close()
            return (await client.prefill([5], timeout_s=PATIENCE_S)).next_token_id

    assert asyncio.run(run()) == 5


def test_drain_changes_health_refuses_new_requests_and_finishes_running_ones():
    async def run():
        engine = FakeEngine(is_gated=True)
        async with serving(engine) as (server, address), AsyncClient(address, timeout_s=PATIENCE_S) as client:
            running = asyncio.create_task(client.prefill([7]))
            assert await becomes_true(lambda: len(engine.futures) == 1)
            draining = asyncio.create_task(server.drain())
            assert await becomes_true(lambda: engine.is_draining)
            health = await health_of(address)
            refusal = await refusal_of(client.prefill([8]))
            assert not running.done()
            engine.open_gate()
            return health, refusal.code(), (await running).next_token_id, await draining

    assert asyncio.run(run()) == ({NOT_SERVING}, grpc.StatusCode.UNAVAILABLE, 7, True)


def test_health_changes_before_the_engine_refuses(monkeypatch):
    async def run():
        engine = FakeEngine()
        health_while_draining = []
        async with serving(engine) as (server, address):

            def drain(timeout_s):
                health_while_draining.append(
                    asyncio.run_coroutine_threadsafe(health_of(address), loop).result(PATIENCE_S)
                )
                return True

            loop = asyncio.get_running_loop()
            with monkeypatch.context() as patch:
                patch.setattr(engine, "drain", drain)
                await server.drain()
        return health_while_draining[0]

    assert asyncio.run(run()) == {NOT_SERVING}


def test_requests_that_outlast_the_drain_are_cancelled_with_a_status():
    async def run():
        engine = FakeEngine(is_gated=True)
        async with serving(engine, drain_timeout_s=0.05) as (server, address), AsyncClient(address) as client:
            running = asyncio.create_task(client.prefill([7]))
            assert await becomes_true(lambda: len(engine.futures) == 1)
            is_finished = await server.drain()
            return is_finished, (await refusal_of(running)).code()

    assert asyncio.run(run()) == (False, grpc.StatusCode.UNAVAILABLE)


def test_responses_that_are_ready_when_the_drain_ends_are_still_sent(monkeypatch):
    monkeypatch.setattr(server_module, "_FLUSH_S", PATIENCE_S)

    async def run():
        engine = FakeEngine(is_gated=True, num_logits=1_000_000)  # more than a socket takes at once

        def drain(timeout_s):
            engine.open_gate()
            return True

        async with (
            serving(engine) as (server, address),
            slow_line(address) as slow_address,
            AsyncClient(slow_address, timeout_s=PATIENCE_S) as client,
        ):
            calls = [asyncio.create_task(client.prefill([n], return_logits=True)) for n in range(5)]
            assert await becomes_true(lambda: len(engine.futures) == 5)
            monkeypatch.setattr(engine, "drain", drain)
            await server.drain()
            return [answer.next_token_id for answer in await asyncio.gather(*calls)]

    assert asyncio.run(run()) == list(range(5))


def test_a_drain_reports_whether_all_responses_were_sent(monkeypatch):
    monkeypatch.setattr(server_module, "_FLUSH_S", 0.05)

    async def run():
        async with serving(FakeEngine(), drain_timeout_s=0.05) as (server, _):
            is_clean = await server.drain()
            server.receiver.in_flight.add(object())  # counts as a call of this task, which is not over
            return is_clean, await server.drain()

    assert asyncio.run(run()) == (True, False)


def test_a_drain_does_not_wait_for_health_watchers(monkeypatch):
    monkeypatch.setattr(server_module, "_FLUSH_S", 0.05)
    engine, has_seen = FakeEngine(), threading.Event()
    monkeypatch.setattr(engine, "drain", lambda timeout_s: has_seen.wait(PATIENCE_S))

    async def run():
        async with serving(engine) as (server, address), grpc.aio.insecure_channel(address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            seen = [(await watch.read()).status]
            draining = asyncio.create_task(server.drain())
            seen.append((await watch.read()).status)
            has_seen.set()
            await asyncio.wait_for(draining, PATIENCE_S)
            return seen

    assert asyncio.run(run()) == [SERVING, NOT_SERVING]
