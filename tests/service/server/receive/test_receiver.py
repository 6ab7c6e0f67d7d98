"""Received and sent messages of a real server. Raw connections do what the clients of gRPC do not do."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import grpc
import grpc.aio
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bench.hostile.attacks.flood import PREFILL, open_channel
from bench.hostile.attacks.frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    frame,
    header_block,
)
from radixkv.config import ServerConfig
from radixkv.errors import QueueFull
from radixkv.service.client import AsyncClient
from radixkv.service.server.receive import grpc_options
from radixkv.service.server.receive import receiver as receiver_module
from radixkv.service.server.receive.parsing import parse_in_pieces
from radixkv.service.server.receive.receiver import Receiver
from radixkv.v1.prefill_pb2 import PrefillRequest
from tests.events.fake_source import FakeSource
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.server.auth.certificates import CredentialFiles
from tests.service.serving import becomes_true, refusal_of, serving

PING = 6  # a type of HTTP/2 frames
# The start of a connection. It acknowledges the server's settings, or gRPC would end the connection after 10 s.
OPENING = PREFACE + frame(SETTINGS, 0, 0, b"") + frame(SETTINGS, ACK, 0, b"")


async def open_call(address):
    """Open a connection, and begin a call that has not sent its message yet; return both."""
    channel = grpc.aio.insecure_channel(address)
    call = channel.stream_unary(PREFILL)()
    await call.wait_for_connection()
    return channel, call


def test_a_message_that_does_not_arrive_is_aborted():
    async def run():
        async with serving(FakeEngine(), receive_timeout_s=0.05) as (_, address):
            channel, call = await open_call(address)
            refusal = await refusal_of(call)
            await channel.close()
            return refusal.code(), refusal.details()

    code, details = asyncio.run(run())
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert details == "message: only a part of it arrived within 0.05 s (`server.receive_timeout_s`)"


def test_a_call_without_a_message_is_refused():
    async def run():
        async with serving(FakeEngine()) as (_, address):
            channel, call = await open_call(address)
            await call.done_writing()
            refusal = await refusal_of(call)
            await channel.close()
            return refusal.code(), refusal.details()

    assert asyncio.run(run()) == (grpc.StatusCode.INVALID_ARGUMENT, "request: the call has no message")


def test_a_message_that_arrives_when_no_new_calls_are_accepted_is_refused():
    async def run():
        engine = FakeEngine()
        async with serving(engine) as (server, address):
            channel, call = await open_call(address)
            assert await becomes_true(lambda: server.receiver.num_calls == 1)
            server.receiver.refuse_new()
            await call.write(PrefillRequest(token_ids=[1]).SerializeToString())
            refusal = await refusal_of(call)
            await channel.close()
            return refusal.code(), engine.futures

    assert asyncio.run(run()) == (grpc.StatusCode.UNAVAILABLE, [])


def test_callers_that_send_nothing_do_not_block_others():
    async def run():
        async with (
            serving(FakeEngine(), max_message_bytes=2048, max_receiving_bytes=8192) as (_, address),
            AsyncClient(address) as client,
        ):
            stalled = [await open_call(address) for _ in range(12)]  # three per slot
            answer = await client.prefill([3], timeout_s=PATIENCE_S)
            for channel, call in stalled:
                call.cancel()
                await channel.close()
            return answer.next_token_id

    assert asyncio.run(run()) == 3


def test_a_tenant_that_holds_too_much_is_refused_and_others_are_not():
    async def run():
        engine = FakeEngine(is_gated=True)
        async with serving(engine, max_held_bytes=60_000) as (_, address), AsyncClient(address) as client:
            prompt = np.ones(10_000, dtype=np.uint32)
            greedy = asyncio.create_task(client.prefill(prompt, tenant="greedy"))
            assert await becomes_true(lambda: len(engine.futures) == 1)
            refusal = await refusal_of(client.prefill(prompt, tenant="greedy", timeout_s=PATIENCE_S))
            other = asyncio.create_task(client.prefill(prompt[:1], tenant="other"))
            assert await becomes_true(lambda: len(engine.futures) == 2)
            engine.open_gate()
            await asyncio.gather(greedy, other)
            assert (await client.prefill(prompt, tenant="greedy")).usage.prompt_tokens == 10_000
            return refusal.code(), retry_after_ms(refusal)

    assert asyncio.run(run()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "1000")


class BlockedParsing:
    """Replaces `parse_in_pieces` by a function that waits for `open` to be set."""

    def __init__(self, monkeypatch):
        self.open = threading.Event()
        self.num_running = self.max_running = 0
        self._lock = threading.Lock()
        monkeypatch.setattr(receiver_module, "parse_in_pieces", self._parse)

    def _parse(self, message, data):
        with self._lock:
            self.num_running += 1
            self.max_running = max(self.max_running, self.num_running)
        assert self.open.wait(PATIENCE_S)
        with self._lock:
            self.num_running -= 1
        return parse_in_pieces(message, data)


def test_a_large_message_counts_as_held_before_it_is_parsed(monkeypatch):
    parsing, prompt = BlockedParsing(monkeypatch), np.ones(50_000, dtype=np.uint32)

    async def run():
        async with serving(FakeEngine(), max_held_bytes=350_000) as (server, address), AsyncClient(address) as client:
            first = asyncio.create_task(client.prefill(prompt, tenant="first", timeout_s=PATIENCE_S))
            assert await becomes_true(lambda: parsing.num_running == 1)
            refusal = await refusal_of(client.prefill(prompt, tenant="second", timeout_s=PATIENCE_S))
            parsing.open.set()
            answer = await first
            assert await becomes_true(lambda: server.receiver.held_bytes.used == 0)
            return refusal.code(), answer.usage.prompt_tokens

    assert asyncio.run(run()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 50_000)


def test_cancelled_calls_occupy_no_further_threads_that_parse(monkeypatch):
    parsing, prompt = BlockedParsing(monkeypatch), np.ones(50_000, dtype=np.uint32)

    async def run():
        async with serving(FakeEngine()) as (server, address), AsyncClient(address) as client:
            cancelled = [asyncio.create_task(client.prefill(prompt)) for _ in range(2)]
            assert await becomes_true(lambda: parsing.num_running == 2)
            for call in cancelled:
                call.cancel()
            assert await becomes_true(lambda: server.receiver.held_bytes.used == 0)
            third = asyncio.create_task(client.prefill(prompt, timeout_s=PATIENCE_S))
            assert await becomes_true(lambda: server.receiver.held_bytes.used > 0)
            await asyncio.sleep(0.05)
            parsing.open.set()
            return (await third).usage.prompt_tokens

    assert (asyncio.run(run()), parsing.max_running) == (50_000, 2)


def test_log_probabilities_of_a_prompt_count_as_held_before_they_are_known():
    async def run():
        engine = FakeEngine(is_gated=True)
        async with serving(engine, max_held_bytes=60_000) as (_, address), AsyncClient(address) as client:
            # 3 copies of 100 * 10 log probabilities with 16 bytes each: 48,000 of the 60,000 bytes
            greedy = client.generate([1] * 100, tenant="greedy", prompt_logprobs=9, timeout_s=PATIENCE_S)
            assert await becomes_true(lambda: len(engine.futures) == 1)
            again = client.generate([1] * 100, tenant="greedy", prompt_logprobs=9, timeout_s=PATIENCE_S)
            refusal = await refusal_of(anext(again))
            other = client.generate([1] * 100, tenant="greedy", timeout_s=PATIENCE_S)
            assert await becomes_true(lambda: len(engine.futures) == 2)
            await greedy.aclose()
            await other.aclose()
            return refusal.code(), len(engine.futures)

    assert asyncio.run(run()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 2)


def test_a_response_that_is_not_read_ends_with_its_connection():
    """The response of 8 MB does not fit into the buffers of sockets, and the caller never widens its window for it."""

    async def run():
        async with (
            serving(FakeEngine(num_logits=2_000_000), send_timeout_s=0.2) as (_, address),
            AsyncClient(address) as client,
        ):
            reader, writer = await asyncio.open_connection(*address.rsplit(":", 1), limit=1024)
            writer.write(OPENING + prefill_frames(PrefillRequest(token_ids=[1], return_logits=True)))
            await writer.drain()
            await asyncio.wait_for(read_to_end(reader), PATIENCE_S)
            writer.close()
            return (await client.prefill([3])).next_token_id

    assert asyncio.run(run()) == 3


def test_a_client_may_ping_during_a_long_call(monkeypatch):
    monkeypatch.setattr(grpc_options, "_MIN_PING_INTERVAL_MS", 100)

    async def run():
        async with serving(FakeEngine(is_gated=True)) as (_, address):
            reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))
            writer.write(OPENING + prefill_frames(PrefillRequest(token_ids=[1])))
            for number in range(6):  # by default, gRPC closes the connection after the fourth ping
                await asyncio.sleep(0.15)
                ping = f"ping {number:03}".encode()
                writer.write(frame(PING, 0, 0, ping))
                await asyncio.wait_for(reader.readuntil(ping), PATIENCE_S)  # the acknowledgement
            writer.close()

    asyncio.run(run())


def counting_refusals(refusal_types):
    """Return the options of a server that adds the type of each refusal to `refusal_types`."""
    return {"count_refusal": lambda error: refusal_types.append(type(error))}


def retry_after_ms(refusal):
    return dict(tuple(refusal.trailing_metadata())).get("retry-after-ms")


def test_endless_streams_have_a_limit_of_their_own_and_do_not_count_as_calls():
    refusal_types = []

    async def run():
        async with (
            serving(FakeEngine(), max_calls=16, **counting_refusals(refusal_types)) as (server, address),
            grpc.aio.insecure_channel(address) as channel,
            AsyncClient(address) as client,
        ):
            watch = health_pb2_grpc.HealthStub(channel).Watch
            watching = [watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
            for each in watching:
                await each.read()
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
            reflecting = [reflection() for _ in range(2)]
            assert await becomes_true(lambda: server.receiver.num_endless == 2)
            refusals = [
                await refusal_of(watch(health_pb2.HealthCheckRequest()).read()),
                await refusal_of(reflection().read()),
            ]
            for each in reflecting:
                each.cancel()
            answers = await asyncio.gather(*(client.prefill([number]) for number in range(16)))
            watching[0].cancel()
            later = watch(health_pb2.HealthCheckRequest())
            while True:  # until the server knows of the cancellation
                try:
                    await later.read()
                    break
                except grpc.aio.AioRpcError:
                    later = watch(health_pb2.HealthCheckRequest())
            return [(each.code(), retry_after_ms(each)) for each in refusals], len(answers)

    codes, num_answers = asyncio.run(run())
    assert codes == [(grpc.StatusCode.RESOURCE_EXHAUSTED, "1000")] * 2
    assert num_answers == 16
    assert set(refusal_types) == {QueueFull}


def test_unauthenticated_watches_do_not_keep_a_router_from_its_events():
    async def run():
        engine = FakeEngine()
        engine.events = FakeSource()
        engine.events.store(1, 2, 3, 4)
        own_connection = (("grpc.use_local_subchannel_pool", 1),)
        async with serving(engine, max_calls=16) as (_, address), contextlib.AsyncExitStack() as stack:
            watches = []
            for _ in range(5):
                channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, own_connection))
                watches.append(health_pb2_grpc.HealthStub(channel).Watch)
            watching = [watch(health_pb2.HealthCheckRequest()) for watch in watches[:4]]
            for each in watching:
                await each.read()
            refusal = await refusal_of(watches[4](health_pb2.HealthCheckRequest()).read())
            router = await stack.enter_async_context(AsyncClient(address, options=own_connection))
            return refusal.code(), (await anext(router.subscribe(timeout_s=PATIENCE_S))).sequence_number

    code, _ = asyncio.run(run())
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_connection_with_all_calls_is_refused_and_another_one_has_its_share():
    refusal_types = []

    async def run():
        engine = FakeEngine(is_gated=True)
        async with (
            serving(engine, max_calls=4, **counting_refusals(refusal_types)) as (_, address),
            AsyncClient(address) as greedy,
            open_channel(address) as connection,
        ):

            def other():
                return connection.unary_unary(PREFILL)(PrefillRequest(token_ids=[1]).SerializeToString())

            calls = [asyncio.ensure_future(greedy.prefill([1])) for _ in range(4)]
            assert await becomes_true(lambda: len(engine.futures) == 4)
            refusal = await refusal_of(greedy.prefill([1]))
            calls += [other() for _ in range(2)]
            assert await becomes_true(lambda: len(engine.futures) == 6)
            refusal_of_other = await refusal_of(other())
            engine.open_gate()
            await asyncio.gather(*calls)
            return refusal.details(), refusal_of_other.details(), retry_after_ms(refusal)

    assert asyncio.run(run()) == (
        "service: expected at most an equal share of 4 calls in flight for this connection, got 5",
        "service: expected at most an equal share of 4 calls in flight for this connection, got 3",
        "1000",
    )
    assert refusal_types == [QueueFull] * 2


def test_connections_of_one_credential_share_its_calls(tmp_path):
    credential_files = CredentialFiles(tmp_path)

    async def run():
        engine = FakeEngine(is_gated=True)
        async with (
            serving(engine, max_calls=2, **credential_files.tls) as (_, address),
            AsyncClient(address, **credential_files.client("acme")) as first,
            AsyncClient(address, **credential_files.client("acme")) as second,
            AsyncClient(address, **credential_files.client("globex")) as other,
        ):
            calls = [asyncio.ensure_future(client.prefill([1])) for client in (first, second)]
            assert await becomes_true(lambda: len(engine.futures) == 2)
            refusals = [(await refusal_of(client.prefill([1]))).details() for client in (first, second)]
            calls.append(asyncio.ensure_future(other.prefill([1])))
            assert await becomes_true(lambda: len(engine.futures) == 3)
            engine.open_gate()
            await asyncio.gather(*calls)
            return refusals

    assert (
        asyncio.run(run())
        == ["service: expected at most an equal share of 2 calls in flight for this credential, got 3"] * 2
    )


def test_a_reflection_stream_ends_after_its_timeout():
    async def run():
        async with (
            serving(FakeEngine(), receive_timeout_s=0.3) as (_, address),
            grpc.aio.insecure_channel(address) as channel,
        ):
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            return (await refusal_of(call.read())).code()

    assert asyncio.run(run()) is grpc.StatusCode.DEADLINE_EXCEEDED


def test_messages_without_a_prompt_must_be_small():
    async def run():
        async with serving(FakeEngine()) as (_, address), grpc.aio.insecure_channel(address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            await reflection.write(reflection_pb2.ServerReflectionRequest(file_by_filename="x" * 5000))
            refusals = [await refusal_of(check(health_pb2.HealthCheckRequest(service="x" * 5000)))]
            refusals.append(await refusal_of(reflection.read()))
            return {(each.code(), each.details()) for each in refusals}

    ((code, details),) = asyncio.run(run())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == "request: expected at most 4096 bytes without a prompt, got 5003"


def test_memory_of_unauthenticated_callers_is_not_charged_to_the_unnamed_tenant():
    async def run():
        async with (
            serving(FakeEngine(), max_held_bytes=1000) as (_, address),
            grpc.aio.insecure_channel(address) as channel,
            AsyncClient(address) as client,
        ):
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="x" * 900))
            await watch.read()
            return (await client.prefill([1] * 60, tenant="")).usage.prompt_tokens

    assert asyncio.run(run()) == 60


async def read_to_end(reader) -> None:
    """Read until the server ends the connection. The flow-control window is never widened."""
    with contextlib.suppress(ConnectionResetError):
        while await reader.read(65_536):
            pass


def prefill_frames(message: PrefillRequest) -> bytes:
    """Return the HTTP/2 frames of a call of Prefill on the stream 1."""
    body = message.SerializeToString()
    prefixed = b"\0" + len(body).to_bytes(4, "big") + body
    return frame(HEADERS, END_HEADERS, 1, header_block(PREFILL)) + frame(DATA, END_STREAM, 1, prefixed)


def make_receiver():
    return Receiver(ServerConfig(), FakeEngine().limits)


def test_calls_in_flight_are_waited_for():
    async def run():
        receiver = make_receiver()
        receiver.in_flight.update({"first", "second"})
        waiting = asyncio.create_task(receiver.wait_for_calls(60))
        await asyncio.sleep(0)
        receiver.in_flight.discard("first")
        for _ in range(5):
            await asyncio.sleep(0)
        was_waiting = not waiting.done()
        receiver.in_flight.discard("second")
        return was_waiting, await asyncio.wait_for(waiting, PATIENCE_S)

    assert asyncio.run(run()) == (True, True)


def test_later_calls_are_not_waited_for():
    async def run():
        receiver = make_receiver()
        receiver.in_flight.add("first")
        waiting = asyncio.create_task(receiver.wait_for_calls(60))
        await asyncio.sleep(0)
        receiver.in_flight.add("later")
        receiver.in_flight.discard("first")
        return await asyncio.wait_for(waiting, PATIENCE_S)

    assert asyncio.run(run())


def test_the_wait_for_calls_is_bounded():
    async def run():
        receiver = make_receiver()
        receiver.in_flight.add("endless")
        return await asyncio.wait_for(receiver.wait_for_calls(0.05), PATIENCE_S)

    assert not asyncio.run(run())
