"""The events that the engine reports to its observers."""

from __future__ import annotations

import pytest

from radixkv.api.params import PrefillParams
from radixkv.api.sampling import Sampling
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine.engine import Engine
from radixkv.engine.observer import CompositeObserver, Observer
from radixkv.errors import OutOfBlocks, PromptTooLong, QueueFull, RadixKVError, StepFailed
from radixkv.scheduling.request import Outcome, Request
from tests.core_bench import Bench
from tests.fake_runner import FakeRunner, tokens

EVENTS = ("request_refused", "request_admitted", "step_done", "step_failed", "request_preempted", "request_ended")


class Recorder(Observer):
    """Records every event."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def request_refused(self, error: RadixKVError) -> None:
        self.events.append(("request_refused", type(error)))

    def request_admitted(self, request: Request) -> None:
        self.events.append(("request_admitted", request.arrival))

    def step_done(self, seconds: float, num_requests: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        self.events.append(("step_done", num_requests, num_prefill_tokens, num_decode_tokens))

    def step_failed(self, seconds: float, num_requests: int) -> None:
        self.events.append(("step_failed", num_requests))

    def request_preempted(self, request: Request) -> None:
        self.events.append(("request_preempted", request.arrival))

    def request_ended(self, request: Request, outcome: Outcome, error: Exception | None, now_s: float) -> None:
        self.events.append(("request_ended", request.arrival, outcome, type(error)))

    def entries_of(self, event: str) -> list[tuple[object, ...]]:
        return [recorded[1:] for recorded in self.events if recorded[0] == event]


def test_steps_are_reported_with_their_prefill_and_decode_tokens() -> None:
    recorder = Recorder()
    bench = Bench(observers=[recorder])
    bench.generate(range(8), 3)
    bench.core.step()
    bench.submit(range(100, 105))
    bench.run()
    assert recorder.entries_of("step_done") == [(1, 8, 0), (2, 5, 1), (1, 0, 1)]


def test_only_the_first_admission_of_a_request_is_reported() -> None:
    recorder = Recorder()
    bench = Bench(num_blocks=12, observers=[recorder])
    for number in range(2):
        bench.generate(range(100 * number, 100 * number + 10), 20)
    bench.run()
    assert recorder.entries_of("request_preempted")
    assert recorder.entries_of("request_admitted") == [(0,), (1,)]


def test_every_end_is_reported_with_its_reason() -> None:
    recorder = Recorder()
    bench = Bench(num_blocks=4, observers=[recorder])
    bench.prefill(range(4))
    bench.submit(range(4)).cancel()
    bench.submit(range(17))
    bench.run()
    bench.runner.fail_next = RuntimeError("broken")
    bench.submit(range(8))
    bench.run()
    assert recorder.entries_of("request_ended") == [
        (0, Outcome.FINISHED, type(None)),
        (1, Outcome.CANCELLED, type(None)),
        (2, Outcome.FAILED, OutOfBlocks),
        (3, Outcome.FAILED, StepFailed),
    ]
    assert recorder.entries_of("step_failed") == [(1,)]


def test_preemptions_are_reported() -> None:
    recorder = Recorder()
    bench = Bench(num_blocks=9, observers=[recorder])
    for start in (0, 50, 100):
        bench.generate(range(start, start + 8), 16)
    bench.run()
    preemptions = recorder.entries_of("request_preempted")
    assert len(preemptions) == bench.core.stats.load().requests.pauses > 0
    assert (0,) not in preemptions, "the oldest request is never preempted"


def test_refusals_before_queueing_are_reported_and_nothing_else_is() -> None:
    recorder = Recorder()
    config = EngineConfig(max_running_requests=1, max_waiting_requests=1)
    engine = Engine(FakeRunner(8, 4), PrefixCache(8, 4), config, observers=[recorder])  # its thread does not run
    engine.prefill(PrefillParams(tokens(range(4))))
    with pytest.raises(PromptTooLong):
        engine.prefill(PrefillParams(tokens(range(33))))
    with pytest.raises(PromptTooLong):
        engine.generate(PrefillParams(tokens(range(20))), Sampling(9), lambda chunk: None)
    engine.generate(PrefillParams(tokens(range(20))), Sampling(8), lambda chunk: None)
    with pytest.raises(QueueFull):
        engine.prefill(PrefillParams(tokens(range(4))))
    assert recorder.events == [("request_refused", error) for error in (PromptTooLong, PromptTooLong, QueueFull)]


def test_an_observer_that_raises_does_not_change_why_a_request_is_refused() -> None:
    class Broken(Observer):
        def request_refused(self, error: RadixKVError) -> None:
            raise ZeroDivisionError

    engine = Engine(FakeRunner(8, 4), PrefixCache(8, 4), EngineConfig(), observers=[Broken()])
    with pytest.raises(PromptTooLong):
        engine.prefill(PrefillParams(tokens(range(33))))


def test_several_observers_see_the_same_events_in_order() -> None:
    recorder = Recorder()
    bench = Bench(num_blocks=9, observers=[recorder, recorder])
    for start in (0, 50, 100):
        bench.generate(range(start, start + 8), 16)
    bench.runner.fail_next = RuntimeError("broken")
    bench.core.step()
    for start in (0, 50, 100):
        bench.generate(range(start, start + 8), 16)
    bench.run()
    CompositeObserver([recorder, recorder]).request_refused(QueueFull("full"))
    assert recorder.events[::2] == recorder.events[1::2]
    assert {recorded[0] for recorded in recorder.events} == set(EVENTS)


def test_the_composite_observer_passes_on_every_event() -> None:
    assert {name for name in vars(Observer) if not name.startswith("_")} == set(EVENTS)
    assert set(EVENTS) <= set(vars(CompositeObserver))
