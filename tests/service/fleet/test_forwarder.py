from __future__ import annotations

import asyncio
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest

from radixkv.errors import Cause, NoReplica
from radixkv.service.fleet.forwarder import Forwarder, ReplicaRefusal
from radixkv.service.fleet.routing_request import RoutingRequest
from tests.service.fleet.fake_connection import FakeConnection, facts, failure

LOST = failure(grpc.StatusCode.UNAVAILABLE, "connection refused")


class Fleet:
    """Replicas that are chosen in order, and a clock that advances when a caller sleeps."""

    def __init__(self, **answers) -> None:
        self.answers = answers
        self.connections = {name: FakeConnection(facts(name)) for name in answers}
        self.asked: list[str] = []
        self.finished: list[str] = []
        self.now_s = 0.0
        self.forwarder = Forwarder(self.choose, 5.0, self.sleep, lambda: self.now_s)

    async def choose(self, prompt):
        for name, connection in self.connections.items():
            if name not in prompt.avoid:
                return SimpleNamespace(
                    name=name, connection=connection, finish=lambda *_, name=name: self.finished.append(name)
                )
        raise NoReplica("replicas: none is available")

    async def sleep(self, seconds) -> None:
        self.now_s += seconds

    async def ask(self, connection):
        self.asked.append(connection.facts.address)
        answer = self.answers[connection.facts.address]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stream(self, connection):
        self.asked.append(connection.facts.address)
        return FakeCall(self.answers[connection.facts.address])

    async def parts(self):
        parts = []
        async for routed, part in self.forwarder.stream(RoutingRequest(b"1234"), self.stream):
            parts.append((routed.name, part))
        return parts


class FakeCall:
    """A streaming call that reads from a list."""

    def __init__(self, parts) -> None:
        self.parts = list(parts)
        self.is_cancelled = False

    async def read(self):
        part = self.parts.pop(0) if self.parts else grpc.aio.EOF
        if isinstance(part, Exception):
            raise part
        return part

    def cancel(self) -> None:
        self.is_cancelled = True


def answered(fleet: Fleet):
    routed, answer = asyncio.run(fleet.forwarder.call(RoutingRequest(b"1234"), fleet.ask))
    return routed.name, answer


def test_a_call_is_retried_on_another_replica_if_one_is_lost() -> None:
    fleet = Fleet(a=LOST, b="yes")
    assert answered(fleet) == ("b", "yes")
    assert (fleet.asked, fleet.finished) == (["a", "b"], ["a"])
    assert [connection.num_calls for connection in fleet.connections.values()] == [0, 0]
    assert fleet.connections["a"].num_looks == 1


def test_a_call_is_retried_if_a_replica_fails_health_checks() -> None:
    fleet = Fleet(a="never called", b="yes")
    fleet.connections["a"].is_lost = True
    assert answered(fleet) == ("b", "yes")


def test_a_refusal_of_a_replica_is_returned_at_once() -> None:
    fleet = Fleet(a=failure(grpc.StatusCode.INVALID_ARGUMENT, "token_ids: ..."), b="yes")
    with pytest.raises(ReplicaRefusal) as refusal:
        answered(fleet)
    assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (refusal.value.details, refusal.value.trailing) == ("token_ids: ...", (("a", "b"),))
    assert (fleet.asked, fleet.finished) == (["a"], ["a"])


def test_a_call_whose_kv_cannot_be_fetched_is_not_retried() -> None:
    fleet = Fleet(a=failure(grpc.StatusCode.UNAVAILABLE, "in any words", Cause.KV_SOURCE), b="yes")
    with pytest.raises(ReplicaRefusal, match="in any words") as refusal:
        answered(fleet)
    assert (fleet.asked, fleet.connections["a"].num_looks) == (["a"], 0)
    assert (refusal.value.is_of(Cause.KV_SOURCE), refusal.value.is_of(Cause.HOLD_LEASE)) == (True, False)


def test_a_call_waits_for_a_replica_that_restarts() -> None:
    fleet = Fleet(a=LOST)

    async def sleep(seconds) -> None:
        fleet.now_s += seconds
        if fleet.now_s > 3:
            fleet.answers["b"] = "yes"
            fleet.connections["b"] = FakeConnection(facts("b"))

    fleet.forwarder = Forwarder(fleet.choose, 5.0, sleep, lambda: fleet.now_s)
    assert answered(fleet) == ("b", "yes")


def test_the_last_failure_is_returned_if_there_is_no_replica() -> None:
    with pytest.raises(ReplicaRefusal, match="connection refused"):
        answered(Fleet(a=LOST))
    with pytest.raises(NoReplica):
        answered(Fleet())


def test_a_stream_without_responses_is_retried_on_another_replica() -> None:
    fleet = Fleet(a=[LOST], b=["one", "two"])
    assert asyncio.run(fleet.parts()) == [("b", "one"), ("b", "two")]


def test_a_stream_that_has_begun_ends_with_its_replica() -> None:
    fleet = Fleet(a=["one", LOST], b=["one", "two"])
    with pytest.raises(ReplicaRefusal, match="it was lost in the middle of the response") as refusal:
        asyncio.run(fleet.parts())
    assert refusal.value.code is grpc.StatusCode.UNAVAILABLE
    assert fleet.asked == ["a"]
    assert "a" in fleet.finished


def test_a_client_that_cancels_ends_the_call() -> None:
    fleet = Fleet(a=["one", "two"])
    calls = []

    def ask(connection):
        calls.append(fleet.stream(connection))
        return calls[-1]

    async def leave() -> None:
        parts = fleet.forwarder.stream(RoutingRequest(b"1234"), ask)
        await anext(parts)
        await parts.aclose()

    asyncio.run(leave())
    assert calls[0].is_cancelled
    assert (fleet.finished, fleet.connections["a"].num_calls) == (["a"], 0)
