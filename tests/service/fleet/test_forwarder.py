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
    """Replicas that are chosen in order, and a clock that advances when a caller sleeps.

    Attributes:
        answers: the answer of each replica: a value, an exception, or a list of both for a stream.
        called: the replicas that were called, in order.
        finished: the replicas whose answer was reported to the router, in order.
    """

    def __init__(self, **answers) -> None:
        self.answers = answers
        self.connections = {name: FakeConnection(facts(name)) for name in answers}
        self.called: list[str] = []
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

    async def call(self, connection):
        self.called.append(connection.facts.address)
        answer = self.answers[connection.facts.address]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stream(self, connection):
        self.called.append(connection.facts.address)
        return FakeCall(self.answers[connection.facts.address])

    async def read_stream(self):
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


def forward(fleet: Fleet):
    """Return the name of the replica that answered a call, and its answer."""
    routed, answer = asyncio.run(fleet.forwarder.call(RoutingRequest(b"1234"), fleet.call))
    return routed.name, answer


def test_a_call_is_retried_on_another_replica_if_one_is_lost() -> None:
    fleet = Fleet(a=LOST, b="yes")
    assert forward(fleet) == ("b", "yes")
    assert (fleet.called, fleet.finished) == (["a", "b"], ["a"])
    assert [connection.num_calls for connection in fleet.connections.values()] == [0, 0]
    assert fleet.connections["a"].num_checks == 1


def test_a_call_is_retried_if_a_replica_fails_health_checks() -> None:
    fleet = Fleet(a="never called", b="yes")
    fleet.connections["a"].is_lost = True
    assert forward(fleet) == ("b", "yes")


def test_a_refusal_of_a_replica_is_returned_at_once() -> None:
    fleet = Fleet(a=failure(grpc.StatusCode.INVALID_ARGUMENT, "token_ids: ..."), b="yes")
    with pytest.raises(ReplicaRefusal) as refusal:
        forward(fleet)
    assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (refusal.value.details, refusal.value.trailing) == ("token_ids: ...", (("a", "b"),))
    assert (fleet.called, fleet.finished) == (["a"], ["a"])


def test_a_call_whose_kv_cannot_be_fetched_is_not_retried() -> None:
    fleet = Fleet(a=failure(grpc.StatusCode.UNAVAILABLE, "in any words", Cause.KV_SOURCE), b="yes")
    with pytest.raises(ReplicaRefusal, match="in any words") as refusal:
        forward(fleet)
    assert (fleet.called, fleet.connections["a"].num_checks) == (["a"], 0)
    assert (refusal.value.is_of(Cause.KV_SOURCE), refusal.value.is_of(Cause.HOLD_LEASE)) == (True, False)


def test_a_call_waits_for_a_replica_that_restarts() -> None:
    fleet = Fleet(a=LOST)

    async def sleep(seconds) -> None:
        fleet.now_s += seconds
        if fleet.now_s > 3:
            fleet.answers["b"] = "yes"
            fleet.connections["b"] = FakeConnection(facts("b"))

    fleet.forwarder = Forwarder(fleet.choose, 5.0, sleep, lambda: fleet.now_s)
    assert forward(fleet) == ("b", "yes")


def test_the_last_failure_is_returned_if_there_is_no_replica() -> None:
    with pytest.raises(ReplicaRefusal, match="connection refused"):
        forward(Fleet(a=LOST))
    with pytest.raises(NoReplica):
        forward(Fleet())


def test_a_stream_without_responses_is_retried_on_another_replica() -> None:
    fleet = Fleet(a=[LOST], b=["one", "two"])
    assert asyncio.run(fleet.read_stream()) == [("b", "one"), ("b", "two")]


def test_a_stream_that_has_begun_ends_with_its_replica() -> None:
    fleet = Fleet(a=["one", LOST], b=["one", "two"])
    with pytest.raises(ReplicaRefusal, match="it was lost in the middle of the response") as refusal:
        asyncio.run(fleet.read_stream())
    assert refusal.value.code is grpc.StatusCode.UNAVAILABLE
    assert fleet.called == ["a"]
    assert "a" in fleet.finished


def test_a_client_that_cancels_ends_the_call() -> None:
    fleet = Fleet(a=["one", "two"])
    calls = []

    def stream(connection):
        calls.append(fleet.stream(connection))
        return calls[-1]

    async def cancel_after_first_part() -> None:
        parts = fleet.forwarder.stream(RoutingRequest(b"1234"), stream)
        await anext(parts)
        await parts.aclose()

    asyncio.run(cancel_after_first_part())
    assert calls[0].is_cancelled
    assert (fleet.finished, fleet.connections["a"].num_calls) == (["a"], 0)
