"""Refusals before and after the servicer, how they are counted, and the registration of methods."""

import asyncio

import grpc
import grpc.aio

from radixkv.errors import InvalidCredential, InvalidRequest, NotPermitted, QueueFull
from radixkv.service.client import AsyncClient
from radixkv.service.server.guarded_server import GuardedServer
from radixkv.service.server.servicers.health import add_health
from radixkv.service.server.servicers.health_status import HealthStatus
from radixkv.service.server.servicers.model import ModelServicer
from radixkv.v1 import cache_pb2_grpc, model_pb2_grpc, prefill_pb2_grpc
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.server.auth.certificates import CredentialFiles
from tests.service.serving import refusal_of, serving


class FakeServer:
    """Stands in for a gRPC server and records what is registered."""

    def __init__(self):
        self.handlers = []
        self.registered = set()

    def add_generic_rpc_handlers(self, handlers):
        self.handlers += handlers

    def add_registered_method_handlers(self, service, handlers):
        self.registered |= {f"/{service}/{name}" for name in handlers}


class FakeCallDetails:
    """Stands in for gRPC's HandlerCallDetails: the path of the method that is called."""

    def __init__(self, method):
        self.method = method


def test_all_methods_are_registered_and_can_be_looked_up():
    server = FakeServer()
    guarded = GuardedServer(server, None, None)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(prefill_pb2_grpc.PrefillServiceServicer(), guarded)
    cache_pb2_grpc.add_CacheServiceServicer_to_server(cache_pb2_grpc.CacheServiceServicer(), guarded)
    model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(None), guarded)
    add_health(guarded, HealthStatus())
    for method in (
        "/radixkv.v1.PrefillService/Probe",
        "/radixkv.v1.CacheService/Stats",
        "/radixkv.v1.ModelService/GetTokenizer",
        "/grpc.health.v1.Health/Watch",
    ):
        assert method in server.registered
        assert any(handlers.service(FakeCallDetails(method)) is not None for handlers in server.handlers), method


def counted_refusals(talk, engine=None, **config):
    """Return the classes of the refusals that a server counts while `talk(address)` runs."""
    refusal_types = []

    def count_refusal(error):
        refusal_types.append(type(error))

    async def run():
        async with serving(engine or FakeEngine(), count_refusal=count_refusal, **config) as (_, address):
            await asyncio.wait_for(talk(address), PATIENCE_S)

    asyncio.run(run())
    return refusal_types


def test_calls_that_their_caller_may_not_make_are_counted_and_others_not(tmp_path):
    credential_files = CredentialFiles(tmp_path)

    async def talk(address):
        async with (
            AsyncClient(address, **credential_files.client(None)) as stranger,
            AsyncClient(address, **credential_files.client("acme")) as acme,
        ):
            await refusal_of(stranger.prefill([1]))
            await refusal_of(acme.drain())
            await refusal_of(acme.prefill([1], tenant="globex"))
            await acme.prefill([1])

    assert counted_refusals(talk, **credential_files.tls) == [InvalidCredential, NotPermitted, NotPermitted]


def test_messages_that_can_not_be_parsed_and_those_beyond_a_limit_are_counted():
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

    assert counted_refusals(talk, engine, max_held_bytes=200) == [InvalidRequest, QueueFull]


def test_a_refusal_of_the_engine_is_not_counted_here():
    engine = FakeEngine()
    engine.failure = QueueFull("full", retry_after_s=1.0)

    async def talk(address):
        async with AsyncClient(address) as client:
            await refusal_of(client.prefill([1]))

    assert counted_refusals(talk, engine) == []


def test_without_a_counter_refusals_reach_the_caller_all_the_same(tmp_path):
    credential_files = CredentialFiles(tmp_path)

    async def run():
        async with (
            serving(FakeEngine(), **credential_files.tls) as (_, address),
            AsyncClient(address, **credential_files.client(None)) as stranger,
        ):
            return (await refusal_of(stranger.prefill([1]))).code()

    assert asyncio.run(run()) is grpc.StatusCode.UNAUTHENTICATED
