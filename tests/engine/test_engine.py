"""The engine and its thread: answers, refusals, drains, steps that hang or fail, and a thread that fails."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from radixkv.api.caller import Caller
from radixkv.api.miss_reason import MissReason
from radixkv.api.params import PrefillParams
from radixkv.api.result import GeneratedTokens
from radixkv.api.retention import Retention
from radixkv.api.sampling import Sampling
from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.tenants import Quota
from radixkv.config import EngineConfig
from radixkv.engine.engine import Engine
from radixkv.errors import (
    BeyondCeiling,
    Draining,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    StepFailed,
    StepHangs,
    UnknownAdapter,
    UnknownLease,
)
from tests.engine.gated_runner import BLOCK_SIZE, ENDLESS_S, NUM_BLOCKS, GatedRunner, params
from tests.fake_runner import VOCAB_SIZE, next_token, tokens
from tests.fakes import FakeClock
from tests.patience import PATIENCE_S, wait_until


@pytest.fixture
def runner() -> GatedRunner:
    return GatedRunner()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The clock of the engine's watchdog, which lets the test decide how long a step takes."""
    clock = FakeClock()
    monkeypatch.setattr("radixkv.engine.watchdog.time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr("radixkv.engine.watchdog._MAX_PERIOD_S", 0.005)
    return clock


@pytest.fixture
def engine(runner: GatedRunner):  # type: ignore[no-untyped-def]
    config = EngineConfig(max_step_tokens=8, max_running_requests=2, max_waiting_requests=2, held_lease_ttl_s=0.2)
    engine = Engine(runner, PrefixCache(NUM_BLOCKS, BLOCK_SIZE), config)
    engine.start()
    yield engine
    runner.gate.set()
    engine.stop()


def test_a_prefill_is_answered_and_its_prompt_cached(engine: Engine) -> None:
    result = engine.prefill(params(range(20))).result(PATIENCE_S)
    assert result.next_token_id == next_token(tokens(range(20)))
    assert engine.probe(tokens(range(20))).result(PATIENCE_S).cached_tokens == 19
    engine.check().result(PATIENCE_S)


def test_probe_changes_nothing(engine: Engine) -> None:
    before = engine.load().result(PATIENCE_S).blocks
    probed = engine.probe(tokens(range(20)), Caller("a")).result(PATIENCE_S)
    assert (probed.cached_tokens, probed.prompt_tokens, probed.miss_reason) == (0, 20, MissReason.COLD)
    assert engine.load().result(PATIENCE_S).blocks == before


@pytest.mark.parametrize(
    ("packed_ids", "error", "message"),
    [
        (b"\1\0\0", InvalidRequest, "token_ids: expected little-endian uint32 ids, got 3 bytes"),
        (b"", InvalidRequest, "token_ids: expected at least 1 token, got 0"),
        (
            tokens([1, 2, VOCAB_SIZE]),
            InvalidRequest,
            r"token_ids\[2\]: expected an id below the vocabulary size 256, got a larger one",
        ),
        (tokens([2**32 - 1]), InvalidRequest, r"token_ids\[0\]"),
        (tokens([0] * 129), PromptTooLong, "token_ids: expected at most 128 tokens, got 129"),
    ],
)
def test_an_invalid_prompt_is_refused_immediately(engine: Engine, packed_ids: bytes, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        engine.prefill(PrefillParams(packed_ids))
    with pytest.raises(error, match=message):
        engine.probe(packed_ids)
    assert engine.load().result(PATIENCE_S).requests.failed == 0


def test_a_prompt_that_fills_the_whole_pool_is_served_twice(engine: Engine) -> None:
    for _ in range(2):
        assert engine.prefill(params([7] * 128)).result(PATIENCE_S).usage.prompt_tokens == 128


def test_a_prompt_longer_than_the_model_allows_is_refused_even_if_the_pool_has_room() -> None:
    engine = Engine(GatedRunner(max_tokens=10), PrefixCache(NUM_BLOCKS, BLOCK_SIZE), EngineConfig())
    with pytest.raises(PromptTooLong, match="at most 10 tokens, got 11"):
        engine.prefill(params(range(11)))


def test_an_unknown_adapter_is_refused(engine: Engine) -> None:
    with pytest.raises(UnknownAdapter):
        engine.prefill(params(range(4), adapter="french"))


def test_too_many_unfinished_requests_are_refused(engine: Engine, runner: GatedRunner) -> None:
    runner.gate.clear()
    futures = [engine.prefill(params(range(i, i + 8))) for i in range(4)]
    with pytest.raises(QueueFull):
        engine.prefill(params(range(8)))
    runner.gate.set()
    for future in futures:
        future.result(PATIENCE_S)
    engine.prefill(params(range(8))).result(PATIENCE_S)


def test_cancelled_requests_count_until_their_blocks_are_released(engine: Engine, runner: GatedRunner) -> None:
    runner.gate.clear()
    for i in range(4):
        engine.prefill(params(range(i, i + 8))).cancel()
    with pytest.raises(QueueFull):
        engine.prefill(params(range(8)))
    runner.gate.set()
    wait_until(lambda: engine.load().result(PATIENCE_S).requests.cancelled == 4)
    assert engine.prefill(params(range(8))).result(PATIENCE_S).usage.prompt_tokens == 8


def test_a_call_that_fails_in_the_engine_fails_its_caller_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._core.stats, "stats", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.stats().result(PATIENCE_S)
    assert engine.prefill(params(range(8))).result(PATIENCE_S).usage.prompt_tokens == 8


def test_calls_that_wait_are_bounded_by_tenant_and_requests_are_not_refused_for_them(runner: GatedRunner) -> None:
    config = EngineConfig(max_waiting_calls=3, max_tenant_calls=2)
    engine = Engine(runner, PrefixCache(NUM_BLOCKS, BLOCK_SIZE), config)
    engine.start()
    runner.gate.clear()
    running = engine.prefill(params(range(8)))
    assert runner.entered.wait(PATIENCE_S)
    prompt, acme = tokens(range(4)), Caller("acme")
    calls = [engine.release("x", acme), engine.probe(prompt, acme)]
    with pytest.raises(QueueFull, match="of this tenant"):
        engine.retain(prompt, Retention(60), acme)
    calls.append(engine.probe(prompt, Caller("other")))
    calls.append(engine.probe(prompt, Caller("third")))  # replaces the newest call of acme
    for call in (lambda: engine.purge(tenant="acme"), lambda: engine.stats(tenant="acme")):
        with pytest.raises(QueueFull):
            call()
    calls += [engine.purge(), engine.stats(), engine.load()]
    request = engine.prefill(params(range(8), "acme"))
    runner.gate.set()
    refusals = [type(call.exception(PATIENCE_S)) for call in calls]
    assert refusals == [UnknownLease, QueueFull] + [type(None)] * 5
    assert running.result(PATIENCE_S).usage.prompt_tokens == request.result(PATIENCE_S).usage.prompt_tokens == 8
    engine.stop()


def test_cancelling_during_a_step_returns_the_blocks(engine: Engine, runner: GatedRunner) -> None:
    runner.gate.clear()
    future = engine.prefill(params(range(20)))
    assert runner.entered.wait(PATIENCE_S)
    assert future.cancel()
    runner.gate.set()
    load = engine.load().result(PATIENCE_S)
    while load.requests.cancelled == 0:
        load = engine.load().result(PATIENCE_S)
    assert load.blocks.leased == 0
    engine.check().result(PATIENCE_S)


def test_an_idle_engine_expires_held_leases(engine: Engine) -> None:
    held = engine.prefill(params(range(8), hold_lease=True)).result(PATIENCE_S).held_lease
    assert held is not None
    wait_until(lambda: len(engine._core.held_leases) == 0)
    with pytest.raises(UnknownLease):
        engine.release(held.lease_id).result(PATIENCE_S)


def test_a_drain_finishes_running_requests_and_refuses_new_ones(engine: Engine, runner: GatedRunner) -> None:
    runner.gate.clear()
    running = engine.prefill(params(range(20)))
    assert runner.entered.wait(PATIENCE_S)
    drained: list[bool] = []
    thread = threading.Thread(target=lambda: drained.append(engine.drain(PATIENCE_S)))
    thread.start()
    wait_until(lambda: not engine.is_healthy)
    with pytest.raises(Draining):
        engine.prefill(params(range(4)))
    runner.gate.set()
    thread.join(PATIENCE_S)
    assert drained == [True]
    assert running.result(0).usage.prompt_tokens == 20


def test_a_drain_cancels_requests_that_do_not_end_in_time(engine: Engine, runner: GatedRunner) -> None:
    runner.gate.clear()
    running = engine.prefill(params(range(20)))
    assert engine.drain(0.01) is False
    assert running.cancelled()


def test_a_tenant_fills_only_its_own_queue(runner: GatedRunner) -> None:
    config = EngineConfig(max_tenant_requests=2, max_running_requests=2, max_waiting_requests=2)
    engine = Engine(runner, PrefixCache(NUM_BLOCKS, BLOCK_SIZE), config)
    engine.start()
    runner.gate.clear()
    futures = [engine.prefill(params(range(i, i + 8), tenant="busy")) for i in range(2)]
    with pytest.raises(QueueFull, match="expected fewer than 2 unfinished requests of this tenant, got 2"):
        engine.prefill(params(range(8), tenant="busy"))
    futures.append(engine.prefill(params(range(8), tenant="other")))
    runner.gate.set()
    for future in futures:
        future.result(PATIENCE_S)
    engine.prefill(params(range(8), tenant="busy")).result(PATIENCE_S)
    engine.stop()


def test_a_request_beyond_its_tenants_ceiling_is_refused_immediately(runner: GatedRunner) -> None:
    cache = PrefixCache(NUM_BLOCKS, BLOCK_SIZE, quotas={"acme": Quota(ceiling_blocks=3)})
    engine = Engine(runner, cache, EngineConfig())
    with pytest.raises(BeyondCeiling, match="token_ids: expected at most 12 tokens, this tenant's ceiling, got 13"):
        engine.prefill(params(range(13), tenant="acme"))
    with pytest.raises(BeyondCeiling, match="at most 13 tokens together, by this tenant's ceiling, got 4 and 10"):
        engine.generate(params(range(4), tenant="acme"), Sampling(10), lambda _: None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_logprobs": 3}, "prefill.top_logprobs: expected none in a generation, got 3"),
        ({"return_logits": True}, "prefill.return_logits: expected none in a generation, got True"),
        ({"hold_lease": True}, "prefill.hold_lease: expected none in a generation, got True"),
        ({"urgency": 101}, "priority: expected an urgency of 0 to 100, got 101"),
    ],
)
def test_options_that_a_generation_does_not_have_are_refused(
    engine: Engine, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        engine.generate(params(range(4), **fields), Sampling(), lambda _: None)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], r"^prefill\.token_ids: expected at least 1 token, got 0$"),
        ([VOCAB_SIZE], r"^prefill\.token_ids\[0\]: expected an id below the vocabulary size 256, got a larger one$"),
    ],
)
def test_an_invalid_prompt_of_a_generation_is_refused_by_the_name_of_its_field(
    engine: Engine, ids: list[int], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        engine.generate(params(ids), Sampling(), lambda _: None)


def test_a_prefill_has_no_decoding_time(engine: Engine) -> None:
    timing = engine.prefill(params(range(20))).result(PATIENCE_S).timing
    assert (timing.decode_us, timing.prefill_us > 0) == (0, True)
    timing = engine.generate(params(range(20)), Sampling(4), lambda _: None).result(PATIENCE_S).timing
    assert timing.decode_us > 0


def test_a_generation_that_can_never_fit_is_refused_immediately(engine: Engine) -> None:
    max_tokens = (NUM_BLOCKS - 1) * BLOCK_SIZE  # a generation continues in a copy of the last block of its prompt
    result = engine.generate(params(range(4)), Sampling(max_tokens - 4), lambda _: None).result(PATIENCE_S)
    assert len(result.token_ids) == max_tokens - 4
    with pytest.raises(
        PromptTooLong, match=f"expected at most {max_tokens} tokens together, got 4 and {max_tokens - 3}"
    ):
        engine.generate(params(range(4)), Sampling(max_tokens - 3), lambda _: None)


def test_a_step_that_hangs_fails_all_requests_until_it_ends(runner: GatedRunner, clock: FakeClock) -> None:
    engine = Engine(runner, PrefixCache(NUM_BLOCKS, BLOCK_SIZE), EngineConfig(step_timeout_s=30))
    engine.start()
    runner.gate.clear()
    hanging, waiting = engine.prefill(params(range(20))), engine.prefill(params(range(50, 60)))
    assert runner.entered.wait(PATIENCE_S)
    clock.now_s += 31
    wait_until(lambda: hanging.cancelled() and waiting.cancelled())
    assert not engine.is_healthy
    assert not engine.can_recover
    assert isinstance(engine.cancellation, StepHangs)
    with pytest.raises(StepHangs, match=r"a step takes more than 30 s"):
        engine.prefill(params(range(4)))
    runner.gate.set()
    wait_until(lambda: engine.is_healthy)
    assert engine.can_recover
    assert engine.prefill(params(range(4))).result(PATIENCE_S).next_token_id == next_token(tokens(range(4)))
    assert engine.load().result(PATIENCE_S).blocks.leased == 0
    assert engine.load().result(PATIENCE_S).requests.cancelled == 2
    engine.check().result(PATIENCE_S)
    engine.stop()


def test_a_public_prefix_whose_step_hangs_leaves_nothing_behind(runner: GatedRunner, clock: FakeClock) -> None:
    engine = Engine(runner, PrefixCache(NUM_BLOCKS, BLOCK_SIZE), EngineConfig(max_step_tokens=8, step_timeout_s=30))
    engine.start()
    runner.gate.clear()
    done = engine.public.register("p", tokens(range(5 * BLOCK_SIZE)))
    assert runner.entered.wait(PATIENCE_S)
    clock.now_s += 31
    with pytest.raises(StepHangs):
        done.result(PATIENCE_S)
    runner.gate.set()
    wait_until(lambda: engine.is_healthy)
    wait_until(lambda: not engine.public.listing().result(PATIENCE_S))
    assert engine.load().result(PATIENCE_S).blocks.published == 0
    assert engine.public.register("p", tokens(range(20))).result(PATIENCE_S).is_computed
    engine.check().result(PATIENCE_S)
    engine.stop()


def test_nothing_waits_for_a_step_that_hangs(
    runner: GatedRunner, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drain that waited would exceed the time limit of the test."""
    monkeypatch.setattr("radixkv.engine.engine._STOP_TIMEOUT_S", 0.1)
    engine = Engine(runner, PrefixCache(NUM_BLOCKS, BLOCK_SIZE), EngineConfig(step_timeout_s=30))
    engine.start()
    runner.gate.clear()
    hanging = engine.prefill(params(range(20)))
    assert runner.entered.wait(PATIENCE_S)
    stats = engine.stats()
    clock.now_s += 31
    wait_until(lambda: hanging.cancelled() and stats.cancelled())
    for call in (engine.stats, lambda: engine.probe(tokens(range(4))), lambda: engine.release("x")):
        with pytest.raises(StepHangs):
            call()
    assert engine.drain(ENDLESS_S) is False
    engine.stop()
    assert isinstance(engine.cancellation, Draining)
    runner.gate.set()
    wait_until(lambda: not engine.is_alive)
    engine._core.cache.check()
    assert engine._core.cache.pool.num_leased == 0


def test_a_drain_does_not_wait_for_a_step_that_hangs(runner: GatedRunner, clock: FakeClock) -> None:
    engine = Engine(runner, PrefixCache(NUM_BLOCKS, BLOCK_SIZE), EngineConfig(step_timeout_s=30))
    engine.start()
    runner.gate.clear()
    hanging = engine.prefill(params(range(20)))
    assert runner.entered.wait(PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        is_drained = pool.submit(engine.drain, ENDLESS_S)
        wait_until(lambda: not engine.is_healthy)
        assert not is_drained.done()
        clock.now_s += 31
        assert is_drained.result(PATIENCE_S) is False
    assert hanging.cancelled()
    runner.gate.set()
    engine.stop()


def test_a_drain_does_not_wait_for_requests_that_are_cancelled_meanwhile(runner: GatedRunner) -> None:
    engine = Engine(runner, PrefixCache(NUM_BLOCKS, BLOCK_SIZE), EngineConfig())
    engine.start()
    runner.gate.clear()
    first, second = engine.prefill(params(range(20))), engine.prefill(params(range(50, 60)))
    assert runner.entered.wait(PATIENCE_S)
    second.cancel()
    with ThreadPoolExecutor(1) as pool:
        is_drained = pool.submit(engine.drain, PATIENCE_S)
        wait_until(lambda: not engine.is_healthy)
        runner.gate.set()
        assert is_drained.result(PATIENCE_S) is True
    assert first.result(PATIENCE_S).next_token_id == next_token(tokens(range(20)))
    engine.stop()


def test_a_thread_that_dies_fails_all_requests_and_calls(
    runner: GatedRunner, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    engine = Engine(runner, PrefixCache(NUM_BLOCKS, BLOCK_SIZE), EngineConfig(max_step_tokens=4, step_timeout_s=1))
    runner.gate.clear()
    engine.start()
    futures = [engine.prefill(params(range(i, i + 8))) for i in range(3)]
    assert runner.entered.wait(PATIENCE_S)
    monkeypatch.setattr(engine._core._scheduler, "next_step", lambda _: 1 / 0)
    monkeypatch.setattr(engine._core, "close", lambda _: 1 / 0)
    runner.gate.set()
    wait_until(lambda: all(future.done() for future in futures))
    engine._thread.join(PATIENCE_S)
    assert not engine.is_healthy
    assert not engine.can_recover
    with pytest.raises(Draining):
        engine.prefill(params(range(4)))
    clock.now_s += 2
    time.sleep(0.2)  # the watchdog checks every 0.05 s
    (record,) = caplog.records  # and not of the watchdog: the step that raised is over
    assert record.message.startswith("the engine's thread failed")
    assert "ZeroDivisionError" in caplog.text
    engine.stop()


@pytest.mark.parametrize("where", ["submit", "lease", "release"])
def test_a_bug_in_the_engine_fails_all_requests_and_calls(
    runner: GatedRunner, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    engine = Engine(runner, PrefixCache(NUM_BLOCKS, BLOCK_SIZE), EngineConfig(max_running_requests=2))
    runner.gate.clear()
    engine.start()
    futures: list[Future[Any]] = [engine.prefill(params(range(8)))]
    assert runner.entered.wait(PATIENCE_S)
    if where == "submit":
        monkeypatch.setattr(engine._core, "submit", fail)
    elif where == "lease":
        monkeypatch.setattr(Lease, "close", fail)
    else:
        monkeypatch.setattr(engine.adapters, "release", fail)
    futures += [engine.prefill(params(range(start, start + 8))) for start in (20, 40, 60)]
    futures += [engine.stats(), engine.public.register("p", tokens(range(8)))]
    runner.gate.set()
    wait_until(lambda: all(future.done() for future in futures))
    engine._thread.join(PATIENCE_S)
    assert not engine.is_alive
    engine.stop()


def test_a_call_that_blocks_the_engine_is_detected_like_a_step_that_hangs(
    runner: GatedRunner, clock: FakeClock
) -> None:
    engine = Engine(runner, PrefixCache(NUM_BLOCKS, BLOCK_SIZE), EngineConfig(step_timeout_s=30))
    engine.start()
    has_begun, may_end = threading.Event(), threading.Event()

    def block() -> None:
        has_begun.set()
        assert may_end.wait(PATIENCE_S)

    blocking = engine._call(block)
    assert has_begun.wait(PATIENCE_S)
    clock.now_s += 31
    wait_until(lambda: not engine.can_recover)
    may_end.set()
    blocking.result(PATIENCE_S)
    wait_until(lambda: engine.is_healthy)
    engine.stop()


def test_requests_that_arrive_during_a_step_are_in_the_next_one(engine: Engine, runner: GatedRunner) -> None:
    """A step that is started ahead would leave them out."""

    def close_gate(chunk: GeneratedTokens) -> None:
        if chunk.usage.generated_tokens == 4:
            runner.entered.clear()
            runner.gate.clear()

    generation = engine.generate(params(range(4)), Sampling(16), close_gate)
    wait_until(lambda: not runner.gate.is_set())
    assert runner.entered.wait(PATIENCE_S)
    num_steps = len(runner.steps)
    prefill = engine.prefill(params(range(50, 54)))
    runner.gate.set()
    prefill.result(PATIENCE_S)
    generation.result(PATIENCE_S)
    assert [len(step) for step in runner.steps[num_steps : num_steps + 3]] == [1, 2, 1]


def test_a_deadline_that_is_not_finite_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="deadline_s: expected a finite time, got nan"):
        engine.prefill(params(range(4), deadline_s=float("nan")))


def test_steps_that_fail_in_a_row_make_the_engine_unhealthy_until_one_succeeds(
    runner: GatedRunner, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.engine.engine._RETRY_PERIOD_S", 0.01)
    engine = Engine(runner, PrefixCache(NUM_BLOCKS, BLOCK_SIZE), EngineConfig(step_timeout_s=30))
    engine.start()
    is_broken, run = True, runner.run
    num_chunks: list[int] = []  # of each step that was tried

    def run_if_not_broken(chunks):  # type: ignore[no-untyped-def]
        num_chunks.append(len(chunks))
        if is_broken:
            raise RuntimeError("device")
        return run(chunks)

    runner.run = run_if_not_broken  # type: ignore[method-assign]
    for num_failed in (1, 2, 3):
        assert engine.is_healthy
        with pytest.raises(StepFailed):
            engine.prefill(params(range(num_failed, 8))).result(PATIENCE_S)
    num_chunks.clear()
    wait_until(lambda: len(num_chunks) > 3)
    assert not engine.is_healthy, "the trial steps of the engine fail as well"
    assert engine.can_recover
    clock.now_s += 31
    assert not engine.can_recover, "the trial steps have failed for too long"
    is_broken = False
    wait_until(lambda: engine.is_healthy)
    assert engine.can_recover
    assert engine.prefill(params(range(4))).result(PATIENCE_S).next_token_id == next_token(tokens(range(4)))
    engine.check().result(PATIENCE_S)
    engine.stop()


def test_a_stopped_engine_refuses_everything(runner: GatedRunner) -> None:
    engine = Engine(runner, PrefixCache(NUM_BLOCKS, BLOCK_SIZE), EngineConfig())
    assert engine.can_recover, "the engine has not been started yet"
    engine.start()
    engine.stop()
    assert not engine.is_healthy
    assert engine.can_recover, "the engine was stopped on purpose"
    with pytest.raises(Draining):
        engine.prefill(params(range(4)))
    with pytest.raises(Draining):
        engine.stats()


def test_many_threads_get_their_own_results(engine: Engine) -> None:
    rng = np.random.default_rng(0)
    wrongly_answered: list[bytes] = []

    def prefill_all(prompts: list[bytes]) -> None:
        for prompt in prompts:
            while True:
                try:
                    answer = engine.prefill(PrefillParams(prompt)).result(PATIENCE_S)
                    break
                except QueueFull:
                    time.sleep(0.001)
            if answer.next_token_id != next_token(prompt):
                wrongly_answered.append(prompt)

    shared_ids = rng.integers(0, 5, 40)

    def random_prompt() -> bytes:
        return tokens([*shared_ids[: rng.integers(0, 40)], *rng.integers(0, 5, rng.integers(1, 20))])

    prompts_by_thread = [[random_prompt() for _ in range(25)] for _ in range(4)]
    threads = [threading.Thread(target=prefill_all, args=(prompts,)) for prompts in prompts_by_thread]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrongly_answered == []
    engine.check().result(PATIENCE_S)
    load = engine.load().result(PATIENCE_S)
    assert load.requests.finished == 4 * 25
    assert load.blocks.leased == 0
