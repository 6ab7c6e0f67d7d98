"""The simulator, and eviction policies on traffic with known results. Blocks have 512 tokens."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from radixkv.api.awaits import Awaits
from radixkv.config import EVICTION_POLICIES
from radixkv.errors import ConfigError
from radixkv.planning.simulate import HINTS, OPTIMAL, SIMULATED_POLICIES, Simulation, simulate
from radixkv.planning.trace import TOKENS_PER_ID, TraceRequest, load_trace

from .traces import trace

TRACE = os.environ.get("RADIXKV_TRACE")


def hit_rate(requests: list[TraceRequest], policy: str, num_blocks: int) -> float:
    return simulate(requests, policy=policy, capacity_tokens=num_blocks * TOKENS_PER_ID).token_hit_rate


@pytest.mark.parametrize("policy", SIMULATED_POLICIES)
def test_a_roomy_cache_reuses_all_but_the_last_token(policy: str) -> None:
    done = simulate(trace([(1, 2), (1, 2), (1, 3), (4,)]), policy=policy, capacity_tokens=10 * TOKENS_PER_ID)
    assert done.seconds > 0
    assert done == Simulation(
        policy=policy,
        capacity_tokens=5120,
        block_size=512,
        requests=4,
        prompt_tokens=7 * 512,
        cached_tokens=1023 + 512,
        token_hit_rate=(1023 + 512) / (7 * 512),
        evicted_tokens=0,
        seconds=done.seconds,
    )


def test_publishing_an_answer_does_not_count_as_a_second_use_of_its_prompt() -> None:
    """Blocks that were used twice leave probation, and would still be cached at the last request."""
    request = TraceRequest(0, 2 * TOKENS_PER_ID, TOKENS_PER_ID, (1, 2), output_ids=(3,))
    others = [TraceRequest(1000 + index, TOKENS_PER_ID, 1, (9 + index,)) for index in range(4)]
    requests = [request, *others, request]
    without_answers = [replace(each, output_ids=()) for each in requests]
    for trace_requests in (requests, without_answers):
        done = simulate(trace_requests, policy="lru", capacity_tokens=4 * TOKENS_PER_ID, probation_share=0.5)
        assert done.cached_tokens == 0


def test_the_least_recently_used_conversation_is_evicted() -> None:
    requests = trace([(1, 2), (3, 4), (5, 6), (3, 4, 7)])
    assert simulate(requests, policy="lru", capacity_tokens=4 * 512).cached_tokens == 2 * 512
    requests = trace([(1, 2), (3, 4), (5, 6), (1, 2, 7)])
    assert simulate(requests, policy="lru", capacity_tokens=4 * 512).cached_tokens == 0


def test_the_optimum_keeps_what_returns() -> None:
    requests = trace([(1, 2), (3, 4), (5, 6), (1, 2, 7)])
    assert simulate(requests, policy=OPTIMAL, capacity_tokens=2 * 512).cached_tokens == 2 * 512


def test_the_optimum_keeps_the_beginning_of_a_prompt_when_its_end_never_returns() -> None:
    requests = trace([(1, 2, 3), (4, 5, 6), (1, 7), (4, 8)])
    assert simulate(requests, policy=OPTIMAL, capacity_tokens=2 * 512).cached_tokens == 2 * 512


@pytest.mark.parametrize("block_size", [16, 48, 64, 512, 1024])
def test_every_block_size_counts_the_same_reuse(block_size: int) -> None:
    requests = trace([(1, 2, 3), (1, 2, 4), (1, 2, 3)])
    for policy in ("lru", OPTIMAL):
        done = simulate(requests, policy=policy, capacity_tokens=2**20, block_size=block_size)
        assert done.cached_tokens == 1024 + 1535


def test_a_prompt_larger_than_the_cache_is_a_miss_without_side_effects() -> None:
    requests = trace([(1,), (2, 3, 4), (1, 5)])
    assert simulate(requests, policy="lru", capacity_tokens=2 * 512).cached_tokens == 512


def test_each_request_is_reported() -> None:
    calls: list[None] = []
    simulate(trace([(1,), (2,)]), policy="lru", capacity_tokens=512, on_request=lambda: calls.append(None))
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "fifo"}, r"^policy: expected one of adaptive, lru, slru, lfu, priority, optimal, got fifo$"),
        ({"capacity_tokens": 511}, r"^capacity_tokens: expected at least a block of 512 tokens, got 511$"),
        ({"capacity_tokens": -1}, r"^capacity_tokens: .*got -1$"),
        ({"block_size": 0}, r"^block_size: expected at least 1 token, got 0$"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(trace([(1,)]), **{"policy": "lru", "capacity_tokens": 512, **arguments})


# Traffic: lists of prompts, each with the ids of its blocks. The caches below hold 100 blocks.


def shared_prompt(_: random.Random) -> list[tuple[int, ...]]:
    """Prompts that begin with one system prompt of four blocks, each with a question that is asked only once."""
    return [(1, 2, 3, 4, 100 + index, 10_000 + index) for index in range(1200)]


def one_shots(_: random.Random) -> list[tuple[int, ...]]:
    return [tuple(range(10 * index, 10 * index + 4)) for index in range(1200)]


def loop(_: random.Random) -> list[tuple[int, ...]]:
    """Sixty documents of two blocks, requested in turn: a fifth more than the cache holds."""
    return [(100 * (index % 60), 100 * (index % 60) + 1) for index in range(3000)]


def popular_documents(dice: random.Random) -> list[tuple[int, ...]]:
    """Prompts of a document and a question of its own; the popularity of documents follows Zipf's law."""
    weights = [1 / (rank + 1) for rank in range(200)]
    documents = dice.choices(range(200), weights, k=1800)
    return [
        (10 * document, 10 * document + 1, 10 * document + 2, 10_000 + index)
        for index, document in enumerate(documents)
    ]


