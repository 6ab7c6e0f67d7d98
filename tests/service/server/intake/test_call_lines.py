import asyncio

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from radixkv.service.server.health.health_status import HealthStatus
from radixkv.service.server.health.servicer import add_health
from radixkv.service.server.intake.call_lines import CallLines
from radixkv.service.server.model_servicer import ModelServicer
from radixkv.v1 import cache_pb2_grpc, model_pb2_grpc, prefill_pb2_grpc
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serving


class Server:
    """Stands for a gRPC server; keeps what it is told."""

    def __init__(self):
        self.services = set()
        self.lines = {}

    def add_generic_rpc_handlers(self, handlers):
        self.services |= {handler.service_name() for handler in handlers}

    def add_registered_method_handlers(self, service, handlers):
        self.lines[service] = set(handlers)


def test_prompts_and_checks_of_the_health_have_lines_and_no_other_methods():
    server = Server()
    lines = CallLines(server)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(prefill_pb2_grpc.PrefillServiceServicer(), lines)
    cache_pb2_grpc.add_CacheServiceServicer_to_server(cache_pb2_grpc.CacheServiceServicer(), lines)
    model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(None), lines)
    add_health(lines, HealthStatus())
    assert {name for names in server.lines.values() for name in names} == {"Prefill", "Generate", "Check"}
    assert server.services == {
        "radixkv.v1.PrefillService",
        "radixkv.v1.CacheService",
        "radixkv.v1.ModelService",
        "grpc.health.v1.Health",
    }


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/radixkv.v1.CacheService/Stats", b""),
        ("/radixkv.v1.PrefillService/Probe", b"\x0a\x04\x01\x00\x00\x00"),
        ("/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest().SerializeToString()),
    ],
)
def test_methods_with_and_without_a_line_are_served(path, message):
    async def run():
        async with serving(FakeEngine()) as (_, address), grpc.aio.insecure_channel(address) as channel:
            return await asyncio.wait_for(channel.unary_unary(path)(message), PATIENCE_S)

    assert asyncio.run(run())
