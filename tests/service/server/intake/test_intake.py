"""The way in and out, over a real server: raw connections send what no client does."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import numpy as np
import pytest

from radixkv.service.client import AsyncClient
from radixkv.service.server.intake.intake import tenant_of
from radixkv.v1.cache_pb2 import PurgeRequest, StatsRequest
from radixkv.v1.prefill_pb2 import GenerateRequest, PrefillRequest
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import becomes_true, refusal_of, serving

PREFILL = "/radixkv.v1.PrefillService/Prefill"


@pytest.mark.parametrize(
    ("message", "tenant"),
    [
        (PrefillRequest(tenant="a"), "a"),
        (GenerateRequest(prefill=PrefillRequest(tenant="b")), "b"),
        (PurgeRequest(tenant="c"), "c"),
        (PurgeRequest(), ""),
        (StatsRequest(), ""),
    ],
)
def test_the_tenant_is_the_one_that_the_message_names(message, tenant):
    assert tenant_of(message) == tenant


async def opened(address):
    """Open a call that sends no message yet."""
    channel = grpc.aio.insecure_channel(address)
    call = channel.stream_unary(PREFILL)()
    await call.wait_for_connection()
    return channel, call


def test_a_message_that_does_not_come_is_given_up():
    async def run():
        async with serving(FakeEngine(), receive_timeout_s=0.05) as (_, address):
            channel, call = await opened(address)
            refusal = await refusal_of(call)
            await channel.close()
            return refusal.code(), refusal.details()

    code, details = asyncio.run(run())
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert details == "message: expected to come within 0.05 s, got less of it"


def test_a_call_without_a_message_is_refused():
    async def run():
        async with serving(FakeEngine()) as (_, address):
            channel, call = await opened(address)
            await call.done_writing()
            refusal = await refusal_of(call)
            await channel.close()
            return refusal.code(), refusal.details()

    assert asyncio.run(run()) == (grpc.StatusCode.INVALID_ARGUMENT, "request: expected one message, got none")


def test_callers_that_send_nothing_keep_nobody_from_being_served():
    async def run():
        async with (
            serving(FakeEngine(), max_message_bytes=2048, max_receiving_bytes=8192) as (_, address),
            AsyncClient(address) as client,
        ):
            stalled = [await opened(address) for _ in range(12)]  # three for each place
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
            return refusal.code(), dict(tuple(refusal.trailing_metadata())).get("retry-after-ms")

    assert asyncio.run(run()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "1000")


def test_an_answer_that_nobody_reads_ends_with_its_connection():
    """The answer of 8 MB does not fit into what sockets hold, and the caller reads none of it."""

    async def run():
        async with (
            serving(FakeEngine(num_logits=2_000_000), send_timeout_s=0.2) as (_, address),
            AsyncClient(address) as client,
        ):
            reader, writer = await asyncio.open_connection(*address.rsplit(":", 1), limit=1024)
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5))
            writer.write(frame(4, 1, 0, b""))  # the server's settings are acknowledged, or gRPC would end it after 10 s
            writer.write(headers(1) + data(1, PrefillRequest(token_ids=[1], return_logits=True)))
            await writer.drain()
            closed = await asyncio.wait_for(read_to_end(reader), PATIENCE_S)
            writer.close()
            return closed, (await client.prefill([3])).next_token_id

    assert asyncio.run(run()) == (True, 3)


async def read_to_end(reader) -> bool:
    """Read without ever widening a window, until the connection ends."""
    try:
        while await reader.read(65_536):
            pass
    except ConnectionResetError:
        pass
    return True


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def headers(stream: int) -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": PREFILL,
        ":authority": "x",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    return frame(1, 4, stream, block)


def data(stream: int, message: PrefillRequest) -> bytes:
    body = message.SerializeToString()
    return frame(0, 1, stream, b"\0" + len(body).to_bytes(4, "big") + body)