def chats(dice: random.Random) -> list[tuple[int, ...]]:
    """Conversations: a third of the first turns are followed by another one, and two thirds of the later turns."""
    paths: list[tuple[int, ...]] = []
    waiting: list[tuple[int, tuple[int, ...]]] = []  # the earliest index of the next turn, and the turn before it
    for index in range(2400):
        due = next((each for each in waiting if each[0] <= index), None)
        if due is not None:
            waiting.remove(due)
            path = (*due[1], 10 * index, 10 * index + 1)
            continue_probability = 2 / 3
        else:
            path = (1, *(10 * index + offset for offset in range(2, 7)))
            continue_probability = 1 / 3
        paths.append(path)
        if dice.random() < continue_probability:
            waiting.append((index + dice.randint(10, 60), path))
    return paths


def change_of_phase(dice: random.Random) -> list[tuple[int, ...]]:
    """Popular documents, then one-shot prompts, then a loop."""
    shifted = [tuple(10**6 + each for each in path) for path in one_shots(dice)]
    looped = [tuple(2 * 10**6 + each for each in path) for path in loop(dice)]
    return [*popular_documents(dice), *shifted, *looped]


def scans_over_a_hot_set(dice: random.Random) -> list[tuple[int, ...]]:
    """Rounds of a hundred requests for twelve hot prompts, each followed by a scan: a hundred one-shot prompts."""
    paths: list[tuple[int, ...]] = []
    for scan in range(12):
        paths += [(10 * hot, 10 * hot + 1, 10 * hot + 2) for hot in dice.choices(range(12), k=100)]
        paths += [tuple(1000 * scan + 10 * index + offset + 1000 for offset in range(3)) for index in range(100)]
    return paths


def chats_and_batches(dice: random.Random) -> list[tuple[int, ...]]:
    """Conversations, and after every 400 of their prompts a batch of 80 prompts that begin with one instruction."""
    turns = chats(dice)
    paths: list[tuple[int, ...]] = []
    for batch in range(6):
        paths += turns[400 * batch : 400 * (batch + 1)]
        for index in range(80):
            first_id = 10**6 + 10 * (80 * batch + index)
            paths.append((10**8 + batch, *range(first_id, first_id + 4)))
    return paths


def two_rhythms(dice: random.Random) -> list[tuple[int, ...]]:
    """Requests of two clients in turn: one cycles through twelve documents, the other requests popular ones."""
    cycle = [(10**6 + 10 * (index % 12), 10**6 + 10 * (index % 12) + 1) for index in range(1200)]
    return [path for pair in zip(cycle, popular_documents(dice), strict=False) for path in pair]


Traffic = Callable[[random.Random], list[tuple[int, ...]]]
TRAFFIC: list[Traffic] = [
    shared_prompt,
    one_shots,
    loop,
    popular_documents,
    chats,
    change_of_phase,
    scans_over_a_hot_set,
    chats_and_batches,
    two_rhythms,
]


@cache
def traffic_hit_rate(traffic: Traffic, policy: str, every_ms: float = 1000) -> float:
    return hit_rate(trace(traffic(random.Random(0)), every_ms), policy, 100)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("every_ms", [1000, 0], ids=["one request per second", "all at the same time"])
@pytest.mark.parametrize("traffic", TRAFFIC, ids=lambda traffic: traffic.__name__)
def test_the_default_policy_is_at_most_one_percentage_point_below_lru_and_slru(
    traffic: Traffic, every_ms: float
) -> None:
    better = max(traffic_hit_rate(traffic, "lru"), traffic_hit_rate(traffic, "slru"))
    assert traffic_hit_rate(traffic, "adaptive", every_ms) >= better - 0.01


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("traffic", TRAFFIC, ids=lambda traffic: traffic.__name__)
def test_no_policy_beats_the_optimum(traffic: Traffic) -> None:
    requests = trace(traffic(random.Random(0))[:800])
    rates = {policy: hit_rate(requests, policy, 100) for policy in (*EVICTION_POLICIES, OPTIMAL)}
    assert max(rates.values()) == rates[OPTIMAL]


