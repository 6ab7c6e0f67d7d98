from __future__ import annotations

import asyncio

import numpy as np
import pytest

from radixkv.errors import InvalidRequest, NoReplica, UnknownLease
from radixkv.events.block_identity import Identities, hash_blocks
from radixkv.namespace import Namespace
from radixkv.routing.policies import RoutingWeights
from radixkv.service.fleet.fleet_state import FleetState
from radixkv.service.fleet.routing_request import RoutingReason, RoutingRequest
from radixkv.v1 import events_pb2
from tests.patience import PATIENCE_S
from tests.service.fleet.fake_connection import SECRETS, FakeConnection, facts
from tests.service.serving import becomes_true


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def tokens(first: int, count: int = 41) -> bytes:
    return np.arange(first, first + count, dtype="<u4").tobytes()


class Seen:
    """The state of a fleet of fake replicas."""

    def __init__(self, *names: str, least: int = 8) -> None:
        self.connections: dict[str, FakeConnection] = {}
        self.now_s = 0.0
        self.state = FleetState(
            self.connect, weights=RoutingWeights(least_match_tokens=least), clock=lambda: self.now_s
        )
        self.state.update([facts(name) for name in names])

    def connect(self, about):
        connection = self.connections[about.address] = FakeConnection(about)
        return connection


def test_a_prompt_is_routed_to_its_prefix_with_the_reason() -> None:
    async def test() -> None:
        seen = Seen("a", "b")
        first = seen.state.route(RoutingRequest(tokens(0), "acme"))
        again = seen.state.route(RoutingRequest(tokens(0), "acme"))
        assert (first.reason, again.reason) == (RoutingReason.LOAD, RoutingReason.PREFIX)
        assert (again.name, again.route.hits.total) == (first.name, 40)
        assert (again.num_replicas, first.connection) == (2, seen.connections[first.name])
        other = seen.state.route(RoutingRequest(tokens(0), "acme", avoid={first.name}))
        assert (other.name != first.name, other.reason, other.num_replicas) == (True, RoutingReason.LOAD, 1)
        for start in range(20):
            seen.state.route(RoutingRequest(tokens(10_000 * (start + 1), 1000), "acme", avoid={other.name}))
        away = seen.state.route(RoutingRequest(tokens(0, 61), "acme", avoid=set()))
        assert (away.name, away.reason, away.route.hits.total) == (other.name, RoutingReason.PREFIX, 40)
        fresh = seen.state.route(RoutingRequest(tokens(500_000), "acme", avoid={other.name}))
        away = seen.state.route(RoutingRequest(tokens(500_000), "acme"))
        assert (fresh.name, away.name, away.reason, away.route.most_tokens) == (
            first.name,
            other.name,
            RoutingReason.AWAY,
            40,
        )
        await seen.state.close()

    run(test)


def test_named_tenants_are_found_by_the_fleets_key() -> None:
    async def test() -> None:
        seen = Seen("a", "b")
        root = Identities("", SECRETS.events_key).of(Namespace("fingerprint", "acme")).root
        hashes = np.frombuffer(hash_blocks(root, tokens(0, 40), 16), "<u8").tolist()
        stored = events_pb2.BlocksStored(block_hashes=hashes, block_size=4)
        message = events_pb2.EventBatch(sequence_number=9, events=[events_pb2.CacheEvent(stored=stored)])
        message.snapshot.count = 1
        seen.connections["b"].batches.put_nowait(message)
        assert await becomes_true(seen.connections["b"].batches.empty)
        routed = seen.state.route(RoutingRequest(tokens(0), "acme"))
        assert (routed.name, routed.route.hits.total, routed.reason) == ("b", 40, RoutingReason.PREFIX)
        assert seen.state.route(RoutingRequest(tokens(0), "other")).route.hits.total == 0
        await seen.state.close()

    run(test)


