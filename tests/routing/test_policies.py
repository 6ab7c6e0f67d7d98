"""The routing policies, most of all `prefix`: its weights, when a prefix gets another home, and ties."""

from __future__ import annotations

import dataclasses
import random

import pytest

from radixkv.errors import ConfigError
from radixkv.routing.candidate import Candidate, Hits, TokenTimes
from radixkv.routing.policies import ROUTINGS, RoutedPrompt, RoutingWeights, choose, make_routing

WEIGHTS = RoutingWeights(least_match_tokens=100, queue_weight=0.5, balance=0.1, home_share=0.8, slack_s=1e-9)
PROMPT = RoutedPrompt(1000)
TIMES = TokenTimes(compute_s=1.0, host_s=0.1, disk_s=0.4, remote_s=0.6)


def replica(name: str, device: int = 0, *, queue: float = 0, recent: float = 0, hits: Hits | None = None) -> Candidate:
    return Candidate(name, hits or Hits(device=device), queue, recent, TIMES)


def choose_name(candidates: list[Candidate], prompt: RoutedPrompt = PROMPT, weights: RoutingWeights = WEIGHTS) -> str:
    choice = choose(prompt, candidates, weights)
    assert choice.hits == candidates[choice.index].hits
    return candidates[choice.index].name


def test_the_longest_match_wins_among_idle_replicas() -> None:
    assert choose_name([replica("a", 200), replica("b", 300), replica("c")]) == "b"


def test_the_shortest_queue_wins_among_equal_matches() -> None:
    assert choose_name([replica("a", 300, queue=9), replica("b", 300, queue=8), replica("c", queue=8)]) == "b"


def test_a_replica_is_not_chosen_when_its_queue_costs_more_than_its_match_saves() -> None:
    for queue, expected in ((599, "a"), (601, "b")):  # half of the queue is compared with 300 tokens
        assert choose_name([replica("a", 300, queue=queue), replica("b")]) == expected


def test_a_short_match_is_ignored() -> None:
    assert choose_name([replica("a", 99, queue=1), replica("b")]) == "b"
    assert choose_name([replica("a", 100, queue=1), replica("b")]) == "a"


def test_hits_in_a_slower_tier_cost_more() -> None:
    fastest_first = [Hits(device=300), Hits(host=300), Hits(disk=300), Hits(remote=300), Hits()]
    remaining = [replica(str(index), hits=hits) for index, hits in enumerate(fastest_first)]
    order = []
    while remaining:
        order.append(choose_name(remaining))
        remaining = [each for each in remaining if each.name != order[-1]]
    assert order == ["0", "1", "2", "3", "4"]
    choice = choose(RoutedPrompt(1000), [replica("a", hits=Hits(device=100, host=200, disk=50, remote=50))], WEIGHTS)
    assert choice.cost_s == pytest.approx(600 + 200 * 0.1 + 50 * 0.4 + 50 * 0.6)


def test_a_longer_match_on_a_slow_disk_loses_to_a_shorter_one_on_the_device() -> None:
    assert choose_name([replica("a", hits=Hits(disk=400)), replica("b", 300)]) == "b"
    assert choose_name([replica("a", hits=Hits(disk=600)), replica("b", 300)]) == "a"


def test_blocks_that_load_slower_than_they_compute_cost_no_more_than_missing_ones() -> None:
    slow = dataclasses.replace(TIMES, remote_s=5.0)
    cost_s = choose(RoutedPrompt(1000), [Candidate("a", Hits(remote=500), times=slow)], WEIGHTS).cost_s
    assert cost_s == choose(RoutedPrompt(1000), [Candidate("a", times=slow)], WEIGHTS).cost_s


def test_a_replica_that_computes_slowly_has_a_longer_queue() -> None:
    slow = dataclasses.replace(TIMES, compute_s=3.0)
    candidates = [Candidate("a", Hits(), 100, 0, slow), Candidate("b", Hits(), 250, 0, TIMES)]
    assert choose_name(candidates) == "b"


def test_a_part_of_the_recently_computed_tokens_counts_as_a_queue() -> None:
    for recent, expected in ((5_900, "a"), (6_100, "b")):  # half of a tenth is compared with 300 tokens
        assert choose_name([replica("a", 300, recent=recent), replica("b")]) == expected
    assert choose_name([replica("a", recent=5), replica("b", recent=4), replica("c", recent=9)]) == "b"


def test_a_prefix_gets_another_home_when_demand_exceeds_what_its_homes_can_serve() -> None:
    candidates = [replica("a", 900, queue=10), replica("b", queue=5), replica("c", queue=20)]
    assert choose_name(candidates, RoutedPrompt(1000, demand=0.8)) == "a"
    choice = choose(RoutedPrompt(1000, demand=0.81), candidates, WEIGHTS)
    assert (candidates[choice.index].name, choice.is_new_home) == ("b", True)


