"""Every request is sent once, at its time, and every answer is checked."""

from __future__ import annotations

import asyncio
from typing import cast

import grpc
import numpy as np
import pytest

from bench.parts.load_generator import (
    Ending,
    Pass,
    PrefillCall,
    ReplayTraffic,
    build_message,
    prefill_call,
    replay,
)
from bench.parts.workloads import WorkItem, shared_prefix
from radixkv.v1 import prefill_pb2
from tests.bench.fake_service import FakeService, FaultInjector, serving
from tests.cache.walk.reusable_tokens import count_reusable_tokens
from tests.fakes import FakeClock
from tests.patience import PATIENCE_S


def send(service: FakeService, items: list[WorkItem], traffic: ReplayTraffic) -> Pass:
    """Send the items to a service, as the traffic demands."""

    async def run(address: str) -> Pass:
        async with grpc.aio.insecure_channel(address) as channel:
            messages = [build_message(item.token_ids) for item in items]
            return await replay(prefill_call(channel), items, messages, traffic)

    with serving(service) as address:
        return asyncio.run(run(address))


def items_arriving(*arrivals_s: float) -> list[WorkItem]:
    """Return prompts of five tokens, each of which is the index of the prompt."""
    return [WorkItem(arrival_s, np.full(5, i, np.uint32)) for i, arrival_s in enumerate(arrivals_s)]


def change_usage(**usage: int) -> FaultInjector:
    """Return a function that overwrites counts in the usage of responses."""

    def change(request: prefill_pb2.PrefillRequest, response: prefill_pb2.PrefillResponse) -> None:
        response.usage.MergeFrom(prefill_pb2.Usage(**usage))

    return change


CACHED = ReplayTraffic("t", use_cache=True, concurrency=1, timeout_s=PATIENCE_S)
UNCACHED = ReplayTraffic("t", use_cache=False, concurrency=1, timeout_s=PATIENCE_S)


def test_cached_tokens_equal_the_independent_count() -> None:
    items = shared_prefix(12, 37, 17, 3, 256, seed=0)
    outcomes = send(FakeService(), items, CACHED).outcomes
    assert [o.cached_tokens for o in outcomes] == count_reusable_tokens([i.token_ids.tolist() for i in items])
    assert [o.status for o in outcomes] == ["OK"] * 12


def test_without_the_cache_requests_neither_read_nor_write_it() -> None:
    service = FakeService()
    items = shared_prefix(4, 37, 17, 1, 256, seed=0)
    assert sum(o.cached_tokens for o in send(service, items, UNCACHED).outcomes) == 0
    assert send(service, items, CACHED).outcomes[0].cached_tokens == 0
    assert service.calls == {("t", False): 4, ("t", True): 4}


def test_a_closed_loop_never_exceeds_its_concurrency_and_reaches_it() -> None:
    service = FakeService(min_concurrency=3)
    send(service, shared_prefix(20, 5, 5, 1, 256, seed=0), ReplayTraffic("t", True, 3, PATIENCE_S))
    assert service.max_running == 3


def test_an_open_loop_sends_at_the_arrivals_however_slow_the_answers() -> None:
    service = FakeService(min_concurrency=4)
    replayed = send(service, items_arriving(0.0, 0.05, 0.1, 0.15), ReplayTraffic("t", True, None, PATIENCE_S))
    assert service.max_running == 4
    assert all(outcome.late_s >= 0 for outcome in replayed.outcomes)
    assert [o.sent_s - o.late_s for o in replayed.outcomes] == pytest.approx([0.0, 0.05, 0.1, 0.15])


def test_the_time_to_first_token_is_measured_from_the_call_to_the_response() -> None:
    replayed = send(FakeService(delay_s=0.05), items_arriving(0.0, 0.0), CACHED)
    assert all(outcome.ttft_s >= 0.05 for outcome in replayed.outcomes)
    assert sum(outcome.ttft_s for outcome in replayed.outcomes) <= replayed.wall_s


def test_a_failed_request_does_not_stop_the_rest() -> None:
    def fail_two(request: prefill_pb2.PrefillRequest, response: object) -> grpc.StatusCode | None:
        return {1: grpc.StatusCode.RESOURCE_EXHAUSTED, 3: grpc.StatusCode.INTERNAL}.get(request.token_ids[0])

    outcomes = send(FakeService(fail_two), items_arriving(0.0, 0.0, 0.0, 0.0, 0.0), CACHED).outcomes
    assert [o.status for o in outcomes] == ["OK", "RESOURCE_EXHAUSTED", "OK", "INTERNAL", "OK"]
    assert [o.prompt_tokens for o in outcomes] == [5, 0, 5, 0, 5]


