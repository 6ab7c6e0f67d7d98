from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from radixkv.api.awaits import Awaits
from radixkv.api.stats import TierStats
from radixkv.errors import Draining
from radixkv.namespace import Namespace
from radixkv.service.server.page import state_feed
from radixkv.service.server.page.state_feed import MAX_CELLS, StateFeed, block_map
from tests.fakes import FakeClock, publish, spell
from tests.service.diagnosed import diagnosed_engine
from tests.service.fake_engine import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    """An engine with three segments: "abcd", and its continuations "efgh" and "xy"."""
    engine = FakeEngine()
    publish(engine.cache, "abcdefgh", Namespace("model", "a", "", "a salt"))
    publish(engine.cache, "abcdxy", Namespace("model", "a", "", "a salt"))
    return engine


def test_a_state_has_what_the_engine_holds(engine):
    text = StateFeed(engine).state()
    state = json.loads(text)
    assert b"a salt" not in text
    assert (state["model"], state["is_healthy"], state["epoch"]) == ("fake", True, str(2**53 + 1))
    assert (state["blocks"]["published"], state["tokens"]["cached"], state["first_tokens"]["counts"]) == (
        3,
        60,
        [3, 1, 0],
    )
    assert [tenant["tenant"] for tenant in state["tenants"]] == ["a", "b"]
    assert (state["num_segments"], state["compared_segments"]) == (3, 3)
    first, *others = state["segments"]
    assert (first["parent"], first["start"], first["tokens"], first["has_salt"]) == (None, 0, 4, True)
    assert [(each["parent"], each["start"]) for each in others] == [(first["id"], 4)] * 2
    assert state["block_map"]["cells"].count([0, 0, 1]) == 3


def test_a_segment_names_the_session_that_alone_has_used_it(engine):
    with engine.cache.lease(Namespace("model", "a"), spell("klmnop"), session_id="build-42") as lease:
        lease.commit(6)
        lease.awaits = Awaits.TOOL
    segments = json.loads(StateFeed(engine).state())["segments"]
    assert {(each["session"], each["awaits"]) for each in segments} == {("", "unknown"), ("build-42", "tool")}


def test_a_state_has_what_the_stores_hold(engine):
    assert json.loads(StateFeed(engine).state())["tiers"] == []
    host = TierStats("host", True, 7, 700, 1000, *range(9))
    engine.offload = SimpleNamespace(stats=lambda: [host])
    (tier,) = json.loads(StateFeed(engine).state())["tiers"]
    assert (tier["tier"], tier["blocks"], tier["is_working"]) == ("host", 7, True)


def test_a_state_is_collected_once_for_all_requests_within_a_short_time(engine):
    clock = FakeClock()
    feed = StateFeed(engine, clock)
    before = feed.state()
    publish(engine.cache, "xyz")
    clock.now_s = 0.4
    assert feed.state() is before
    clock.now_s = 0.5
    assert json.loads(feed.state())["num_segments"] == 4


def test_an_engine_that_does_not_answer_has_no_state(engine, monkeypatch):
    monkeypatch.setattr(state_feed, "_TIMEOUT_S", 0.01)
    engine.is_hanging = True
    assert StateFeed(engine).state() is None


def test_an_engine_that_does_not_answer_is_asked_once_for_all_waiting_requests(engine, monkeypatch):
    monkeypatch.setattr(state_feed, "_TIMEOUT_S", 0.01)
    engine.is_hanging = True
    clock, calls, stats = FakeClock(), [], engine.stats

    def recorded_stats(*arguments):
        calls.append(arguments)
        return stats(*arguments)

    monkeypatch.setattr(engine, "stats", recorded_stats)
    feed = StateFeed(engine, clock)
    assert [feed.state(), feed.state(), feed.state()] == [None] * 3
    assert len(calls) == 1
    engine.is_hanging = False
    clock.now_s = 0.5
    assert feed.state() is not None


def test_an_engine_that_has_stopped_has_no_state(engine, monkeypatch):
    def refuse(_):
        raise Draining("engine: stopped")

    monkeypatch.setattr(engine, "stats", refuse)
    assert StateFeed(engine).state() is None


@pytest.mark.parametrize("num_blocks", [0, 1, MAX_CELLS, MAX_CELLS + 1, 10 * MAX_CELLS + 7])
def test_a_map_counts_each_block_once_in_few_cells(num_blocks):
    states = bytes(index % 3 for index in range(num_blocks))
    drawn = block_map(states)
    assert len(drawn["cells"]) <= MAX_CELLS
    blocks_by_state = [sum(column) for column in zip(*drawn["cells"], strict=True)]
    assert blocks_by_state == ([states.count(state) for state in range(3)] if num_blocks else [])
    assert all(sum(cell) == drawn["blocks_per_cell"] for cell in drawn["cells"][:-1])


def test_causes_of_misses_are_listed_without_text_of_prompts():
    text = StateFeed(diagnosed_engine("acme", "globex")).state()
    misses = json.loads(text)["misses"]
    assert (misses["covered_s"], misses["misses"], misses["examined_misses"], misses["first_prompts"]) == (
        90.0,
        24,
        12,
        2,
    )
    first, *others = misses["causes"]
    assert (first["tenant"], first["place"], first["pattern"]) == ("acme", "tokens 16 to 255", "7 hexadecimal digits")
    assert (first["prompts"], first["lost_tokens"], first["is_bound"]) == (3, 183_000, False)
    assert first["what"] == "a random id changes"
    assert [each["tenant"] for each in others] == ["globex", "acme", "globex"]
    assert b"4f2a9c1" not in text


def test_a_server_that_examines_no_misses_says_so(engine):
    assert json.loads(StateFeed(engine).state())["misses"] is None