def test_the_default_keeps_a_part_of_a_loop() -> None:
    assert traffic_hit_rate(loop, "lru") == 0
    assert traffic_hit_rate(loop, "adaptive") > 0.5


def test_the_default_policy_keeps_continued_prompts() -> None:
    assert traffic_hit_rate(chats, "adaptive") > 1.1 * traffic_hit_rate(chats, "lru")


def test_a_simulation_is_deterministic() -> None:
    requests = trace(chats(random.Random(1))[:1000])
    assert hit_rate(requests, "adaptive", 100) == hit_rate(requests, "adaptive", 100)


needs_trace = pytest.mark.skipif(TRACE is None, reason="RADIXKV_TRACE names no conversation trace")
CAPACITIES_TOKENS = (2_560_000, 5_120_000, 10_240_000, 25_600_000)


@cache
def trace_hit_rates(policy: str) -> list[float]:
    """Return the hit rates on the conversation trace, one per capacity of `CAPACITIES_TOKENS`."""
    assert TRACE is not None
    requests = load_trace(TRACE)
    return [simulate(requests, policy=policy, capacity_tokens=each).token_hit_rate for each in CAPACITIES_TOKENS]


@needs_trace
@pytest.mark.parametrize(
    ("policy", "expected"), [("lru", [0.114, 0.216, 0.294, 0.362]), (OPTIMAL, [0.348, 0.374, 0.374, 0.374])]
)
def test_the_reference_hit_rates(policy: str, expected: list[float]) -> None:
    assert trace_hit_rates(policy) == pytest.approx(expected, abs=0.003)


@needs_trace
def test_on_the_trace_the_default_policy_is_at_most_half_a_percentage_point_below_lru_and_slru() -> None:
    adaptive, lru, slru = (trace_hit_rates(policy) for policy in ("adaptive", "lru", "slru"))
    for index in range(len(CAPACITIES_TOKENS)):
        assert adaptive[index] >= max(lru[index], slru[index]) - 0.005
    assert adaptive[0] >= 1.5 * lru[0]


def agents(num_sessions: int = 30, num_turns: int = 8) -> list[TraceRequest]:
    """Return sessions that grow by a block per turn.

    Half of them wait for tools, which take a second, and the others for users, who return once, after a minute.
    """
    requests = []
    for session in range(num_sessions):
        waits_for_tools = session % 2 == 0
        num_session_turns, turn_s = (num_turns, 1) if waits_for_tools else (2, 60)
        for turn in range(num_session_turns):
            is_last = turn == num_session_turns - 1
            requests.append(
                TraceRequest(
                    timestamp_ms=1000.0 * (2 * session + turn_s * turn),
                    input_length=TOKENS_PER_ID * (turn + 3),
                    output_length=1,
                    hash_ids=tuple(1000 * session + block for block in range(turn + 3)),
                    session=f"s{session}",
                    awaits=Awaits.TOOL if waits_for_tools and not is_last else Awaits.USER,
                    is_last=is_last,
                )
            )
    return sorted(requests, key=lambda request: request.timestamp_ms)


def test_known_ends_of_sessions_gain_hits_under_every_policy() -> None:
    for policy in EVICTION_POLICIES:
        without_hints, with_hints = (
            simulate(agents(), policy=policy, capacity_tokens=24 * TOKENS_PER_ID, hints=hints).token_hit_rate
            for hints in ("none", "stop+end")
        )
        assert with_hints > without_hints, policy


def test_hints_change_nothing_where_the_trace_has_none() -> None:
    requests = trace([(1, 2), (3, 4), (5, 6), (1, 2, 7), (3, 4)])
    done = [simulate(requests, policy="adaptive", capacity_tokens=4 * 512, hints=hints) for hints in HINTS]
    assert len({each.cached_tokens for each in done}) == 1


def test_unknown_hints_are_refused() -> None:
    with pytest.raises(ConfigError, match="hints: expected one of none, stop, stop\\+end, got all"):
        simulate(trace([(1,)]), policy="lru", capacity_tokens=512, hints="all")


def test_recorded_answers_are_cached_too() -> None:
    first = TraceRequest(0, 700, 600, (1, 2), output_ids=(3, 4))  # the prompt ends inside the second block
    second = TraceRequest(1000, 1300, 1, (1, 3, 5))
    done = simulate([first, second], policy="lru", capacity_tokens=10 * 512)
    assert done.cached_tokens == 2 * 512
    without = simulate([replace(first, output_ids=()), second], policy="lru", capacity_tokens=10 * 512)
    assert without.cached_tokens == 512