@pytest.mark.parametrize(
    ("usage", "traffic"),
    [
        ({"prompt_tokens": 6}, CACHED),
        ({"cached_tokens": 1}, CACHED),
        ({"computed_tokens": 6}, CACHED),
        ({"cached_tokens": 1, "computed_tokens": 4}, UNCACHED),
    ],
)
def test_a_usage_whose_counts_contradict_the_request_is_a_wrong_answer(
    usage: dict[str, int], traffic: ReplayTraffic
) -> None:
    assert send(FakeService(change_usage(**usage)), items_arriving(0.0), traffic).outcomes[0].status == "WRONG_ANSWER"


def test_an_answer_that_computed_nothing_is_wrong() -> None:
    def compute_nothing(request: prefill_pb2.PrefillRequest, response: prefill_pb2.PrefillResponse) -> None:
        response.usage.cached_tokens, response.usage.computed_tokens = 5, 0

    assert send(FakeService(compute_nothing), items_arriving(0.0), CACHED).outcomes[0].status == "WRONG_ANSWER"


class ClockedService:
    """A call that answers one request after another; each response advances the clock by `duration_s`.

    Attributes:
        received: the first token of each request, in the order in which the requests were sent.
    """

    def __init__(self, clock: FakeClock, duration_s: float) -> None:
        self.received: list[int] = []
        self._clock = clock
        self._duration_s = duration_s

    async def __call__(self, message: prefill_pb2.PrefillRequest, timeout: float) -> prefill_pb2.PrefillResponse:
        self.received.append(message.token_ids[0])
        self._clock.now_s += self._duration_s
        num_tokens = len(message.token_ids)
        return prefill_pb2.PrefillResponse(
            usage=prefill_pb2.Usage(prompt_tokens=num_tokens, computed_tokens=num_tokens)
        )


def traffic_within(limit_s: float | None, concurrency: int | None = 1) -> ReplayTraffic:
    return ReplayTraffic("t", False, concurrency, PATIENCE_S, limit_s)


def run_replay(call: object, num_items: int, traffic: ReplayTraffic, **arguments: object) -> Pass:
    """Replay prompts that all arrive at the start."""
    items = items_arriving(*[0.0] * num_items)
    messages = [build_message(item.token_ids) for item in items]
    return asyncio.run(replay(call, items, messages, traffic, **arguments))  # type: ignore[arg-type]


def test_a_limited_pass_sends_until_its_time_is_over() -> None:
    clock = FakeClock()
    service = ClockedService(clock, duration_s=30.0)
    replayed = run_replay(service, 10, traffic_within(100.0), clock=clock)
    assert service.received == [0, 1, 2, 3]  # sent at 0, 30, 60 and 90 s
    assert [outcome.index for outcome in replayed.outcomes] == [0, 1, 2, 3]
    assert (replayed.num_planned, replayed.ended_by, replayed.wall_s) == (10, Ending.TIME_LIMIT, 120.0)


def test_requests_are_sent_in_the_order_given_and_reported_by_index() -> None:
    clock = FakeClock()
    service = ClockedService(clock, duration_s=1.0)
    replayed = run_replay(service, 5, traffic_within(None), clock=clock, order=[3, 0, 4])
    assert service.received == [3, 0, 4]
    assert [outcome.index for outcome in replayed.outcomes] == [0, 3, 4]
    assert replayed.num_planned == 3


async def never_answer(message: prefill_pb2.PrefillRequest, timeout: float) -> prefill_pb2.PrefillResponse:
    await asyncio.Event().wait()
    raise AssertionError


def test_requests_that_are_never_answered_are_abandoned_at_the_limit() -> None:
    replayed = run_replay(never_answer, 10, traffic_within(0.1, concurrency=4))
    assert (replayed.outcomes, replayed.num_planned, replayed.ended_by) == ((), 10, Ending.TIME_LIMIT)


def test_a_stop_abandons_running_requests_and_keeps_earlier_outcomes() -> None:
    clock = FakeClock()
    service = ClockedService(clock, duration_s=1.0)

    async def replay_until_stop() -> Pass:
        stop = asyncio.Event()

        async def call(message: prefill_pb2.PrefillRequest, timeout: float) -> prefill_pb2.PrefillResponse:
            if message.token_ids[0] < 3:
                return await service(message, timeout)
            stop.set()
            return await never_answer(message, timeout)

        items = items_arriving(*[0.0] * 10)
        messages = [build_message(item.token_ids) for item in items]
        traffic = traffic_within(None, concurrency=2)
        return await replay(cast("PrefillCall", call), items, messages, traffic, stop=stop, clock=clock)

    replayed = asyncio.run(replay_until_stop())
    assert [outcome.index for outcome in replayed.outcomes] == [0, 1, 2]
    assert (replayed.num_planned, replayed.ended_by) == (10, Ending.INTERRUPTED)