def test_two_homes_serve_twice_as_much() -> None:
    candidates = [replica("a", 900, queue=10), replica("b", 850, queue=9), replica("c")]
    assert (
        choose_name(candidates, RoutedPrompt(1000, demand=1.6)) == "a"
    )  # "b" has 50 cached tokens fewer, and a queue only 1 token shorter
    choice = choose(RoutedPrompt(1000, demand=1.61), candidates, WEIGHTS)
    assert (candidates[choice.index].name, choice.is_new_home) == ("c", True)


def test_a_home_is_not_left_for_one_that_is_as_idle() -> None:
    choice = choose(RoutedPrompt(1000, demand=9.0), [replica("a", 900), replica("b")], WEIGHTS)
    assert (choice.index, choice.is_new_home) == (0, False)


def test_an_uncached_prompt_is_no_new_home() -> None:
    assert not choose(RoutedPrompt(1000, demand=9.0), [replica("a", 50), replica("b")], WEIGHTS).is_new_home


def test_among_equal_replicas_the_key_of_the_prefix_chooses_evenly() -> None:
    names = [f"replica-{index}" for index in range(8)]
    candidates = [replica(name) for name in names]
    choices = [choose_name(candidates, RoutedPrompt(1000, key=key)) for key in range(4000)]
    assert [choose_name(candidates, RoutedPrompt(1000, key=key)) for key in range(100)] == choices[:100]
    assert all(400 < choices.count(name) < 600 for name in names)


def test_a_replica_that_leaves_moves_only_its_own_prefixes() -> None:
    candidates = [replica(f"replica-{index}") for index in range(8)]
    for key in range(500):
        before = choose_name(candidates, RoutedPrompt(1000, key=key))
        after = choose_name(candidates[1:], RoutedPrompt(1000, key=key))
        assert after == before or before == "replica-0"


def test_the_order_of_the_replicas_decides_nothing() -> None:
    draw = random.Random(1)
    for _ in range(300):
        candidates = [
            replica(str(index), draw.choice((0, 50, 300)), queue=draw.choice((0, 40)), recent=draw.choice((0, 700)))
            for index in range(6)
        ]
        prompt = RoutedPrompt(1000, key=draw.getrandbits(64), demand=draw.choice((0.0, 1.0, 9.0)))
        expected = choose_name(candidates, prompt)
        draw.shuffle(candidates)
        assert choose_name(candidates, prompt) == expected


def test_a_longer_match_never_makes_a_replica_lose() -> None:
    draw = random.Random(2)
    for _ in range(300):
        candidates = [replica(str(index), draw.randrange(900), queue=draw.randrange(500)) for index in range(5)]
        choice = choose(RoutedPrompt(1000, key=7), candidates, WEIGHTS)
        winner = candidates[choice.index]
        longer = Hits(device=winner.hits.total + draw.randrange(99))
        candidates[choice.index] = winner._replace(hits=longer)
        assert choose(RoutedPrompt(1000, key=7), candidates, WEIGHTS).index == choice.index


CANDIDATES = [
    Candidate("a", Hits(device=2000), queue_tokens=90_000),
    Candidate("b", Hits(device=1900), queue_tokens=10),
    Candidate("c", Hits(device=1900), queue_tokens=5),
    Candidate("d", queue_tokens=0, recent_tokens=3),
    Candidate("e", queue_tokens=0, recent_tokens=2),
]


def choose_with(name: str, times: int = 1) -> str:
    """Return the names of the replicas that a policy chooses, one after the other."""
    routing = make_routing(name, RoutingWeights(balance=0))
    choices = [routing(RoutedPrompt(3000), CANDIDATES) for _ in range(times)]
    assert all(choice.hits == CANDIDATES[choice.index].hits for choice in choices)
    return "".join(CANDIDATES[choice.index].name for choice in choices)


def test_each_routing_policy_chooses_as_its_name_says() -> None:
    assert choose_with("prefix") == "c"
    assert choose_with("longest-prefix") == "a"
    assert choose_with("least-loaded") == "e"
    assert choose_with("threshold") == "a"
    assert choose_with("round-robin", 7) == "abcdeab"
    assert set(choose_with("random", 100)) == set("abcde")
    assert choose_with("random", 9) == choose_with("random", 9)


def test_equal_matches_go_to_the_shorter_queue() -> None:
    routing = make_routing("longest-prefix")
    assert routing(RoutedPrompt(3000), CANDIDATES[1:]).index == 1


def test_a_match_below_the_threshold_is_ignored() -> None:
    routing = make_routing("threshold")
    assert [routing(RoutedPrompt(num_tokens), CANDIDATES).index for num_tokens in (6666, 6667)] == [0, 4]


def test_every_name_of_a_routing_policy_is_known_and_no_other() -> None:
    assert all(make_routing(name)(RoutedPrompt(10), CANDIDATES[:1]).index == 0 for name in ROUTINGS)
    with pytest.raises(ConfigError, match=r"expected one of prefix, threshold, .* got sideways"):
        make_routing("sideways")
