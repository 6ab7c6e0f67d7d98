"""Requests of one call, with an engine whose answers are computed from the token ids."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import pytest

from radixkv.api.params import PrefillParams
from radixkv.api.result import GeneratedTokens, GenerateResult, OnTokens
from radixkv.api.sampling import Sampling
from radixkv.errors import Draining, QueueFull, StepFailed
from radixkv.service.offline.engine_batch import EngineBatch, progress_bar
from tests.service.fake_engine import FakeEngine


class Requests:
    """Generations of five tokens, and what the batch does with them."""

    def __init__(self, engine: Any, max_unfinished: int = 100) -> None:
        self.engine = engine
        self.tokens: dict[int, list[int]] = {}
        self.ended: list[int] = []
        self.batch = EngineBatch(engine, max_unfinished, self.add, self.end)

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
def test_at_most_some_requests_are_unfinished(max_unfinished: int) -> None:
    requests = Requests(FakeEngine(), max_unfinished)
    most = 0
    start = requests.start

    def counted(first: int, on_tokens: OnTokens) -> Future[GenerateResult]:
        nonlocal most
        most = max(most, first + 1 - len(requests.ended))
        return start(first, on_tokens)

    requests.start = counted  # type: ignore[method-assign]
    assert len(requests.run(10)) == 10
    assert most == max_unfinished


def test_a_full_queue_is_waited_for_if_own_requests_run() -> None:
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


def test_a_full_queue_without_own_requests_is_an_error() -> None:
    engine = FakeEngine()
    engine.refusal = QueueFull("engine: full")
    with pytest.raises(QueueFull):
        Requests(engine).run(3)


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

    requests.batch = EngineBatch(engine, 100, interrupt, requests.end)
    with pytest.raises(KeyboardInterrupt):
        requests.run(3)
    assert all(each.cancelled() for each in engine.futures)


def test_a_request_that_the_engine_cancels_raises_its_reason() -> None:
    engine = FakeEngine(is_gated=True)
    requests = Requests(engine)

    def cancel(index: int, tokens: GeneratedTokens) -> None:
        engine.futures[0].cancel()

    requests.batch = EngineBatch(engine, 100, cancel, requests.end)
    with pytest.raises(Draining):
        requests.run(1)


def test_a_progress_bar_is_shown_only_if_requested_or_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for wanted, is_shown in ((None, False), (False, False), (True, True)):
        with progress_bar(3, wanted, "Computed prompts") as on_end:
            for _ in range(3):
                on_end()
        assert ("Computed prompts" in capsys.readouterr().err) == is_shown
