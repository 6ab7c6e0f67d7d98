"""The requests of a batch, with an engine whose answers are computed from the token ids."""

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
    """A batch of generations of five tokens.

    Attributes:
        tokens: the streamed tokens of each request, by its index.
        ended: the indices of the requests whose result has arrived, in order.
    """

    def __init__(self, engine: Any, slots: RequestSlots | None = None) -> None:
        self.engine = engine
        self.tokens: dict[int, list[int]] = {}
        self.ended: list[int] = []
        self.batch = EngineBatch(engine, slots or RequestSlots(100), self.add, self.end)

    def start(self, first: int, on_tokens: OnTokens) -> Future[GenerateResult]:
        params = PrefillParams(np.array([first], "<u4").tobytes())
        return self.engine.generate(params, Sampling(max_new_tokens=5), on_tokens)

    def add(self, index: int, tokens: GeneratedTokens) -> None:
        assert index not in self.ended, "tokens were streamed after the result"
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
    # The last token is not streamed; it comes with the result.
    assert requests.tokens == {index: list(output[:-1]) for index, output in enumerate(outputs)}
    for first, output in enumerate(outputs):
        assert Requests(FakeEngine()).batch.run([partial(requests.start, first)]) == [output]


def test_no_requests_have_no_outputs() -> None:
    assert Requests(FakeEngine()).run(0) == []


@pytest.mark.parametrize("max_unfinished", [1, 3])
def test_the_number_of_unfinished_requests_is_bounded(max_unfinished: int) -> None:
    requests = Requests(FakeEngine(), RequestSlots(max_unfinished))
    peak_unfinished = 0
    start = requests.start

    def start_and_count(first: int, on_tokens: OnTokens) -> Future[GenerateResult]:
        nonlocal peak_unfinished
        peak_unfinished = max(peak_unfinished, first + 1 - len(requests.ended))
        return start(first, on_tokens)

    requests.start = start_and_count  # type: ignore[method-assign]
    assert len(requests.run(10)) == 10
    assert peak_unfinished == max_unfinished


def test_a_call_waits_for_a_full_queue_while_its_requests_run() -> None:
    requests = Requests(FakeEngine())
    num_refused = 0
    start = requests.start

    def start_or_refuse(first: int, on_tokens: OnTokens) -> Future[GenerateResult]:
        nonlocal num_refused
        if first > len(requests.ended):
            num_refused += 1
            raise QueueFull("engine: full")
        return start(first, on_tokens)

    requests.start = start_or_refuse  # type: ignore[method-assign]
    assert len(requests.run(5)) == 5
    assert num_refused >= 4


def test_a_call_without_running_requests_waits_for_a_full_queue() -> None:
    """Cancelled requests of an earlier call are in the queue until the next step."""
    requests = Requests(FakeEngine())
    start = requests.start
    refusals = [QueueFull("engine: full")] * 3

    def start_or_refuse(first: int, on_tokens: OnTokens) -> Future[GenerateResult]:
        if refusals:
            raise refusals.pop()
        return start(first, on_tokens)

    requests.start = start_or_refuse  # type: ignore[method-assign]
    assert len(requests.run(3)) == 3


def test_calls_of_several_threads_share_the_slots() -> None:
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

    def start_failed(on_tokens: OnTokens) -> Future[GenerateResult]:
        future: Future[GenerateResult] = Future()
        future.set_exception(StepFailed("step: failed"))
        return future

    with pytest.raises(StepFailed):
        requests.batch.run([partial(requests.start, 1), start_failed, partial(requests.start, 2)])
    assert [each.cancelled() for each in engine.futures] == [True, True]


def test_an_interrupted_caller_cancels_the_requests() -> None:
    engine = FakeEngine(is_gated=True)
    requests = Requests(engine)

    def interrupt(index: int, tokens: GeneratedTokens) -> None:
        raise KeyboardInterrupt

    requests.batch = EngineBatch(engine, RequestSlots(100), interrupt, requests.end)
    with pytest.raises(KeyboardInterrupt):
        requests.run(3)
    assert engine.futures
    assert all(each.cancelled() for each in engine.futures)


def test_a_request_that_the_engine_cancels_raises_its_reason() -> None:
    engine = FakeEngine(is_gated=True)
    requests = Requests(engine)

    def cancel(index: int, tokens: GeneratedTokens) -> None:
        engine.futures[0].cancel()

    requests.batch = EngineBatch(engine, RequestSlots(100), cancel, requests.end)
    with pytest.raises(Draining):
        requests.run(1)
