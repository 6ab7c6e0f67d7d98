"""Requests of one call, with an engine whose answers are computed from the token ids."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from radixkv.api.params import PrefillParams
from radixkv.api.result import GeneratedTokens, GenerateResult, OnTokens
from radixkv.api.sampling import Sampling
from radixkv.errors import Draining, QueueFull, StepFailed
from radixkv.service.offline.engine_batch import EngineBatch
from radixkv.service.offline.request_slots import RequestSlots
from tests.patience import PATIENCE_S, wait_until
from tests.service.fake_engine import FakeEngine


class Requests:
    """Generations of five tokens, and what the batch does with them."""

    def __init__(self, engine: Any, slots: RequestSlots | None = None) -> None:
        self.engine = engine
        self.tokens: dict[int, list[int]] = {}
        self.ended: list[int] = []
        self.batch = EngineBatch(engine, slots or RequestSlots(100), self.add, self.end)

    def start(self, first: int, on_tokens: OnTokens) -> Future[GenerateResult]:
        params = PrefillParams(np.array([first], "<u4").tobytes())
        return self.engine.generate(params, Sampling(max_new_tokens=5), on_tokens)

    def add(self, index: int, tokens: GeneratedTokens) -> None:
        assert index not in self.ended, "tokens come before the end"
        self.tokens.setdefault(index, []).extend(tokens.token_ids)

    def end(self, index: int, result: GenerateResult) -> tuple[int, ...]:
        self.ended.append(index)
        return result.token_ids

    def run(self, count: int) -> list[tuple[int, ...]]:
        return self.batch.run([partial(self.start, first) for first in range(count)])


def test_outputs_are_in_the_order_of_the_requests_and_tokens_come_before_them() -> None:
    requests = Requests(FakeEngine())
    outputs = requests.run(20)
    assert [len(each) for each in outputs] == [5] * 20
    assert len(set(outputs)) == 20
    assert requests.tokens == {index: list(each[:-1]) for index, each in enumerate(outputs)}
    assert outputs == [Requests(FakeEngine()).batch.run([partial(requests.start, first)])[0] for first in range(20)]


def test_no_requests_have_no_outputs() -> None:
    assert Requests(FakeEngine()).run(0) == []


@pytest.mark.parametrize("max_unfinished", [1, 3])
def test_the_number_of_unfinished_requests_is_bounded(max_unfinished: int) -> None:
    requests = Requests(FakeEngine(), RequestSlots(max_unfinished))
    most = 0
    start = requests.start

    def counted(first: int, on_tokens: OnTokens) -> Future[GenerateResult]:
        nonlocal most
        most = max(most, first + 1 - len(requests.ended))
        return start(first, on_tokens)

    requests.start = counted  # type: ignore[method-assign]
    assert len(requests.run(10)) == 10
    assert most == max_unfinished


def test_a_call_waits_for_a_full_queue_while_its_requests_run() -> None:
    requests = Requests(FakeEngine())
    refused = 0
    start = requests.start

    def refusing(first: int, on_tokens: OnTokens) -> Future[GenerateResult]:
        nonlocal refused
        if first > len(requests.ended):
            refused += 1
            raise QueueFull("engine: full")
        return start(first, on_tokens)

    requests.start = refusing  # type: ignore[method-assign]
    assert len(requests.run(5)) == 5
    assert refused >= 4


def test_a_call_without_requests_waits_for_a_full_queue() -> None:
    """Cancelled requests of an earlier call are in the queue until the next step."""
    requests = Requests(FakeEngine())
    start = requests.start
    refusals = [QueueFull("engine: full")] * 3

    def refusing(first: int, on_tokens: OnTokens) -> Future[GenerateResult]:
        if refusals:
            raise refusals.pop()
        return start(first, on_tokens)

    requests.start = refusing  # type: ignore[method-assign]
    assert len(requests.run(3)) == 3


def test_calls_of_several_threads_share_what_may_be_unfinished() -> None:
    engine, slots = FakeEngine(is_gated=True), RequestSlots(4)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(Requests(engine, slots).run, 8)
        wait_until(lambda: len(engine.futures) == 4)
        second = threads.submit(Requests(engine, slots).run, 2)
        wait_until(lambda: slots._num_calls == 2)
        assert len(engine.futures) == 4
        engine.open_gate()
        assert [len(each.result(PATIENCE_S)) for each in (first, second)] == [8, 2]
    assert slots._num_taken == 0


def test_a_request_that_has_ended_releases_its_slot_while_others_run() -> None:
    slots = RequestSlots(3)
    requests = Requests(FakeEngine(), slots)
    num_taken: list[int] = []

    def end(index: int, result: GenerateResult) -> None:
        num_taken.append(slots._num_taken)

    EngineBatch(requests.engine, slots, requests.add, end).run([partial(requests.start, first) for first in range(3)])
    assert num_taken == [3, 2, 1]


def test_a_call_that_fails_releases_its_slots() -> None:
    slots = RequestSlots(2)
    engine = FakeEngine()
    engine.refusal = Draining("engine: stopped")
    for _ in range(3):
        with pytest.raises(Draining):
            Requests(engine, slots).run(3)
    assert slots._num_taken == 0


def test_if_a_request_fails_the_others_are_cancelled() -> None:
    engine = FakeEngine(is_gated=True)
    requests = Requests(engine)

    def fails(on_tokens: OnTokens) -> Future[GenerateResult]:
        future: Future[GenerateResult] = Future()
        future.set_exception(StepFailed("step: failed"))
        return future

    with pytest.raises(StepFailed):
        requests.batch.run([partial(requests.start, 1), fails, partial(requests.start, 2)])
    assert [each.cancelled() for each in engine.futures] == [True, True]


def test_an_interrupted_caller_cancels_the_requests() -> None:
    engine = FakeEngine(is_gated=True)
    requests = Requests(engine)

    def interrupt(index: int, tokens: GeneratedTokens) -> None:
        raise KeyboardInterrupt

    requests.batch = EngineBatch(engine, RequestSlots(100), interrupt, requests.end)
    with pytest.raises(KeyboardInterrupt):
        requests.run(3)
    assert all(each.cancelled() for each in engine.futures)


def test_a_request_that_the_engine_cancels_raises_its_reason() -> None:
    engine = FakeEngine(is_gated=True)
    requests = Requests(engine)

    def cancel(index: int, tokens: GeneratedTokens) -> None:
        engine.futures[0].cancel()

    requests.batch = EngineBatch(engine, RequestSlots(100), cancel, requests.end)
    with pytest.raises(Draining):
        requests.run(1)
