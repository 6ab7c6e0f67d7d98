"""While all requests decode, the device has its next step before the tokens of the last one are streamed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest
import torch

from radixkv.api.result import GeneratedTokens, GenerateResult
from radixkv.compute.forward import Chunk
from radixkv.compute.runner import Launch, StepResult, Wait
from radixkv.engine.observer import Observer
from radixkv.errors import StepFailed
from tests.core_bench import BLOCK_SIZE, Bench
from tests.fake_runner import continuation, tokens

PROMPT = range(10)


class Allocation:
    """Stands in for memory that a forward pass allocates."""


class EventLog:
    """Records the events that a bench's runner and its callers see, in order."""

    def __init__(self, bench: Bench) -> None:
        self.entries: list[str] = []
        self._bench = bench
        self._begin = bench.runner.begin
        self._prepare = bench.runner.prepare
        bench.runner.begin = self.begin  # type: ignore[method-assign]
        bench.runner.prepare = self.prepare  # type: ignore[method-assign]

    def prepare(self, chunks: Sequence[Chunk]) -> Launch:
        self.entries.append("prepare")
        return self._prepare(chunks)

    def begin(self, chunks: Sequence[Chunk]) -> Wait:
        self.entries.append("start")
        wait = self._begin(chunks)

        def record_and_wait() -> StepResult:
            self.entries.append("wait")
            return wait()

        return record_and_wait

    def of_next_step(self) -> list[str]:
        """Compute one step of the engine. Returns its entries."""
        self.entries.clear()
        self._bench.core.step()
        return list(self.entries)


def start_decoding(bench: Bench, count: int = 30) -> tuple[Future[GenerateResult], EventLog]:
    """Start a generation, and return while its third token is computed. Two have been streamed and logged."""
    log = EventLog(bench)
    future = bench.generate(PROMPT, count, on_tokens=lambda _: log.entries.append("stream"))
    assert log.of_next_step() == ["start", "wait", "stream"]
    assert log.of_next_step() == ["start", "prepare", "wait", "start", "stream"]
    return future, log


def expected_tokens(count: int) -> tuple[int, ...]:
    """Return the first tokens that the fake model generates after `PROMPT`."""
    return continuation(PROMPT, count)


def test_the_device_has_its_next_step_before_a_token_is_streamed() -> None:
    bench = Bench()
    future, log = start_decoding(bench)
    for _ in range(27):
        assert log.of_next_step() == ["prepare", "wait", "start", "stream"]
    assert log.of_next_step() == ["wait"], "no step follows, since the length is known in advance"
    assert future.result(0).token_ids == expected_tokens(30)
    assert bench.runner.steps == [[(0, 10)], *[[(n, n + 1)] for n in range(10, 39)]], (
        "each token except the last is computed once"
    )


def test_the_blocks_of_requests_that_end_are_free_before_the_next_step() -> None:
    bench = Bench()
    log = EventLog(bench)
    last = expected_tokens(4)[-1]
    short, long = bench.generate(PROMPT, 9, stop_token_ids=frozenset({last})), bench.generate(range(50, 60), 8)
    assert log.of_next_step() == ["start", "wait"]
    assert log.of_next_step() == ["start", "prepare", "wait", "start"]
    assert log.of_next_step() == ["prepare", "wait", "start"]
    assert log.of_next_step() == ["prepare", "wait"]
    assert short.result(0).token_ids == expected_tokens(4)
    bench.run()
    assert long.done()
    assert bench.cache.pool.num_leased == 0


def test_tokens_count_for_their_tenant_whenever_their_step_was_started() -> None:
    served = []
    for is_asynchronous in (True, False):
        bench = Bench(num_blocks=512, weights={"a": 2.0})
        bench.runner.is_asynchronous = is_asynchronous
        futures = [bench.generate([number], 40, tenant="ab"[number % 2]) for number in range(5)]
        while min(len(future.streamed) for future in futures) < 20:
            bench.core.step()
        bench.has_pending_calls = True  # no step runs after this
        while min(len(future.streamed) for future in futures) < 25:
            bench.core.step()
        served.append({queue.tenant: queue.served for queue in bench.core._scheduler._queues})
    assert served[0] == served[1]


