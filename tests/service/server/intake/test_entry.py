"""Refusals on the way into a real server, around a fake engine, and how they are counted."""

import asyncio

import grpc.aio
import pytest

from radixkv.errors import InvalidCredential, InvalidRequest, NotPermitted, QueueFull
from radixkv.service.client import AsyncClient
from radixkv.service.server.intake.entry import Entry
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.server.identity.certificates import Papers
from tests.service.serving import refusal_of, serving


def counted(talk, engine=None, **config):
    """Return the classes of exceptions that are counted while `talk(address)` runs beside a server."""
    kinds = []

    async def run():
        async with serving(engine or FakeEngine(), count_refusal=lambda error: kinds.append(type(error)), **config) as (
            _,
            address,
        ):
            await asyncio.wait_for(talk(address), PATIENCE_S)

    asyncio.run(run())
    return kinds


def test_calls_that_their_caller_may_not_make_are_counted_and_others_not(tmp_path):
    papers = Papers(tmp_path)

    async def talk(address):
        async with (
            AsyncClient(address, **papers.client(None)) as stranger,
            AsyncClient(address, **papers.client("acme")) as acme,
        ):
            await refusal_of(stranger.prefill([1]))
            await refusal_of(acme.drain())
            await refusal_of(acme.prefill([1], tenant="globex"))
            await acme.prefill([1])

    assert counted(talk, **papers.tls) == [InvalidCredential, NotPermitted, NotPermitted]


def test_messages_that_can_not_be_parsed_and_those_without_room_are_counted():
    engine = FakeEngine(is_gated=True)

    async def talk(address):
        async with grpc.aio.insecure_channel(address) as channel:
            prefill = channel.unary_unary("/radixkv.v1.PrefillService/Prefill")
            await refusal_of(prefill(b"\xff\xff"))
        async with AsyncClient(address) as client:
            running = asyncio.ensure_future(client.prefill([1] * 20))
            while not engine.futures:
                await asyncio.sleep(0.005)
            await refusal_of(client.prefill([1] * 40))
            engine.open_gate()
            await running

    assert counted(talk, engine, max_held_bytes=200) == [InvalidRequest, QueueFull]


def test_a_refusal_of_the_engine_is_not_counted_here():
    engine = FakeEngine()
    engine.failure = QueueFull("full", retry_after_s=1.0)

    async def talk(address):
        async with AsyncClient(address) as client:
            await refusal_of(client.prefill([1]))

    assert counted(talk, engine) == []


def test_without_a_counter_refusals_are_raised_all_the_same():
    class Closed:
        def admit(self, method, context):
            raise InvalidCredential("credential: expected one, got none")

    with pytest.raises(InvalidCredential):
        asyncio.run(Entry(Closed(), None).receive("/a/b", None, None))
