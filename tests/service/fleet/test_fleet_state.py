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


def snapshot_of(namespace: Namespace, cached_tokens: bytes) -> events_pb2.EventBatch:
    """Return the only message of a snapshot in which a replica has cached these tokens."""
    root = Identities("", SECRETS.events_key).of(namespace).root
    hashes = np.frombuffer(hash_blocks(root, cached_tokens, 16), "<u8").tolist()
    stored = events_pb2.BlocksStored(block_hashes=hashes, block_size=4)
    message = events_pb2.EventBatch(sequence_number=9, events=[events_pb2.CacheEvent(stored=stored)])
    message.snapshot.count = 1
    return message


class FakeFleet:
    """The state of a fleet of fake replicas, and their connections by name.

    The clock stands still until a test sets `now_s`.
    """

    def __init__(self, *names: str) -> None:
        self.connections: dict[str, FakeConnection] = {}
        self.now_s = 0.0
        self.state = FleetState(self.connect, weights=RoutingWeights(least_match_tokens=8), clock=lambda: self.now_s)
        self.state.update([facts(name) for name in names])

    def connect(self, replica_facts):
        connection = self.connections[replica_facts.address] = FakeConnection(replica_facts)
        return connection


def test_a_prompt_is_routed_to_its_prefix_unless_the_queue_is_too_long() -> None:
    async def test() -> None:
        fleet = FakeFleet("a", "b")
        first = fleet.state.route(RoutingRequest(tokens(0), "acme"))
        again = fleet.state.route(RoutingRequest(tokens(0), "acme"))
        assert (first.reason, again.reason) == (RoutingReason.LOAD, RoutingReason.PREFIX)
        assert (again.name, again.route.hits.total) == (first.name, 40)
        assert (again.num_replicas, first.connection) == (2, fleet.connections[first.name])
        other = fleet.state.route(RoutingRequest(tokens(0), "acme", avoid={first.name}))
        assert (other.name != first.name, other.reason, other.num_replicas) == (True, RoutingReason.LOAD, 1)

        # The first replica gets a long queue, so a prompt whose prefix both replicas have is routed to the other one.
        for start in range(20):
            fleet.state.route(RoutingRequest(tokens(10_000 * (start + 1), 1000), "acme", avoid={other.name}))
        shorter_queue = fleet.state.route(RoutingRequest(tokens(0, 61), "acme", avoid=set()))
        assert (shorter_queue.name, shorter_queue.reason) == (other.name, RoutingReason.PREFIX)
        assert shorter_queue.route.hits.total == 40

        # A prefix that only the first replica has is not worth waiting for either.
        only_first = fleet.state.route(RoutingRequest(tokens(500_000), "acme", avoid={other.name}))
        away = fleet.state.route(RoutingRequest(tokens(500_000), "acme"))
        assert (only_first.name, away.name, away.reason, away.route.max_hit_tokens) == (
            first.name,
            other.name,
            RoutingReason.AWAY,
            40,
        )
        await fleet.state.close()

    run(test)


def test_named_tenants_are_found_by_the_fleets_key() -> None:
    async def test() -> None:
        fleet = FakeFleet("a", "b")
        fleet.connections["b"].batches.put_nowait(snapshot_of(Namespace("fingerprint", "acme"), tokens(0, 40)))
        assert await becomes_true(fleet.connections["b"].batches.empty)
        routed = fleet.state.route(RoutingRequest(tokens(0), "acme"))
        assert (routed.name, routed.route.hits.total, routed.reason) == ("b", 40, RoutingReason.PREFIX)
        assert fleet.state.route(RoutingRequest(tokens(0), "other")).route.hits.total == 0
        await fleet.state.close()

    run(test)


def test_prefixes_are_found_after_all_replicas_were_replaced_by_those_of_another_model() -> None:
    async def test() -> None:
        fleet = FakeFleet("a", "b")
        fleet.state.update([facts("b"), facts("c", fingerprint="new"), facts("d", fingerprint="new")])
        fleet.state.update([facts("c", fingerprint="new"), facts("d", fingerprint="new")])
        fleet.connections["d"].batches.put_nowait(snapshot_of(Namespace("new", "acme"), tokens(0, 40)))
        assert await becomes_true(fleet.connections["d"].batches.empty)
        routed = fleet.state.route(RoutingRequest(tokens(0), "acme"))
        assert (routed.name, routed.route.hits.total, routed.reason) == ("d", 40, RoutingReason.PREFIX)
        await fleet.state.close()

    run(test)


