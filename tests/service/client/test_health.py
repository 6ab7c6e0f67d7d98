"""The client's health check, against messages of the package that it does without."""

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2

from radixkv.service.client import Client
from radixkv.service.client.errors import ConnectError
from radixkv.service.client.health import ServingStatus, health_check
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serve_and_call


def test_statuses_are_those_of_the_protocol() -> None:
    assert {each.name: each.value for each in ServingStatus} == dict(
        health_pb2.HealthCheckResponse.ServingStatus.items()
    )


def test_a_request_is_that_of_the_protocol() -> None:
    request = StringValue(value="a.B").SerializeToString()
    assert health_pb2.HealthCheckRequest.FromString(request).service == "a.B"


def test_a_server_is_serving_and_an_unknown_service_is_not_found() -> None:
    def check(address: str) -> tuple[ServingStatus, grpc.StatusCode]:
        with grpc.insecure_channel(address) as channel:
            call = health_check(channel)
            unknown = call.future(StringValue(value="a.B"), timeout=PATIENCE_S)
            return call(StringValue(), timeout=PATIENCE_S), unknown.code()

    assert serve_and_call(FakeEngine(), check) == (ServingStatus.SERVING, grpc.StatusCode.NOT_FOUND)


def test_a_client_without_a_server_says_which_call_was_not_answered() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(ConnectError) as caught:
        client.health(timeout_s=PATIENCE_S)
    assert caught.value.call == "Check"
