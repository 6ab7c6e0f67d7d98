from __future__ import annotations

import asyncio

import numpy as np
import pytest

from radixkv.errors import InvalidRequest, NoReplica, UnknownLease
from radixkv.events.block_identity import Identities, hash_blocks
from radixkv.namespace import Namespace
from radixkv.routing.rule import Rule
from radixkv.service.cluster.picture import Picture
from radixkv.service.cluster.question import Question, Reason
from radixkv.v1 import events_pb2
from tests.patience import PATIENCE_S
from tests.service.cluster.fake_line import SECRETS, FakeLine, facts
from tests.service.serving import becomes_true


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def tokens(first: int, count: int = 41) -> bytes:
    return np.arange(first, first + count, dtype="<u4").tobytes()


class Seen:
    """A picture of fake replicas."""

    def __init__(self, *names: str, least: int = 8) -> None:
        self.lines: dict[str, FakeLine] = {}
        self.now_s = 0.0
        self.picture = Picture(self.connect, rule=Rule(least_match_tokens=least), clock=lambda: self.now_s)
        self.picture.update([facts(name) for name in names])

    def connect(self, about):
        line = self.lines[about.address] = FakeLine(about)
        return line


def test_a_prefix_is_followed_and_the_reason_told() -> None:
    async def test() -> None:
        seen = Seen("a", "b")
        first = seen.picture.route(Question(tokens(0), "acme"))
        again = seen.picture.route(Question(tokens(0), "acme"))
        assert (first.reason, again.reason) == (Reason.LOAD, Reason.PREFIX)
        assert (again.name, again.route.hits.total) == (first.name, 40)
        assert (again.num_replicas, first.line) == (2, seen.lines[first.name])
        other = seen.picture.route(Question(tokens(0), "acme", avoid={first.name}))
        assert (other.name != first.name, other.reason, other.num_replicas) == (True, Reason.LOAD, 1)
        for start in range(20):
            seen.picture.route(Question(tokens(10_000 * (start + 1), 1000), "acme", avoid={other.name}))
        away = seen.picture.route(Question(tokens(0, 61), "acme", avoid=set()))
        assert (away.name, away.reason, away.route.hits.total) == (other.name, Reason.PREFIX, 40)
        fresh = seen.picture.route(Question(tokens(500_000), "acme", avoid={other.name}))
        away = seen.picture.route(Question(tokens(500_000), "acme"))
        assert (fresh.name, away.name, away.reason, away.route.most_tokens) == (first.name, other.name, Reason.AWAY, 40)
        await seen.picture.close()

    run(test)


def test_named_tenants_are_found_by_the_fleets_key() -> None:
    async def test() -> None:
        seen = Seen("a", "b")
        root = Identities("", SECRETS.events_key).of(Namespace("fingerprint", "acme")).root
        hashes = np.frombuffer(hash_blocks(root, tokens(0, 40), 16), "<u8").tolist()
        stored = events_pb2.BlocksStored(block_hashes=hashes, block_size=4)
        message = events_pb2.EventBatch(sequence_number=9, events=[events_pb2.CacheEvent(stored=stored)])
        message.snapshot.count = 1
        seen.lines["b"].batches.put_nowait(message)
        assert await becomes_true(lambda: seen.picture.is_in_step("b"))
        assert not seen.picture.is_in_step("a")
        routed = seen.picture.route(Question(tokens(0), "acme"))
        assert (routed.name, routed.route.hits.total, routed.reason) == ("b", 40, Reason.PREFIX)
        assert seen.picture.route(Question(tokens(0), "other")).route.hits.total == 0
        await seen.picture.close()

    run(test)


def test_a_silent_replica_gets_nothing_unless_it_is_the_last() -> None:
    async def test() -> None:
        seen = Seen("a", "b")
        home = seen.picture.route(Question(tokens(0))).name
        (other,) = {"a", "b"} - {home}
        seen.lines[home].is_up = False
        assert seen.picture.route(Question(tokens(0))).name == other
        seen.lines[other].is_up = False
        assert seen.picture.route(Question(tokens(0), avoid={other})).name == home
        await seen.picture.close()

    run(test)


def test_replicas_come_and_go() -> None:
    async def test() -> None:
        seen = Seen("a", "b")
        before = dict(seen.lines)
        seen.picture.update([facts("a", epoch=2), facts("b"), facts("c")])
        assert sorted(seen.picture.names) == ["a", "b", "c"]
        assert seen.lines["b"] is before["b"]
        assert seen.lines["a"] is not before["a"]
        assert await becomes_true(lambda: before["a"].is_closed)
        seen.picture.update([])
        with pytest.raises(NoReplica):
            seen.picture.route(Question(tokens(0)))
        await seen.picture.close()
        assert all(line.is_closed for line in seen.lines.values())

    run(test)


def test_calls_to_a_replica_that_leaves_go_on() -> None:
    async def test() -> None:
        seen = Seen("a", "b")
        seen.lines["a"].num_calls = 1
        seen.picture.update([facts("b")])
        assert seen.picture.names == ("b",)
        seen.picture.update([])
        assert await becomes_true(lambda: seen.lines["b"].is_closed)
        assert not seen.lines["a"].is_closed
        seen.lines["a"].num_calls = 0
        assert await becomes_true(lambda: seen.lines["a"].is_closed)

    run(test)


def test_nobody_is_routed_without_replicas_or_tokens() -> None:
    async def test() -> None:
        with pytest.raises(NoReplica):
            Picture().route(Question(tokens(0)))
        seen = Seen("a")
        with pytest.raises(NoReplica):
            seen.picture.route(Question(tokens(0), avoid={"a"}))
        with pytest.raises(InvalidRequest):
            seen.picture.route(Question(b""))
        await seen.picture.close()

    run(test)


def test_a_slow_replica_gets_less() -> None:
    async def test() -> None:
        seen = Seen("a", "b")
        for start in range(8):
            routed = seen.picture.route(Question(tokens(1000 * start, 200)))
            seen.now_s += 0.2 if routed.name == "a" else 0.002
            routed.finish(200)
            seen.now_s += 1.0
            routed.finish(None)  # the end of the answer, after its first part
        names = [seen.picture.route(Question(tokens(100_000 + 1000 * start, 200))).name for start in range(4)]
        assert names == ["b"] * 4
        await seen.picture.close()

    run(test)


def test_a_tenant_waits_for_its_share_alone() -> None:
    async def test() -> None:
        seen = Seen("a")
        for start in range(10):
            seen.picture.route(Question(tokens(1000 * start, 101), "flood"))
        assert seen.picture.route(Question(tokens(0, 101), "light")).route.queue_tokens == 101
        assert seen.picture.route(Question(tokens(50_000, 101), "flood")).route.queue_tokens == 10 * 101 + 101
        await seen.picture.close()

    run(test)


def test_what_one_computed_another_one_decodes() -> None:
    async def test() -> None:
        seen = Seen("a", "b")
        home = seen.picture.route(Question(tokens(0))).name
        (other,) = {"a", "b"} - {home}
        assert seen.picture.route(Question(tokens(0), source=home)).name == other
        assert seen.picture.route(Question(tokens(0), source=home, avoid={other})).name == home
        with pytest.raises(UnknownLease, match=r"kv_source\.address: expected that of a replica"):
            seen.picture.route(Question(tokens(0), source="c"))
        await seen.picture.close()

    run(test)
