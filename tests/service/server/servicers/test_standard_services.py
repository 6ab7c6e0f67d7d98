"""gRPC's own packages on a server: newer versions with more methods, and missing packages."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from radixkv.config import ServerConfig
from radixkv.errors import InvariantViolation
from radixkv.gateway import vllm_engine_pb2_grpc
from radixkv.service.client import AsyncClient
from radixkv.service.fleet.ingress_server import IngressServer
from radixkv.service.server import server as server_module
from radixkv.service.server.auth.authorizer import RULES, MethodRule, Permission
from radixkv.service.server.server import Server
from radixkv.service.server.servicers.standard_services import log_missing_services
from radixkv.v1 import cache_pb2_grpc, events_pb2_grpc, fleet_pb2_grpc, model_pb2_grpc, prefill_pb2_grpc
from tests.events.fake_source import FakeSource
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.fleet.fake_connection import facts
from tests.service.serving import GATEWAY, refusal_of, serving

# The module of generated code of each service.
GENERATED = {
    "radixkv.v1.PrefillService": prefill_pb2_grpc,
    "radixkv.v1.CacheService": cache_pb2_grpc,
    "radixkv.v1.ModelService": model_pb2_grpc,
    "radixkv.v1.EventService": events_pb2_grpc,
    "radixkv.v1.FleetService": fleet_pb2_grpc,
    "vllm.grpc.engine.VllmEngine": vllm_engine_pb2_grpc,
    "grpc.health.v1.Health": health_pb2_grpc,
    "grpc.reflection.v1alpha.ServerReflection": reflection_pb2_grpc,
}
FLEET_SERVICE = "radixkv.v1.FleetService"


def make_newer(monkeypatch: pytest.MonkeyPatch, service: str, module: ModuleType, added: list[str]) -> None:
    """Give a service one more method, as generated code of a newer version does.

    When a servicer of the service is added to a server, the name of the service is appended to `added`.
    """
    name = service.rpartition(".")[2]
    base = getattr(module, f"{name}Servicer")
    add = getattr(module, f"add_{name}Servicer_to_server")

    def new_method(self: object, request: object, context: Any) -> None:
        context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        context.set_details("Method not implemented!")
        raise NotImplementedError("Method not implemented!")

    def add_newer(servicer: Any, server: Any) -> None:
        assert isinstance(servicer, base), service
        added.append(service)
        add(servicer, server)
        handlers = {"New": grpc.unary_unary_rpc_method_handler(servicer.New, StringValue.FromString)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

    monkeypatch.setattr(base, "New", new_method, raising=False)
    monkeypatch.setattr(module, f"add_{name}Servicer_to_server", add_newer)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the services that servers add, each of which has a new method that no servicer of ours implements."""
    names: list[str] = []
    for service, module in GENERATED.items():
        make_newer(monkeypatch, service, module, names)
    return names


@pytest.mark.parametrize("has_rule", [False, True])
def test_a_new_method_of_any_service_is_unimplemented(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, added: list[str], has_rule: bool
) -> None:
    if has_rule:
        for service in GENERATED:
            monkeypatch.setitem(RULES, f"/{service}/New", MethodRule(Permission.OPEN))

    async def run() -> dict[str, grpc.StatusCode]:
        engine = FakeEngine()
        engine.events = FakeSource()
        async with serving(engine, gateway=GATEWAY) as (_, address), grpc.aio.insecure_channel(address) as channel:
            assert (await AsyncClient(address).prefill([1, 2, 3], timeout_s=PATIENCE_S)).usage.prompt_tokens == 3
            return {
                service: (await refusal_of(channel.unary_unary(f"/{service}/New")(b"", timeout=PATIENCE_S))).code()
                for service in added
            }

    assert asyncio.run(run()) == dict.fromkeys(GENERATED.keys() - {FLEET_SERVICE}, grpc.StatusCode.UNIMPLEMENTED)
    assert caplog.records == []


def test_the_server_of_a_fleet_starts_with_new_methods_too(added: list[str]) -> None:
    async def run() -> None:
        async def roll_call() -> list[Any]:
            return []

        server = IngressServer(ServerConfig(port=0), facts("127.0.0.1:1"), None, roll_call)  # type: ignore[arg-type]
        address = await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            refusal = await refusal_of(channel.unary_unary(f"/{FLEET_SERVICE}/New")(b"", timeout=PATIENCE_S))
        await server.drain()
        assert refusal.code() is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(run())
    assert FLEET_SERVICE in added


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        ([], None),
        (["grpc_health"], "service of health is off, because packages are missing: pip install grpcio-health-checking"),
        (["grpc_reflection"], "reflection is off, because packages are missing: pip install grpcio-reflection"),
        (["grpc_health", "grpc_reflection"], ": pip install grpcio-health-checking grpcio-reflection"),
    ],
)
def test_a_server_starts_without_health_and_reflection_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: list[str], line: str | None
) -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] in missing or name == "radixkv.service.server.servicers.health":
            monkeypatch.delitem(sys.modules, name)
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)

    async def run() -> dict[str, grpc.StatusCode]:
        async with serving(FakeEngine(), admin_port=0) as (server, address):
            assert (await AsyncClient(address).prefill([1, 2, 3], timeout_s=PATIENCE_S)).usage.prompt_tokens == 3
            assert server.admin_address is not None
            return {each: await health_check_status(each) for each in (address, server.admin_address)}

    code = grpc.StatusCode.UNIMPLEMENTED if "grpc_health" in missing else grpc.StatusCode.OK
    assert set(asyncio.run(run()).values()) == {code}
    caplog.clear()
    log_missing_services()
    assert len(caplog.messages) == (0 if line is None else 1)
    assert all(message.endswith(str(line)) for message in caplog.messages)


async def health_check_status(address: str) -> grpc.StatusCode:
    async with grpc.aio.insecure_channel(address) as channel:
        return await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=PATIENCE_S).code()


def test_a_server_that_starts_logs_what_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "grpc_reflection", None)

    engine = FakeEngine()
    engine.is_alive = False  # the server ends as soon as it has started

    with pytest.raises(InvariantViolation):
        asyncio.run(server_module.serve_until_signal(engine, lambda: Server(engine, ServerConfig(port=0))))
    assert sum("reflection is off" in message for message in caplog.messages) == 1