def test_a_replica_that_is_not_up_gets_requests_only_if_it_is_the_last() -> None:
    async def test() -> None:
        seen = Seen("a", "b")
        home = seen.state.route(RoutingRequest(tokens(0))).name
        (other,) = {"a", "b"} - {home}
        seen.connections[home].is_up = False
        assert seen.state.route(RoutingRequest(tokens(0))).name == other
        seen.connections[other].is_up = False
        assert seen.state.route(RoutingRequest(tokens(0), avoid={other})).name == home
        await seen.state.close()

    run(test)


def test_replicas_join_and_leave() -> None:
    async def test() -> None:
        seen = Seen("a", "b")
        before = dict(seen.connections)
        seen.state.update([facts("a", epoch=2), facts("b"), facts("c")])
        assert sorted(seen.state.addresses) == ["a", "b", "c"]
        assert seen.connections["b"] is before["b"]
        assert seen.connections["a"] is not before["a"]
        assert await becomes_true(lambda: before["a"].is_closed)
        seen.state.update([])
        with pytest.raises(NoReplica):
            seen.state.route(RoutingRequest(tokens(0)))
        await seen.state.close()
        assert all(connection.is_closed for connection in seen.connections.values())

    run(test)


def test_calls_to_a_replica_that_leaves_continue() -> None:
    async def test() -> None:
        seen = Seen("a", "b")
        seen.connections["a"].num_calls = 1
        seen.state.update([facts("b")])
        assert seen.state.addresses == ("b",)
        seen.state.update([])
        assert await becomes_true(lambda: seen.connections["b"].is_closed)
        assert not seen.connections["a"].is_closed
        seen.connections["a"].num_calls = 0
        assert await becomes_true(lambda: seen.connections["a"].is_closed)

    run(test)


def test_routing_without_replicas_or_tokens_is_refused() -> None:
    async def test() -> None:
        with pytest.raises(NoReplica):
            FleetState().route(RoutingRequest(tokens(0)))
        seen = Seen("a")
        with pytest.raises(NoReplica):
            seen.state.route(RoutingRequest(tokens(0), avoid={"a"}))
        with pytest.raises(InvalidRequest):
            seen.state.route(RoutingRequest(b""))
        await seen.state.close()

    run(test)


def test_a_slow_replica_gets_fewer_requests() -> None:
    async def test() -> None:
        seen = Seen("a", "b")
        for start in range(8):
            routed = seen.state.route(RoutingRequest(tokens(1000 * start, 200)))
            seen.now_s += 0.2 if routed.name == "a" else 0.002
            routed.finish(200)
            seen.now_s += 1.0
            routed.finish(None)  # the end of the answer, after its first part
        names = [seen.state.route(RoutingRequest(tokens(100_000 + 1000 * start, 200))).name for start in range(4)]
        assert names == ["b"] * 4
        await seen.state.close()

    run(test)


def test_a_tenant_waits_only_for_its_share() -> None:
    async def test() -> None:
        seen = Seen("a")
        for start in range(10):
            seen.state.route(RoutingRequest(tokens(1000 * start, 101), "flood"))
        assert seen.state.route(RoutingRequest(tokens(0, 101), "light")).route.queue_tokens == 101
        assert seen.state.route(RoutingRequest(tokens(50_000, 101), "flood")).route.queue_tokens == 10 * 101 + 101
        await seen.state.close()

    run(test)


def test_the_source_of_kv_is_chosen_only_if_it_is_the_last() -> None:
    async def test() -> None:
        seen = Seen("a", "b")
        home = seen.state.route(RoutingRequest(tokens(0))).name
        (other,) = {"a", "b"} - {home}
        assert seen.state.route(RoutingRequest(tokens(0), source=home)).name == other
        assert seen.state.route(RoutingRequest(tokens(0), source=home, avoid={other})).name == home
        with pytest.raises(UnknownLease, match=r"kv_source\.address: it is not the address of a replica"):
            seen.state.route(RoutingRequest(tokens(0), source="c"))
        await seen.state.close()

    run(test)