def test_while_the_model_changes_prefixes_are_found_in_the_model_of_most_replicas_that_are_up() -> None:
    async def test() -> None:
        fleet = FakeFleet("a", "b")
        fleet.state.update([facts("a"), facts("b"), facts("c", fingerprint="new")])
        fleet.connections["b"].batches.put_nowait(snapshot_of(Namespace("fingerprint", "acme"), tokens(0, 40)))
        fleet.connections["c"].batches.put_nowait(snapshot_of(Namespace("new", "acme"), tokens(0, 40)))
        assert await becomes_true(lambda: all(fleet.connections[name].batches.empty() for name in ("b", "c")))
        assert fleet.state.route(RoutingRequest(tokens(0), "acme")).name == "b"
        for name in ("a", "b"):
            fleet.connections[name].is_up = False
        routed = fleet.state.route(RoutingRequest(tokens(0), "acme"))
        assert (routed.name, routed.route.hits.total, routed.reason) == ("c", 40, RoutingReason.PREFIX)
        await fleet.state.close()

    run(test)


def test_a_replica_that_is_not_up_gets_requests_only_if_it_is_the_last() -> None:
    async def test() -> None:
        fleet = FakeFleet("a", "b")
        home = fleet.state.route(RoutingRequest(tokens(0))).name
        (other,) = {"a", "b"} - {home}
        fleet.connections[home].is_up = False
        assert fleet.state.route(RoutingRequest(tokens(0))).name == other
        fleet.connections[other].is_up = False
        assert fleet.state.route(RoutingRequest(tokens(0), avoid={other})).name == home
        await fleet.state.close()

    run(test)


def test_replicas_join_and_leave() -> None:
    async def test() -> None:
        fleet = FakeFleet("a", "b")
        before = dict(fleet.connections)
        fleet.state.update([facts("a", epoch=2), facts("b"), facts("c")])
        assert sorted(fleet.state.addresses) == ["a", "b", "c"]
        assert fleet.connections["b"] is before["b"]
        assert fleet.connections["a"] is not before["a"]
        assert await becomes_true(lambda: before["a"].is_closed)
        fleet.state.update([])
        with pytest.raises(NoReplica):
            fleet.state.route(RoutingRequest(tokens(0)))
        await fleet.state.close()
        assert all(connection.is_closed for connection in fleet.connections.values())

    run(test)


def test_calls_to_a_replica_that_leaves_continue() -> None:
    async def test() -> None:
        fleet = FakeFleet("a", "b")
        fleet.connections["a"].num_calls = 1
        fleet.state.update([facts("b")])
        assert fleet.state.addresses == ("b",)
        fleet.state.update([])
        assert await becomes_true(lambda: fleet.connections["b"].is_closed)
        assert not fleet.connections["a"].is_closed
        fleet.connections["a"].num_calls = 0
        assert await becomes_true(lambda: fleet.connections["a"].is_closed)

    run(test)


def test_routing_without_replicas_or_tokens_is_refused() -> None:
    async def test() -> None:
        with pytest.raises(NoReplica):
            FleetState().route(RoutingRequest(tokens(0)))
        fleet = FakeFleet("a")
        with pytest.raises(NoReplica):
            fleet.state.route(RoutingRequest(tokens(0), avoid={"a"}))
        with pytest.raises(InvalidRequest):
            fleet.state.route(RoutingRequest(b""))
        await fleet.state.close()

    run(test)


def test_a_slow_replica_gets_fewer_requests() -> None:
    async def test() -> None:
        fleet = FakeFleet("a", "b")
        for start in range(8):
            routed = fleet.state.route(RoutingRequest(tokens(1000 * start, 200)))
            fleet.now_s += 0.2 if routed.name == "a" else 0.002
            routed.finish(200)
            fleet.now_s += 1.0
            routed.finish(None)  # the end of the answer, after its first part
        names = [fleet.state.route(RoutingRequest(tokens(100_000 + 1000 * start, 200))).name for start in range(4)]
        assert names == ["b"] * 4
        await fleet.state.close()

    run(test)


def test_a_tenant_waits_only_for_its_share() -> None:
    async def test() -> None:
        fleet = FakeFleet("a")
        for start in range(10):
            fleet.state.route(RoutingRequest(tokens(1000 * start, 101), "flood"))
        assert fleet.state.route(RoutingRequest(tokens(0, 101), "light")).route.queue_tokens == 101
        assert fleet.state.route(RoutingRequest(tokens(50_000, 101), "flood")).route.queue_tokens == 10 * 101 + 101
        await fleet.state.close()

    run(test)


def test_the_source_of_kv_is_chosen_only_if_it_is_the_last() -> None:
    async def test() -> None:
        fleet = FakeFleet("a", "b")
        home = fleet.state.route(RoutingRequest(tokens(0))).name
        (other,) = {"a", "b"} - {home}
        assert fleet.state.route(RoutingRequest(tokens(0), source=home)).name == other
        assert fleet.state.route(RoutingRequest(tokens(0), source=home, avoid={other})).name == home
        with pytest.raises(UnknownLease, match=r"kv_source\.address: it is not the address of a replica"):
            fleet.state.route(RoutingRequest(tokens(0), source="c"))
        await fleet.state.close()

    run(test)
