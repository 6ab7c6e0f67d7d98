"""The health service: its states, and watchers that read nothing block no other caller."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.hostile.attacks.frames import DATA, END_HEADERS, END_STREAM, HEADERS, RawConnection, frame, header_block
from radixkv.service.server.server import SERVICES
from radixkv.service.server.servicers.health import HealthListRequest, HealthListResponse, HealthServicer
from radixkv.service.server.servicers.health_status import HealthStatus
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Aborted(Exception):
    pass


class FakeContext:
    """Like a context of gRPC, raises an exception that ends the handler when a call is aborted."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Aborted(code)


def check_request(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


def test_each_service_and_the_server_have_the_status_that_was_set() -> None:
    async def run() -> list[int]:
        health, context = HealthStatus(), cast("Any", FakeContext())
        servicer = HealthServicer(health)
        statuses = []
        for is_serving in (True, False):
            health.set(["a.B"], is_serving=is_serving)
            for name in ("", "a.B"):
                statuses.append((await servicer.Check(check_request(name), context)).status)
        with pytest.raises(Aborted, match="NOT_FOUND"):
            await servicer.Check(check_request("a.C"), context)
        return statuses

    assert asyncio.run(run()) == [SERVING, SERVING, NOT_SERVING, NOT_SERVING]


def test_watchers_are_notified_of_changes_also_after_others_have_left() -> None:
    async def run() -> list[int]:
        health, context = HealthStatus(), cast("Any", FakeContext())
        servicer = HealthServicer(health)
        health.set(["a.B"], is_serving=True)
        watch, other, unknown = (servicer.Watch(check_request(name), context) for name in ("a.B", "a.B", "a.C"))
        statuses = [(await anext(watch)).status, (await anext(other)).status, (await anext(unknown)).status]
        await other.aclose()
        health.set(["a.B"], is_serving=True)  # no change
        health.set(["a.B"], is_serving=False)
        statuses.append((await anext(watch)).status)
        health.set(["a.B", "a.C"], is_serving=True)
        return [*statuses, (await anext(watch)).status, (await anext(unknown)).status]

    assert asyncio.run(run()) == [SERVING, SERVING, UNKNOWN, NOT_SERVING, SERVING, SERVING]


def test_a_stopped_server_does_not_become_healthy_again() -> None:
    async def run() -> int:
        health = HealthStatus()
        health.set(["a.B"], is_serving=True)
        health.enter_graceful_shutdown()
        health.set(["a.B"], is_serving=True)
        return (await HealthServicer(health).Check(check_request("a.B"), cast("Any", FakeContext()))).status

    assert asyncio.run(run()) == NOT_SERVING


def test_a_list_has_the_status_of_the_server_and_of_every_service() -> None:
    async def run() -> list[bytes]:
        async with serving(FakeEngine()) as (server, address), grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary("/grpc.health.v1.Health/List")
            before: bytes = await call(HealthListRequest().SerializeToString(), timeout=PATIENCE_S)
            server._health.enter_graceful_shutdown()
            return [before, await call(b"", timeout=PATIENCE_S)]

    for answer, status in zip(asyncio.run(run()), (SERVING, NOT_SERVING), strict=True):
        statuses = HealthListResponse.FromString(answer).statuses
        assert {name: each.status for name, each in statuses.items()} == dict.fromkeys(("", *SERVICES), status)


def test_the_bytes_of_a_list_are_those_of_the_protocol() -> None:
    """Field 1, a map: its keys are field 1, its values field 2, with the status as field 1."""
    message = HealthListResponse(statuses={"a": health_pb2.HealthCheckResponse(status=SERVING)})
    assert message.SerializeToString() == b"\x0a\x07" + b"\x0a\x01a" + b"\x12\x02\x08\x01"


def test_watchers_that_read_nothing_do_not_keep_a_server_from_draining() -> None:
    async def run() -> None:
        async with serving(FakeEngine()) as (server, address):
            not_reading = await RawConnection.open(address)  # its flow-control window has no bytes for responses
            for stream in range(1, 41, 2):
                not_reading.write(frame(HEADERS, END_HEADERS, stream, header_block("/grpc.health.v1.Health/Watch")))
                not_reading.write(frame(DATA, END_STREAM, stream, bytes(5)))  # the prefix of an empty message
            async with grpc.aio.insecure_channel(address) as channel:
                watch = health_pb2_grpc.HealthStub(channel).Watch(check_request(""))
                assert (await watch.read()).status == SERVING
                await asyncio.wait_for(server.drain(), PATIENCE_S)
            not_reading.close()

    asyncio.run(run())
