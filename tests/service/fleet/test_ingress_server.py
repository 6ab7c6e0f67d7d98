"""An ingress in front of two real servers with fake engines, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from radixkv.config import Config, ServerConfig
from radixkv.routing.policies import RoutingWeights
from radixkv.service.client import AsyncClient, Client
from radixkv.service.fleet.fleet_state import FleetState
from radixkv.service.fleet.forwarder import Forwarder
from radixkv.service.fleet.ingress_server import IngressServer
from radixkv.service.fleet.replica import replica_server
from radixkv.service.fleet.replica_connection import HealthCheckTimes, ReplicaConnection
from radixkv.service.fleet.replica_facts import ReplicaFacts
from radixkv.service.fleet.routing_request import RoutingRequest
from radixkv.service.fleet.servicers import REPLICA, call_options
from radixkv.v1 import fleet_pb2, fleet_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tests.events.fake_source import FakeSource
from tests.patience import PATIENCE_S
from tests.service.fake_engine import LIMITS, FakeEngine, next_token_of
from tests.service.fleet.fake_connection import SECRETS, FakeConnection, facts
from tests.service.serving import becomes_true, refusal_of, serving

PROMPT = list(range(1, 41))


def facts_of(address: str) -> ReplicaFacts:
    return ReplicaFacts(
        address, LIMITS.epoch, LIMITS.model, LIMITS.model_fingerprint, LIMITS.vocab_size, 4096, 4, "", 3600.0, SECRETS
    )


class Served:
    """An ingress that serves, the state of its fleet and the engines behind it."""

    def __init__(
        self,
        address: str,
        engines: dict[str, FakeEngine],
        state: FleetState,
        forwarder: Forwarder,
        server: IngressServer,
    ) -> None:
        self.address = address
        self.server = server
        self.engines = engines
        self.state = state
        self.forwarder = forwarder


def replica_bounds(config: dict[str, Any]) -> dict[str, Any]:
    """Return the bounds of the replicas behind an ingress with this configuration."""
    replica = replica_server(Config(server=ServerConfig(**config)), "127.0.0.1")
    return {name: getattr(replica, name) for name in ("max_calls", "max_connection_calls", "send_timeout_s")}


@contextlib.asynccontextmanager
async def fleet(num_replicas: int = 2, **config):
    """Yield an ingress in front of servers with fake engines. `config` has settings of the ingress."""
    engines: dict[str, FakeEngine] = {}
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(num_replicas):
            engine = FakeEngine()
            engine.events = FakeSource()
            _, address = await stack.enter_async_context(serving(engine, **replica_bounds(config)))
            engines[address] = engine
        state = FleetState(
            lambda facts: ReplicaConnection(facts, HealthCheckTimes(0.05, PATIENCE_S)),
            weights=RoutingWeights(least_match_tokens=8),
        )
        stack.push_async_callback(state.close)
        state.update(facts_of(address) for address in engines)

        async def choose(prompt):
            return state.route(prompt)

        forwarder = Forwarder(choose, 0.5)

        async def list_replicas():
            return state.connections

        server = IngressServer(ServerConfig(port=0, **config), facts_of(next(iter(engines))), forwarder, list_replicas)
        address = await server.start()
        stack.push_async_callback(server.drain)
        assert not server.has_ended
        yield Served(address, engines, state, forwarder, server)


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_prompts_are_answered_and_the_replica_is_named() -> None:
    async def test() -> None:
        async with fleet() as served, grpc.aio.insecure_channel(served.address) as channel:
            stub = prefill_pb2_grpc.PrefillServiceStub(channel)
            call = stub.Prefill(prefill_pb2.PrefillRequest(token_ids=PROMPT, tenant="acme"))
            answer = await call
            assert answer.next_token_id == next_token_of(PROMPT)
            name = dict(await call.trailing_metadata())[REPLICA]
            assert served.engines[name].params[0].caller.tenant == "acme"
            async with AsyncClient(served.address) as client:
                chunks = [chunk async for chunk in client.generate(PROMPT, tenant="acme", max_new_tokens=3)]
                assert sum(len(chunk.token_ids) for chunk in chunks) == 3
                assert chunks[-1].finished
                assert (await client.probe(PROMPT, tenant="acme")).prompt_tokens == len(PROMPT)

    run(test)


def test_a_refusal_of_a_call_without_a_prompt_names_the_field() -> None:
    async def test() -> None:
        async with fleet() as served, grpc.aio.insecure_channel(served.address) as channel:
            stub = prefill_pb2_grpc.PrefillServiceStub(channel)
            calls = {
                "token_ids": stub.Prefill(prefill_pb2.PrefillRequest()),
                "prefill.token_ids": stub.Generate(prefill_pb2.GenerateRequest()).read(),
            }
            for field, call in calls.items():
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                assert refused.value.details() == f"{field}: expected at least 1 token, got 0"

    run(test)


def test_a_route_names_the_replica_that_gets_the_prompt() -> None:
    async def test() -> None:
        async with fleet() as served, AsyncClient(served.address) as client:
            first = await client.route(PROMPT, tenant="acme")
            assert (first.address in served.engines, first.reason) == (True, fleet_pb2.ROUTED_BY_LOAD)
            again = await client.route(PROMPT, tenant="acme")
            # All blocks of 4 tokens but the last one, since the last token is always computed.
            assert (again.address, again.cached_tokens, again.num_replicas) == (first.address, 36, 2)
            other = await client.route(PROMPT, avoid=[first.address])
            assert other.address in served.engines.keys() - {first.address}
            with pytest.raises(grpc.aio.AioRpcError) as none_left:
                await client.route(PROMPT, avoid=served.engines)
            assert none_left.value.code() is grpc.StatusCode.UNAVAILABLE
            with Client(served.address) as blocking:
                assert (await asyncio.to_thread(blocking.route, PROMPT, tenant="acme")).address == first.address

    run(test)


def test_calls_that_a_fleet_lacks_are_refused_with_an_alternative() -> None:
    async def test() -> None:
        async with fleet(1) as served, AsyncClient(served.address) as client:
            for call in (
                client.segments(),
                client.drain(),
                client.release("lease"),
                client.prefill(PROMPT, hold_lease=True),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
                assert "a fleet does not offer it; call a replica" in refused.value.details()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await anext(client.subscribe())
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(test)


def test_a_source_of_kv_has_an_address() -> None:
    async def test() -> None:
        async with fleet(1) as served, AsyncClient(served.address) as client:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await anext(client.generate(PROMPT, kv_source=prefill_pb2.KVSource(lease_id="a", epoch=1)))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert refused.value.details() == "kv_source.address: it is empty; it must be the address of a replica"
            (engine,) = served.engines.values()
            assert engine.params == []

    run(test)


def test_refusals_of_a_replica_reach_the_caller() -> None:
    async def test() -> None:
        async with fleet() as served, AsyncClient(served.address) as client:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.prefill([])
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await anext(client.generate(PROMPT, top_p=2.0))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(test)


def test_a_call_to_a_draining_replica_is_retried() -> None:
    async def test() -> None:
        async with fleet() as served, AsyncClient(served.address) as client:
            first, second = served.engines
            served.engines[first].is_draining = True
            chosen = []

            async def choose(prompt):
                """Choose the first replica unless the prompt avoids it."""
                avoid = prompt.avoid or served.engines.keys() - {first}
                routed = served.state.route(RoutingRequest(prompt.tokens, avoid=set(avoid)))
                chosen.append(routed.name)
                return routed

            served.forwarder._choose = choose
            assert (await client.prefill(PROMPT)).next_token_id == next_token_of(PROMPT)
            assert chosen == [first, second]
            chunks = [chunk async for chunk in client.generate(PROMPT, max_new_tokens=2)]
            assert (chunks[-1].finished, chosen) == (True, 2 * [first, second])

    run(test)


def test_a_client_with_the_maximum_number_of_calls_does_not_block_others() -> None:
    async def test() -> None:
        own_connection = (("grpc.use_local_subchannel_pool", 1),)
        async with (
            fleet(1, max_calls=20, max_connection_calls=20) as served,
            AsyncClient(served.address, options=own_connection) as many,
            AsyncClient(served.address, options=own_connection) as other,
        ):
            (engine,) = served.engines.values()
            engine.is_gated = True
            unfinished = [asyncio.ensure_future(many.prefill([7, number])) for number in range(20)]
            assert await becomes_true(lambda: len(engine.futures) == 20)
            (connection,) = served.state.connections
            await connection.check()
            assert connection.is_up
            call_of_other = asyncio.ensure_future(other.prefill(PROMPT))
            assert await becomes_true(lambda: call_of_other.done() or len(engine.futures) == 21)
            engine.open_gate()
            assert (await call_of_other).next_token_id == next_token_of(PROMPT)
            assert len(await asyncio.gather(*unfinished)) == 20

    run(test)


@pytest.mark.parametrize(("remaining_s", "timeout_s"), [(None, 3600.0), (5.0, 5.0), (1e6, 3600.0)])
def test_every_call_to_a_replica_has_a_deadline(remaining_s, timeout_s) -> None:
    context = SimpleNamespace(time_remaining=lambda: remaining_s, invocation_metadata=lambda: ())
    options = call_options(FakeConnection(facts("a")), context)
    assert options == {"timeout": timeout_s, "metadata": FakeConnection.metadata}


def test_callers_are_authenticated_as_by_a_single_server(tmp_path) -> None:
    digest = hashlib.sha256(b"own").hexdigest()
    (tmp_path / "tokens").write_text(
        f'[[credentials]]\nname = "a"\nrole = "tenant"\ntenant = "acme"\ntoken_sha256 = "{digest}"\n', "utf-8"
    )

    async def test() -> None:
        async with fleet(1, tokens_file=str(tmp_path / "tokens"), insecure=True) as served:
            (engine,) = served.engines.values()
            async with grpc.aio.insecure_channel(served.address) as channel:
                prefills = prefill_pb2_grpc.PrefillServiceStub(channel)
                routes = fleet_pb2_grpc.FleetServiceStub(channel)
                own = (("authorization", "Bearer own"),)
                await prefills.Prefill(prefill_pb2.PrefillRequest(token_ids=PROMPT), metadata=own)
                assert engine.params[-1].caller.tenant == "acme"
                await routes.Route(fleet_pb2.RouteRequest(token_ids=PROMPT), metadata=own)
                for call, code in (
                    (prefills.Prefill(prefill_pb2.PrefillRequest(token_ids=PROMPT)), grpc.StatusCode.UNAUTHENTICATED),
                    (routes.Route(fleet_pb2.RouteRequest(token_ids=PROMPT)), grpc.StatusCode.UNAUTHENTICATED),
                    (
                        prefills.Prefill(prefill_pb2.PrefillRequest(token_ids=PROMPT, tenant="b"), metadata=own),
                        grpc.StatusCode.PERMISSION_DENIED,
                    ),
                    (
                        routes.Route(fleet_pb2.RouteRequest(token_ids=PROMPT, tenant="b"), metadata=own),
                        grpc.StatusCode.PERMISSION_DENIED,
                    ),
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await call
                    assert refused.value.code() is code

    run(test)


def test_a_drain_refuses_new_calls_answers_health_checks_and_lets_running_ones_finish() -> None:
    async def test() -> None:
        async with (
            fleet(1) as served,
            AsyncClient(served.address, timeout_s=PATIENCE_S) as client,
            grpc.aio.insecure_channel(served.address) as channel,
        ):
            (engine,) = served.engines.values()
            engine.is_gated = True
            running = asyncio.create_task(client.prefill(PROMPT))
            assert await becomes_true(lambda: len(engine.futures) == 1)
            draining = asyncio.create_task(served.server.drain())
            await asyncio.sleep(0)
            check = health_pb2_grpc.HealthStub(channel).Check
            health = await check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
            assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
            for call in (client.prefill(PROMPT), client.route(PROMPT), anext(client.generate(PROMPT))):
                refusal = await refusal_of(call)
                assert refusal.code() is grpc.StatusCode.UNAVAILABLE
                assert refusal.details() == "service: shutting down, no new requests"
            assert (len(engine.futures), running.done()) == (1, False)
            engine.open_gate()
            assert (await running).next_token_id == next_token_of(PROMPT)
            await draining

    run(test)
