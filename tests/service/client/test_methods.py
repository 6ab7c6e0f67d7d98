"""The table of methods agrees with the .proto files, and the health check with gRPC's own package."""

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2

from radixkv.service.client import Client
from radixkv.service.client.errors import ConnectError
from radixkv.service.client.methods import HEALTH_CHECK, METHODS, ServingStatus
from radixkv.v1 import cache_pb2, events_pb2, fleet_pb2, model_pb2, prefill_pb2
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serve_and_call


def test_the_table_has_every_method_of_the_protos_with_its_messages() -> None:
    files = (prefill_pb2, cache_pb2, model_pb2, events_pb2, fleet_pb2)
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    declared = {
        (service.full_name, method.name): (method.input_type.name, method.output_type.name, method.server_streaming)
        for service in services
        for method in service.methods
    }
    in_table = {
        (method.service, method.name): (
            method.request.DESCRIPTOR.name,
            method.response.DESCRIPTOR.name,
            method.is_streaming,
        )
        for method in METHODS
        if method is not HEALTH_CHECK
    }
    assert in_table == declared
    assert len(METHODS) == len(in_table) + 1


def test_only_idempotent_calls_are_retried() -> None:
    assert {method.name for method in METHODS if not method.is_idempotent} == {
        "Release",
        "FetchKV",
        "Hint",
        "EndSession",
        "Purge",
        "LoadAdapter",
        "UnloadAdapter",
        "RegisterPublicPrefix",
        "UnregisterPublicPrefix",
        "Drain",
        "Subscribe",
        "Route",
        "Check",
    }


def test_health_statuses_are_those_of_the_protocol() -> None:
    assert {each.name: each.value for each in ServingStatus} == dict(
        health_pb2.HealthCheckResponse.ServingStatus.items()
    )


def test_a_health_request_is_that_of_the_protocol() -> None:
    request = StringValue(value="a.B").SerializeToString()
    assert health_pb2.HealthCheckRequest.FromString(request).service == "a.B"


def test_a_server_is_serving_and_an_unknown_service_is_not_found() -> None:
    def check(address: str) -> tuple[ServingStatus, grpc.StatusCode]:
        with grpc.insecure_channel(address) as channel:
            call = HEALTH_CHECK.bind(channel)
            unknown = call.future(StringValue(value="a.B"), timeout=PATIENCE_S)
            return ServingStatus(call(StringValue(), timeout=PATIENCE_S).value), unknown.code()

    assert serve_and_call(FakeEngine(), check) == (ServingStatus.SERVING, grpc.StatusCode.NOT_FOUND)


def test_a_client_without_a_server_says_which_call_was_not_answered() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(ConnectError) as caught:
        client.health(timeout_s=PATIENCE_S)
    assert caught.value.call == "Check"
