from __future__ import annotations

import pytest

from radixkv.errors import ConfigError
from radixkv.routing.candidate import Candidate, Hits
from radixkv.routing.routings import ROUTINGS, make_routing
from radixkv.routing.rule import Rule, Wish

CANDIDATES = [
    Candidate("a", Hits(device=2000), queue_tokens=90_000),
    Candidate("b", Hits(device=1900), queue_tokens=10),
    Candidate("c", Hits(device=1900), queue_tokens=5),
    Candidate("d", queue_tokens=0, recent_tokens=3),
    Candidate("e", queue_tokens=0, recent_tokens=2),
]


def chosen(name: str, times: int = 1) -> str:
    routing = make_routing(name, Rule(balance=0))
    choices = [routing(Wish(3000), CANDIDATES) for _ in range(times)]
    assert all(choice.hits == CANDIDATES[choice.index].hits for choice in choices)
    return "".join(CANDIDATES[choice.index].name for choice in choices)


def test_each_routing_chooses_by_what_it_is_named_for() -> None:
    assert chosen("prefix") == "c"
    assert chosen("longest-prefix") == "a"
    assert chosen("least-loaded") == "e"
    assert chosen("threshold") == "a"
    assert chosen("round-robin", 7) == "abcdeab"
    assert set(chosen("random", 100)) == set("abcde")
    assert chosen("random", 9) == chosen("random", 9)


def test_equal_matches_go_to_the_shorter_queue() -> None:
    routing = make_routing("longest-prefix")
    assert routing(Wish(3000), CANDIDATES[1:]).index == 1


def test_a_match_below_the_threshold_attracts_nobody() -> None:
    routing = make_routing("threshold")
    assert [routing(Wish(tokens), CANDIDATES).index for tokens in (6666, 6667)] == [0, 4]


def test_the_names_are_known() -> None:
    assert all(make_routing(name)(Wish(10), CANDIDATES[:1]).index == 0 for name in ROUTINGS)
    with pytest.raises(ConfigError, match=r"expected one of prefix, threshold, .* got sideways"):
        make_routing("sideways")
