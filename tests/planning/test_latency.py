"""Times to the first token in simulations with tiers. Blocks have 512 tokens, and a token is computed in 1 ms."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from radixkv.api.awaits import Awaits
from radixkv.api.caller import Caller
from radixkv.api.params import PrefillParams
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.namespace import Namespace
from radixkv.planning.simulate import NO_HINTS, STOP, Latency, Simulation, simulate
from radixkv.planning.tiers import SimulatedTiers, TierCapacity
from radixkv.planning.time_model import LoadTime, TimeModel
from radixkv.planning.trace import TOKENS_PER_ID, TraceRequest
from radixkv.planning.virtual_clock import VirtualClock
from radixkv.scheduling.request import Request

BLOCK_LOAD_S = 0.064
TIMES = TimeModel(token_bytes=1000, token_s=0.001, tiers={"host": LoadTime(TOKENS_PER_ID * 1000 / BLOCK_LOAD_S)})


def request(timestamp_s: float, *ids: int, session: str = "", awaits: Awaits = Awaits.UNKNOWN) -> TraceRequest:
    return TraceRequest(timestamp_s * 1000, len(ids) * TOKENS_PER_ID, 1, ids, session=session, awaits=awaits)


def replay(
    requests: list[TraceRequest], num_blocks: int, hints: str = STOP, times: TimeModel = TIMES
) -> tuple[Simulation, Latency]:
    """Simulate a device of `num_blocks` blocks above host memory without a bound."""
    done = simulate(
        requests,
        policy="lru",
        capacity_tokens=num_blocks * TOKENS_PER_ID,
        tiers=[TierCapacity("host", None)],
        hints=hints,
        times=times,
    )
    assert done.latency is not None
    return done, done.latency


def test_a_request_waits_until_its_blocks_are_loaded() -> None:
    done, latency = replay([request(0, 1, 2, 3), request(100, 7, 8, 9), request(200, 1, 2, 3)], 3)
    assert done.tiers[0].loaded_blocks == 2  # not the third block, since the last token is always computed
    assert latency.ttft_p50_s == pytest.approx(3 * 0.512)
    # Of eight equal requests, the first one loads the blocks for all.
    done, _ = replay([request(0, 1, 2, 3), request(100, 7, 8, 9), *[request(200, 1, 2, 3)] * 8], 3)
    assert done.tiers[0].cached_tokens == 2 * TOKENS_PER_ID
    # Most of the requests find all blocks on the device, and compute one token.
    _, latency = replay([request(0, 1, 2, 3), request(9, 1, 2, 3), request(10, 1, 2, 3)], 4)
    assert latency.ttft_p50_s == pytest.approx(0.001)


def test_requests_that_wait_for_one_load_are_served_in_order_of_arrival() -> None:
    clock, namespace, prompt = VirtualClock(), Namespace("trace"), bytes(4 * 3 * TOKENS_PER_ID)
    tiers = SimulatedTiers([TierCapacity("host", None)], TOKENS_PER_ID, clock, TIMES)
    cache = PrefixCache(3, TOKENS_PER_ID, listeners=[tiers.index], clock=clock)
    tiers.connect(cache)
    with cache.lease(namespace, prompt) as lease:
        lease.commit(lease.num_tokens)
    cache.evict(3)
    tiers.advance(1.0)
    served: list[int] = []

    def serve(number: int, request: Request) -> None:
        with cache.lease(namespace, prompt) as lease:
            tiers.fill(request, lease)
        served.append(number)

    for number in range(20):
        tiers.request(PrefillParams(prompt, Caller()), namespace, partial(serve, number))
    assert served == []
    tiers.finish()
    assert served == list(range(20))


def test_loads_from_a_tier_follow_each_other() -> None:
    """Two prompts are requested at the same time, so the second one waits for both loads."""
    others = [request(50 + index, 90 + index) for index in range(6)]
    requests = [request(0, 1, 2, 3), request(1, 4, 5, 6), *others, request(200, 1, 2, 3), request(200, 4, 5, 6)]
    _, latency = replay(requests, 6)
    # Each of the two loads two blocks and computes the third one.
    first_ttft_s, second_ttft_s = 2 * BLOCK_LOAD_S + 0.512, 4 * BLOCK_LOAD_S + 0.512
    expected_s = sorted([1.536, 1.536, *[0.512] * 6, first_ttft_s, second_ttft_s])
    assert latency.ttft_p50_s == pytest.approx((expected_s[4] + expected_s[5]) / 2)
    assert latency.ttft_p95_s == pytest.approx(1.536)


TOOL = Awaits.TOOL
# The second request evicts blocks of session `a`, which then returns with a longer prompt.
RETURN = [
    request(0, 1, 2, 3, session="a", awaits=TOOL),
    request(1, 7, 8, 9),
    request(30, 1, 2, 3, 4, session="a", awaits=TOOL),
]


@pytest.mark.parametrize(("hints", "is_loaded_ahead"), [(STOP, True), (NO_HINTS, False)])
def test_a_session_that_waits_for_a_tool_is_loaded_ahead(hints: str, is_loaded_ahead: bool) -> None:
    done, latency = replay(RETURN, 5, hints)
    assert latency.num_returns == 1
    assert latency.ready_share == latency.timely_share == is_loaded_ahead
    assert latency.prefetched_tokens == (TOKENS_PER_ID if is_loaded_ahead else 0)
    assert done.cached_tokens == 3 * TOKENS_PER_ID
    assert done.tiers[0].loaded_blocks == 1


def test_a_return_after_the_end_of_a_turn_is_not_counted() -> None:
    _, latency = replay([replace(each, awaits=Awaits.USER) for each in RETURN], 5)
    assert (latency.num_returns, latency.prefetched_tokens) == (0, 0)


def test_sessions_are_loaded_ahead_one_after_the_other() -> None:
    """A request waits for at most one of the two sessions that are loaded ahead when it arrives."""
    slow = replace(TIMES, tiers={"host": LoadTime(TOKENS_PER_ID * 1000 / 0.4)})  # 0.4 s per block
    requests = [
        request(0, 1, 2, session="a", awaits=TOOL),
        request(0, 3, 4, session="b", awaits=TOOL),
        request(1, 5, 6),
        *[request(2 + index / 10, 90 + index) for index in range(8)],
        request(5.1, 5, 6),
        request(20, 1, 2, session="a"),
        request(20, 3, 4, session="b"),
    ]
    done, latency = replay(requests, 8, times=slow)
    assert latency.prefetched_tokens > 0
    assert latency.ready_share == 1
    assert done.tiers[0].cached_tokens == TOKENS_PER_ID
    # The two blocks of a session, the block of the request itself, and the block that the request computes.
    assert latency.ttft_p95_s < 2 * 0.4 + 0.4 + 0.512


def test_blocks_that_are_computed_faster_than_loaded_are_not_loaded() -> None:
    slow = replace(TIMES, tiers={"host": LoadTime(TOKENS_PER_ID * 1000 / 5.0)})  # 5 s per block
    prompts = [(1, 2, 3), (7, 8, 9)] * 6
    requests = [request(100 * index, *ids) for index, ids in enumerate(prompts)]
    done, latency = replay(requests, 3, times=slow)
    assert done.tiers[0].loaded_blocks == 2  # by one request, before the time of a load was measured
    assert latency.ttft_p50_s == pytest.approx(1.536)
