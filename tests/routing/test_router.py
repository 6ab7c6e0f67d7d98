"""The router as a whole: where it sends prompts, between events and after them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from radixkv.api.events import AllCleared, BlocksStored, EventBatch, SnapshotPart
from radixkv.errors import InvalidRequest, NoReplica
from radixkv.events.block_identity import Identities
from radixkv.namespace import Namespace
from radixkv.routing.candidate import Hits, TokenTimes
from radixkv.routing.fleet_load import FleetLoad
from radixkv.routing.fleet_view import FleetView
from radixkv.routing.policies import ROUTINGS, make_routing
from radixkv.routing.prefix_demand import PrefixDemand
from radixkv.routing.prompt_blocks import PromptBlocks
from radixkv.routing.router import Route, Router

SIZE = 16  # tokens per block
COMPUTE_S = 1e-3  # per token
IDENTITIES = Identities("", bytes(range(32)))
BASE, SALTED = Namespace("m"), Namespace("m", salt="x")


class Fleet:
    """A router on a clock that the test moves, and replicas whose cached prompts the test sets."""

    def __init__(self, *names: str, routing: str = "prefix") -> None:
        self.now_s = 0.0
        times = TokenTimes(compute_s=COMPUTE_S)
        self.router = Router(
            FleetView(SIZE, clock=self.clock),
            FleetLoad(clock=self.clock),
            PrefixDemand(clock=self.clock),
            make_routing(routing),
            identities=IDENTITIES,
            times=lambda name: times,
        )
        for name in names:
            self.join(name)

    def clock(self) -> float:
        return self.now_s

    def join(self, name: str, *prompts: bytes, namespace: Namespace = BASE) -> None:
        """Add a replica that reports these prompts as cached."""
        self.router.join(name)
        events = []
        for each in prompts:
            hashes = PromptBlocks(namespace, each, SIZE, IDENTITIES).all()
            events.append(BlocksStored(None, np.array(hashes, "<u8").tobytes(), bytes(4 * SIZE), SIZE, ""))
        assert self.router.read(name, EventBatch(1, 0.0, (AllCleared(), *events), SnapshotPart(0, 1, 0)))

    def route(self, tokens: bytes, namespace: Namespace = BASE) -> Route:
        return self.router.route(namespace, tokens)


def prompt(prefix: int, own: int, prefix_tokens: int = 4096, own_tokens: int = 64) -> bytes:
    """Return a prompt: tokens with which all prompts of one prefix begin, and tokens of its own."""
    shared = np.arange(prefix_tokens, dtype="<u4") + 10_000 * prefix
    return np.concatenate((shared, np.full(own_tokens, 5_000_000 + own, "<u4"))).tobytes()


def test_requests_follow_the_events() -> None:
    fleet = Fleet("a", "b")
    fleet.join("c", prompt(1, 0))
    route = fleet.route(prompt(1, 1))
    assert (route.name, route.hits) == ("c", Hits(device=4096))


def test_requests_follow_prompts_that_were_just_sent_before_their_events() -> None:
    fleet = Fleet("a", "b", "c", "d")
    names = {fleet.route(prompt(1, own)).name for own in range(20)}
    assert len(names) == 1


def test_a_prompt_that_never_arrived_is_expected_for_a_limited_time() -> None:
    fleet = Fleet("a", "b")
    first = fleet.route(prompt(1, 0))
    fleet.router.finished(first)
    fleet.router.remember()
    fleet.now_s += 61
    assert fleet.route(prompt(1, 1)).hits == Hits()


def test_a_sent_prompt_is_recorded_after_the_choice_and_before_the_next_call() -> None:
    for next_call in ("remember", "join", "leave", "read"):
        fleet = Fleet("a", "b", "c")
        name = fleet.route(prompt(1, 0)).name
        assert fleet.router.view.index.num_blocks == 0
        other = next(each for each in "abc" if each != name)
        if next_call == "read":
            fleet.router.read(other, EventBatch(1, 0.0, (AllCleared(),), SnapshotPart(0, 1, 0)))
        elif next_call == "remember":
            fleet.router.remember()
        else:
            getattr(fleet.router, next_call)(other)
        assert fleet.router.view.index.num_blocks == len(PromptBlocks(BASE, prompt(1, 0), SIZE, IDENTITIES).all())
    fleet = Fleet("a")
    fleet.route(prompt(1, 0))
    fleet.router.leave("a")
    fleet.router.remember()
    with pytest.raises(NoReplica):
        fleet.route(prompt(1, 0))


def test_prefixes_spread_over_the_fleet() -> None:
    fleet = Fleet(*"abcdefgh")
    counted = Counter(fleet.route(prompt(prefix, turn)).name for turn in range(3) for prefix in range(80))
    assert len(counted) == 8
    assert max(counted.values()) <= 1.15 * 30


def test_a_replica_does_not_get_everything_after_its_snapshot() -> None:
    """The snapshot has the prefixes of all requests, the other replicas have none, and no more events arrive."""
    fleet = Fleet("a", "b", "c")
    fleet.join("d", *(prompt(prefix, 0) for prefix in range(100)))
    counted = Counter(fleet.route(prompt(prefix, 1, own_tokens=2048)).name for prefix in range(100))
    assert 25 <= counted["d"] <= 70
    assert all(counted[name] >= 5 for name in "abc")


def test_a_new_replica_without_blocks_does_not_get_everything() -> None:
    fleet = Fleet("a", "b", "c")
    for prefix in range(90):
        fleet.router.finished(fleet.route(prompt(prefix, 0)))
    fleet.join("d")
    counted = Counter(fleet.route(prompt(prefix, 0)).name for prefix in range(100, 140))
    assert 5 <= counted["d"] <= 15


def serve(fleet: Fleet, num_requests: int, every_s: float) -> list[Route]:
    """Send a request for one prefix every `every_s`. Each replica computes its requests one after the other."""
    routes: list[Route] = []
    running: list[tuple[float, Route]] = []  # each with the time when it finishes
    free_s: dict[str, float] = {}  # when each replica has finished its last request
    for own in range(num_requests):
        fleet.now_s += every_s
        finished = [(end_s, route) for end_s, route in running if end_s <= fleet.now_s]
        for end_s, route in finished:
            running.remove((end_s, route))
            fleet.router.finished(route)
        route = fleet.route(prompt(1, own))
        routes.append(route)
        computed_s = (4160 - route.hits.total) * COMPUTE_S
        free_s[route.name] = max(fleet.now_s, free_s.get(route.name, 0.0)) + computed_s
        running.append((free_s[route.name], route))
    return routes


def test_a_prefix_that_one_replica_can_not_serve_gets_a_second_home_and_no_third() -> None:
    routes = serve(Fleet(*"abcdefgh"), 1500, 0.05)  # a hit takes 0.064 s, so 1.3 replicas are busy
    counted = Counter(route.name for route in routes[1000:])
    assert len(counted) == 2
    assert min(counted.values()) > 100
    assert sum(route.is_new_home for route in routes) == 1


def test_a_prefix_that_one_replica_can_serve_stays_at_home() -> None:
    assert len({route.name for route in serve(Fleet(*"abcdefgh"), 600, 0.1)}) == 1


def test_salted_requests_never_match_blocks_of_other_salts() -> None:
    fleet = Fleet("a")
    fleet.join("b", prompt(1, 0))
    fleet.join("c", prompt(1, 0), namespace=SALTED)
    for own in range(1, 4):
        assert fleet.route(prompt(1, own)).name == "b"
        route = fleet.route(prompt(1, own), SALTED)
        assert (route.name, route.hits) == ("c", Hits(device=4096))
    assert fleet.route(prompt(1, 0), Namespace("m", tenant="x")).hits == Hits()


def test_prompts_of_one_tenant_are_not_expected_for_another() -> None:
    fleet = Fleet("a", "b")
    fleet.route(prompt(1, 0), SALTED)
    assert fleet.route(prompt(1, 0)).hits == Hits()
    assert fleet.route(prompt(1, 0), SALTED).hits.total == 4144  # whole blocks before the last token


def test_a_replica_to_avoid_gets_nothing() -> None:
    fleet = Fleet("a")
    fleet.join("b", prompt(1, 0))
    assert fleet.router.route(BASE, prompt(1, 1), avoid={"b"}).name == "a"
    with pytest.raises(NoReplica):
        fleet.router.route(BASE, prompt(1, 1), avoid={"a", "b"})


def test_a_replica_that_left_gets_nothing() -> None:
    fleet = Fleet("a")
    fleet.join("b", prompt(1, 0))
    route = fleet.route(prompt(1, 1))
    fleet.router.leave("b")
    fleet.router.finished(route)
    assert fleet.route(prompt(1, 1)).name == "a"


@pytest.mark.parametrize("routing", ROUTINGS)
def test_without_a_replica_no_policy_routes(routing: str) -> None:
    with pytest.raises(NoReplica, match="expected at least one"):
        Fleet(routing=routing).route(prompt(1, 1))


def test_a_request_that_is_refused_leaves_no_trace() -> None:
    fleet = Fleet("a")
    with pytest.raises(InvalidRequest):
        fleet.route(b"")
    assert fleet.router.load.waits(["a"], "", [0]) == [(0, 0)]


def test_a_prompt_is_hashed_only_as_far_as_some_replica_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    num_hashed = []
    hash_next = PromptBlocks.hash_next

    def count_hash_next(blocks: PromptBlocks, num_blocks: int = 64) -> list[int]:
        hashes = hash_next(blocks, num_blocks)
        num_hashed.append(len(hashes))
        return hashes

    fleet = Fleet("a")
    fleet.join("b", prompt(1, 0, prefix_tokens=SIZE * 100))
    monkeypatch.setattr(PromptBlocks, "hash_next", count_hash_next)
    monkeypatch.setattr(PromptBlocks, "all", lambda blocks: blocks.hashes)
    fleet.route(prompt(1, 1, prefix_tokens=SIZE * 100, own_tokens=SIZE * 5000))
    assert num_hashed == [64, 64], "of 5,099 blocks, of which b has 100"


def test_prompts_too_short_for_a_block_go_to_the_shortest_queue() -> None:
    fleet = Fleet("a", "b")
    fleet.router.load.sent("a", 10_000)
    assert fleet.route(bytes(4)).name == "b"
    fleet.router.load.sent("b", 20_000)
    assert fleet.route(bytes(4)).name == "a"