def test_the_duration_of_a_step_is_measured_from_its_start_to_the_end_of_the_wait() -> None:
    seconds: list[float] = []

    class Stopwatch(Observer):
        def step_done(self, took_s: float, num_requests: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
            seconds.append(took_s)

    bench = Bench(observers=[Stopwatch()])
    _, log = start_decoding(bench)
    for number in range(1, 5):
        bench.clock.now_s += number
        assert log.of_next_step() == ["prepare", "wait", "start", "stream"]
    assert seconds == [0, 0, 1, 2, 3, 4]


class TestAPreparedStepIsDiscarded:
    """Because of something that happens while the step before it is computed."""

    def act_during_next_run(self, bench: Bench, action: Callable[[], object]) -> None:
        run = bench.runner.run

        def act_and_run(chunks: Sequence[Chunk]) -> StepResult:
            bench.runner.run = run  # type: ignore[method-assign]
            action()
            return run(chunks)

        bench.runner.run = act_and_run  # type: ignore[method-assign]

    def test_after_a_cancel(self) -> None:
        bench = Bench()
        future, log = start_decoding(bench)
        self.act_during_next_run(bench, future.cancel)
        assert log.of_next_step() == ["prepare", "wait", "stream"]
        bench.core.step()
        assert bench.cache.pool.num_leased == 0

    def test_after_an_arrival(self) -> None:
        bench = Bench()
        future, log = start_decoding(bench)
        self.act_during_next_run(bench, lambda: setattr(bench, "has_pending_calls", True))
        assert log.of_next_step() == ["prepare", "wait", "stream"]
        second = bench.submit(range(50, 60))
        bench.run()
        assert second.done()
        assert future.result(0).token_ids == expected_tokens(30)

    def test_when_one_of_two_requests_ends_at_the_end_of_a_block(self) -> None:
        """The block for its next token is freed. The other request continues in the block that was reserved for it."""
        bench = Bench(num_blocks=16)
        last = expected_tokens(3)[-1]
        short = bench.generate(PROMPT, 9, stop_token_ids=frozenset({last}))
        long = bench.generate(range(50, 60), 6)
        log = EventLog(bench)
        while not short.done():
            entries = log.of_next_step()
            bench.cache.check()
        assert entries == ["prepare", "wait"]
        bench.run()
        assert len(long.result(0).token_ids) == 6
        assert bench.cache.pool.num_leased == 0

    def test_when_values_are_not_finite(self) -> None:
        bench = Bench()
        future, log = start_decoding(bench)
        bench.runner.not_finite = tokens([*PROMPT, *expected_tokens(2)])
        assert log.of_next_step() == ["prepare", "wait"]
        assert isinstance(future.exception(0), StepFailed)

    def test_when_a_step_fails(self) -> None:
        bench = Bench()
        future, log = start_decoding(bench)
        bench.runner.fail_next = RuntimeError("device lost")
        assert log.of_next_step() == ["prepare", "wait"]
        assert isinstance(future.exception(0), StepFailed)
        assert not bench.core.has_work
        assert bench.cache.pool.num_leased == 0


def test_a_step_that_cannot_be_prepared_is_scheduled_as_usual(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    future, log = start_decoding(bench)

    def fail(chunks: Sequence[Chunk]) -> Launch:
        raise RuntimeError("no pinned memory")

    bench.runner.prepare = fail  # type: ignore[method-assign]
    assert log.of_next_step() == ["wait", "stream"]
    assert log.of_next_step() == ["start", "wait", "stream"]
    assert "a step of 1 requests could not be prepared" in caplog.text
    bench.run()
    assert future.result(0).token_ids == expected_tokens(30)


class TestNoStepIsStartedAhead:
    def test_of_a_prompt(self) -> None:
        bench = Bench(max_step_tokens=8)
        log = EventLog(bench)
        bench.submit(range(20))
        assert [log.of_next_step() for _ in range(3)] == 3 * [["start", "wait"]]

    def test_while_calls_are_pending(self) -> None:
        bench = Bench()
        _, log = start_decoding(bench)
        bench.has_pending_calls = True
        assert log.of_next_step() == ["wait", "stream"]
        assert log.of_next_step() == ["start", "wait", "stream"]

    def test_while_a_request_waits(self) -> None:
        bench = Bench(num_blocks=8, max_running_requests=2)
        _, log = start_decoding(bench)
        waiting = bench.submit(range(100, 100 + 6 * BLOCK_SIZE))
        assert log.of_next_step() == ["wait", "stream"]
        assert log.of_next_step() == ["start", "wait", "stream"]
        assert not waiting.done()

    def test_while_a_running_request_does_not_fit_into_the_step(self) -> None:
        """Three requests decode in steps of two tokens."""
        bench = Bench(max_step_tokens=2)
        futures = [bench.generate([number], 9) for number in range(3)]
        log = EventLog(bench)
        while min(len(future.streamed) for future in futures) < 2:
            assert log.of_next_step() == ["start", "wait"]

    def test_after_a_cancel(self) -> None:
        bench = Bench()
        future, log = start_decoding(bench)
        future.cancel()
        assert log.of_next_step() == ["wait", "stream"]
        bench.core.step()
        assert not bench.core.has_work

    def test_after_a_deadline(self) -> None:
        bench = Bench()
        _, log = start_decoding(bench)
        late = bench.generate(range(50, 60), 9, deadline_s=5.0)
        while len(late.streamed) < 3:
            bench.core.step()
        bench.clock.now_s = 5.0
        assert log.of_next_step() == ["wait", "stream"]
        bench.core.step()
        assert late.done()

    def test_after_a_held_lease_expired(self) -> None:
        bench = Bench(held_lease_ttl_s=5.0)
        bench.prefill(range(50, 60), hold_lease=True)
        _, log = start_decoding(bench)
        bench.clock.now_s = 5.0
        assert log.of_next_step() == ["wait", "stream"]
        bench.core.step()
        assert len(bench.core.held_leases) == 0

    def test_that_needs_a_preemption(self, caplog: pytest.LogCaptureFixture) -> None:
        bench = Bench(num_blocks=10)
        log = EventLog(bench)
        futures = [bench.generate(range(start, start + 10), 20) for start in (0, 50)]
        steps = []
        while not bench.core.stats.load().requests.pauses:
            steps.append(log.of_next_step())
        assert steps[-1] == ["start", "wait"], "a request was preempted before this step"
        assert steps[-2] == ["wait"], "there was no block for the next tokens of both requests"
        assert not caplog.records, "a step that needs a preemption is no error"
        bench.run()
        assert [len(future.result(0).token_ids) for future in futures] == [20, 20]

    def test_of_tokens_that_are_recomputed(self) -> None:
        bench = Bench(num_blocks=12, max_step_tokens=8)
        log = EventLog(bench)
        futures = [bench.generate(range(start, start + 10), 24, read_cache=False) for start in (0, 50)]
        while not bench.core.stats.load().requests.pauses:
            bench.core.step()
        while not futures[0].done():
            bench.core.step()
        bench.runner.steps.clear()
        assert log.of_next_step() == ["start", "wait"]
        assert bench.runner.steps == [[(0, 8)]], "the first chunk of the tokens that are recomputed"
        assert log.of_next_step() == ["start", "wait"]
        bench.run()
        assert len(futures[1].result(0).token_ids) == 24

    def test_by_a_synchronous_device(self) -> None:
        bench = Bench()
        bench.runner.is_asynchronous = False
        log = EventLog(bench)
        future = bench.generate(PROMPT, 5)
        while not future.done():
            assert log.of_next_step() == ["start", "wait"]


class TestTheMaximumNumberOfRequestsRuns:
    """No request is admitted before another one ends, so arrivals and waiting requests change nothing until then."""

    def test_waiting_requests_do_not_delay_the_next_step(self) -> None:
        bench = Bench(max_running_requests=1)
        future, log = start_decoding(bench)
        waiting = bench.generate(range(50, 60), 3)
        bench.has_pending_calls = True
        for _ in range(27):
            assert log.of_next_step() == ["prepare", "wait", "start", "stream"]
        assert log.of_next_step() == ["wait"]
        assert future.result(0).token_ids == expected_tokens(30)
        assert log.of_next_step() == ["start", "wait"], "the prompt of the request that waited"
        bench.run()
        assert waiting.done()

    def test_tokens_count_for_their_tenant_while_others_wait(self) -> None:
        served = []
        for is_asynchronous in (True, False):
            bench = Bench(num_blocks=512, max_running_requests=2, weights={"a": 2.0})
            bench.runner.is_asynchronous = is_asynchronous
            futures = [bench.generate([number], 40, tenant="ab"[number % 2]) for number in range(6)]
            bench.run()
            assert all(future.done() for future in futures)
            served.append((bench.core._scheduler._queues._served_before, bench.runner.steps))
        assert served[0] == served[1]

    def test_a_tenant_without_a_running_request_preempts_one_of_another_tenant(self) -> None:
        bench = Bench(max_running_requests=2)
        futures = [bench.generate([number], 40, tenant="a") for number in range(2)]
        log = EventLog(bench)
        while len(futures[1].streamed) < 3:
            bench.core.step()
        other = bench.submit(range(50, 60), tenant="b")
        assert log.of_next_step() == ["wait"]
        assert log.of_next_step() == ["start", "wait"]
        assert other.done()
        assert bench.core.stats.load().requests.pauses == 1


@pytest.mark.parametrize("fails_at", ["start", "wait"])
def test_a_step_started_ahead_fails_after_the_last_token_was_streamed(fails_at: str) -> None:
    bench = Bench()
    future, log = start_decoding(bench)
    start = bench.runner.begin

    def fail(chunks: Sequence[Chunk]) -> Wait:
        log.entries.append("fail")
        if fails_at == "start":
            raise RuntimeError("device lost")

        def wait() -> StepResult:
            raise RuntimeError("device lost")

        return wait

    bench.runner.begin = fail  # type: ignore[method-assign]
    assert log.of_next_step() == ["prepare", "wait", "fail", "stream"]
    bench.runner.begin = start  # type: ignore[method-assign]
    bench.core.step()
    assert isinstance(future.exception(0), StepFailed)
    assert bench.core.num_failed_steps == 1
    assert bench.cache.pool.num_leased == 0


def test_a_request_whose_callback_failed_gets_nothing_of_the_running_step() -> None:
    bench = Bench()

    def fail(chunk: GeneratedTokens) -> None:
        if chunk.usage.generated_tokens == 3:
            raise ZeroDivisionError

    future, other = bench.generate(PROMPT, 9, on_tokens=fail), bench.generate(range(50, 60), 9)
    while len(future.streamed) < 3:
        bench.core.step()
    bench.core.step()  # ends the step that was running when the callback failed
    bench.core.step()
    assert isinstance(future.exception(0), StepFailed)
    assert future.streamed == [*expected_tokens(3)]
    bench.run()
    assert len(other.result(0).token_ids) == 9
    assert bench.cache.pool.num_leased == 0


def test_a_request_whose_callback_and_step_fail_is_forgotten() -> None:
    bench = Bench()

    def fail(chunk: GeneratedTokens) -> None:
        if chunk.usage.generated_tokens == 3:
            bench.runner.fail_next = RuntimeError("device lost")  # fails the next step, which has been started
            raise ZeroDivisionError

    future = bench.generate(PROMPT, 9, on_tokens=fail)
    bench.run()
    assert isinstance(future.exception(0), StepFailed)
    assert not bench.core._cancellations.is_any_due(bench.clock.now_s)


def test_a_failed_start_of_a_step_frees_its_device_memory() -> None:
    """The error must not keep what the forward pass had allocated so far."""
    bench = Bench(num_blocks=64, max_step_tokens=16)
    start, alive = bench.runner.begin, weakref.WeakSet[Allocation]()

    def allocate(chunks: Sequence[Chunk]) -> Wait:
        allocation = Allocation()
        alive.add(allocation)
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        if num_tokens > 9 or len(alive) > 1:  # there is memory for one step of nine tokens
            raise torch.OutOfMemoryError("CUDA out of memory")
        return start(chunks)

    bench.runner.begin = allocate  # type: ignore[method-assign]
    gc.disable()
    try:
        assert bench.prefill(range(32)).usage.computed_tokens == 32
    finally:
        gc.enable()
    assert bench.runner.steps == [[(0, 8)], [(8, 16)], [(16, 24)], [(24, 32)]]


def test_the_outputs_of_a_step_are_freed_before_the_next_is_started() -> None:
    bench = Bench()
    start, alive, num_alive = bench.runner.begin, weakref.WeakSet[Allocation](), []

    def allocate(chunks: Sequence[Chunk]) -> Wait:
        num_alive.append(len(alive))
        wait, outputs = start(chunks), Allocation()
        alive.add(outputs)

        def read() -> StepResult:
            assert outputs in alive
            return wait()

        return read

    bench.runner.begin = allocate  # type: ignore[method-assign]
    gc.disable()
    try:
        bench.generate(PROMPT, 9)
        bench.run()
    finally:
        gc.enable()
    assert num_alive == [0] * 9


def test_a_step_that_runs_when_the_engine_stops_is_discarded() -> None:
    bench = Bench()
    future, _ = start_decoding(bench)
    bench.core.close(StepFailed("stopped"))
    assert isinstance(future.exception(0), StepFailed)
    bench.cache.check()
    assert bench.cache.pool.num_leased == 0


def test_no_step_is_started_ahead_for_a_generation_that_its_caller_finished() -> None:
    bench = Bench()
    future, log = start_decoding(bench)
    future.finish()
    assert "start" not in log.of_next_step(), "the running step is the last one"
    bench.run()
    assert future.result(0).token_ids == expected_tokens(3)
    assert bench.cache.pool.num_leased == 0
