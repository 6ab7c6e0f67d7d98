"""Generations in the engine core, batched or under memory pressure, always have the tokens of the fake model."""

from __future__ import annotations

import random
from concurrent.futures import Future

import pytest

from radixkv.api.result import FinishReason, GenerateResult, GenerationFuture
from radixkv.api.retention import Retention
from radixkv.cache.tenants import Quota
from radixkv.errors import DeadlinePassed, OutOfBlocks, StepFailed
from tests.core_bench import BLOCK_SIZE, Bench, purge_at_once
from tests.fake_runner import continuation


def tokens_of(future: Future[GenerateResult]) -> tuple[int, ...]:
    """Return the tokens of a generation that has ended."""
    return future.result(0).token_ids


def test_generation_follows_the_model_and_streams_all_but_the_last_token() -> None:
    bench = Bench()
    future = bench.generate(range(10), 7)
    bench.run()
    result = future.result(0)
    assert result.token_ids == continuation(range(10), 7)
    assert future.streamed == list(result.token_ids[:-1])
    assert result.finish_reason is FinishReason.LENGTH
    assert (result.usage.prompt_tokens, result.usage.computed_tokens, result.usage.generated_tokens) == (10, 10, 7)
    assert bench.runner.steps == [[(0, 10)], *[[(n, n + 1)] for n in range(10, 16)]]
    assert bench.cache.pool.num_leased == bench.cache.num_pinned_blocks == 0


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("num_new_tokens", [1, 2, 3, 4, 5, 9])
def test_a_generation_of_any_length_follows_the_model_after_a_prompt_of_any_length(
    length: int, num_new_tokens: int
) -> None:
    bench = Bench()
    futures = [bench.generate(range(length), num_new_tokens) for _ in range(3)]
    bench.run()
    assert {tokens_of(future) for future in futures} == {continuation(range(length), num_new_tokens)}
    assert bench.cache.pool.num_leased == 0


def test_a_stop_token_ends_the_generation() -> None:
    bench = Bench()
    expected = continuation(range(10), 9)
    stop = expected[3]
    future = bench.generate(range(10), 9, stop_token_ids=frozenset({stop, 255}))
    bench.run()
    assert tokens_of(future) == expected[: expected.index(stop) + 1]
    assert future.result(0).finish_reason is FinishReason.STOP


def test_the_next_turn_reuses_all_but_the_last_generated_token() -> None:
    bench = Bench()
    future = bench.generate(range(10), 9)
    bench.run()
    turn = [*range(10), *tokens_of(future), 77, 78]
    # The K/V of the last generated token was never computed.
    assert bench.prefill(turn).usage.cached_tokens == 10 + 8
    assert future.result(0).usage.written_tokens == 10 + 8


def test_a_prompt_is_reusable_during_its_generation() -> None:
    bench = Bench()
    future = bench.generate(range(10), 20)
    bench.core.step()
    bench.core.step()
    assert bench.prefill([*range(10), 200, 201]).usage.cached_tokens == 10
    assert tokens_of(future) == continuation(range(10), 20)


def test_requests_join_and_leave_at_every_step() -> None:
    bench = Bench()
    first = bench.generate(range(8), 6)
    for _ in range(3):
        bench.core.step()
    second = bench.generate(range(50, 54), 2)
    bench.run()
    assert bench.runner.steps[3] == [(10, 11)], "this step was started ahead, before the new prompt was submitted"
    assert bench.runner.steps[4] == [(11, 12), (0, 4)], "the new prompt shares a step with the decoding request"
    assert bench.runner.steps[5] == [(12, 13), (4, 5)]
    assert tokens_of(first) == continuation(range(8), 6)
    assert tokens_of(second) == continuation(range(50, 54), 2)


def test_decoding_continues_during_a_chunked_prefill() -> None:
    bench = Bench(num_blocks=256, max_step_tokens=16)
    decoding = bench.generate(range(4), 12)
    bench.core.step()
    bench.submit(range(100, 400))
    while not decoding.done():
        bench.core.step()
    assert len(bench.runner.steps) == 12, (
        "each step has one token of the decoding request, and a chunk of the other prompt"
    )
    assert [step[0] for step in bench.runner.steps[1:]] == [(3 + n, 4 + n) for n in range(1, 12)]
    bench.run()


def test_followers_of_a_generation_start_when_its_prompt_is_computed() -> None:
    bench = Bench(num_blocks=256, max_step_tokens=100)
    futures = [bench.generate([*range(40), 100 + i], 30) for i in range(4)]
    bench.run()
    assert [tokens_of(f) for f in futures] == [continuation([*range(40), 100 + i], 30) for i in range(4)]
    num_prompt_tokens_computed = 40 + 4  # the common prefix once, and the last token of each
    assert sum(f.result(0).usage.computed_tokens for f in futures) == num_prompt_tokens_computed
    assert bench.runner.computed_tokens == num_prompt_tokens_computed + 4 * 29


def test_equal_prompts_that_end_inside_a_block_are_computed_once_and_diverge() -> None:
    bench = Bench(num_blocks=256)
    futures = [bench.generate(range(10), 9, temperature=1.0, seed=seed) for seed in range(4)]
    bench.run()
    # The first request computes the prompt, and each of the others its last token.
    assert sum(f.result(0).usage.computed_tokens for f in futures) == 10 + 3
    assert bench.cache.pool.num_leased == 0


class TestFinish:
    def test_a_finished_generation_returns_and_caches_its_tokens(self) -> None:
        bench = Bench()
        future = bench.generate(range(10), 30)
        while len(future.streamed) < 7:
            bench.core.step()
        future.finish()
        bench.run()
        result = future.result(0)
        assert result.token_ids[:7] == continuation(range(10), 7)
        assert len(result.token_ids) <= 9, (
            "besides the seven tokens, at most those of the running step and of the one before it"
        )
        assert (result.finish_reason, result.usage.generated_tokens) == (FinishReason.STOP, len(result.token_ids))
        assert bench.core.stats.load().requests.finished == 1
        assert bench.cache.pool.num_leased == bench.cache.num_pinned_blocks == 0
        next_turn = bench.prefill([*range(10), *result.token_ids])
        assert next_turn.usage.computed_tokens == 1, (
            "all tokens but the last are cached, those of the incomplete last block too"
        )

    def test_other_generations_continue(self) -> None:
        bench = Bench()
        futures = [bench.generate(range(start, start + 10), 20) for start in (0, 30, 60)]
        while len(futures[1].streamed) < 3:
            bench.core.step()
        futures[1].finish()
        bench.run()
        assert len(tokens_of(futures[1])) < 20
        assert [tokens_of(futures[i]) for i in (0, 2)] == [continuation(range(s, s + 10), 20) for s in (0, 60)]

    def test_a_preempted_generation_can_be_finished(self) -> None:
        bench = Bench(num_blocks=9)
        futures = [bench.generate(range(start, start + 8), 16) for start in (0, 50, 100)]
        while not bench.core.stats.load().requests.paused:
            bench.core.step()
        (request,) = (each for each in bench.core._scheduler.idle_requests() if each.is_preempted)
        (preempted,) = (future for future in futures if future is request.future)
        num_computed_before = bench.runner.computed_tokens
        preempted.finish()
        while not preempted.done():
            bench.core.step()
        assert bench.runner.computed_tokens - num_computed_before <= 3, "the preempted generation is not computed again"
        assert preempted.result(0).finish_reason is FinishReason.STOP
        bench.run()
        assert bench.cache.pool.num_leased == 0

    @pytest.mark.parametrize("priority", [80, 20])
    def test_a_finished_generation_gets_its_retention(self, priority: int) -> None:
        bench = Bench()
        future = bench.generate(range(10), 30, retention=Retention(priority))
        while len(future.streamed) < 3:
            bench.core.step()
        future.finish()
        bench.run()
        retained = future.result(0).retained
        assert retained is not None
        assert retained.grant.granted_tokens == 10

    def test_a_finished_generation_respects_write_cache(self) -> None:
        bench = Bench()
        future = bench.generate(range(10), 30, write_cache=False)
        while len(future.streamed) < 7:
            bench.core.step()
        future.finish()
        bench.run()
        assert bench.prefill(range(10)).usage.cached_tokens == 0

    def test_a_generation_that_does_not_read_the_cache_publishes_at_its_end(self) -> None:
        bench = Bench()
        future = bench.generate(range(10), 30, read_cache=False)
        while len(future.streamed) < 7:
            bench.core.step()
        future.finish()
        bench.run()
        next_turn = bench.prefill([*range(10), *future.result(0).token_ids])
        assert next_turn.usage.computed_tokens == 1

    def test_finish_does_nothing_before_the_first_token_and_after_the_end(self) -> None:
        bench = Bench()
        future = bench.generate(range(10), 4)
        future.finish()
        bench.run()
        assert tokens_of(future) == continuation(range(10), 4)
        future.finish()
        assert bench.prefill(range(10)).usage.prompt_tokens == 10
        assert future.result(0).finish_reason is FinishReason.LENGTH
        assert GenerationFuture().finish() is None

    def test_a_cancelled_generation_returns_nothing(self) -> None:
        bench = Bench()
        future = bench.generate(range(10), 30)
        bench.core.step()
        future.finish()
        future.cancel()
        bench.run()
        assert bench.core.stats.load().requests.cancelled == 1
        assert bench.cache.pool.num_leased == 0

    def test_a_generation_whose_callback_raised_fails(self) -> None:
        def finish_and_raise(_: object) -> None:
            future.finish()
            raise RuntimeError

        bench = Bench()
        future = bench.generate(range(10), 30, on_tokens=finish_and_raise)
        bench.run()
        assert isinstance(future.exception(0), StepFailed)

    def test_a_generation_past_its_deadline_fails(self) -> None:
        bench = Bench()
        future = bench.generate(range(10), 30, deadline_s=5.0)
        bench.core.step()
        bench.clock.now_s = 6.0
        future.finish()
        bench.run()
        assert isinstance(future.exception(0), DeadlinePassed)


class TestPressure:
    def test_the_youngest_generation_is_preempted_and_returns_the_same_tokens(self) -> None:
        bench = Bench(num_blocks=9)
        futures = [bench.generate(range(start, start + 8), 16) for start in (0, 50, 100)]
        bench.run()
        assert [tokens_of(f) for f in futures] == [continuation(range(s, s + 8), 16) for s in (0, 50, 100)]
        requests = bench.core.stats.load().requests
        assert requests.pauses > 0
        assert requests.paused == 0
        assert futures[0].result(0).usage.recomputed_tokens == 0, "the oldest is never preempted"
        recomputed_tokens = bench.core.stats.stats().tokens.recomputed
        assert recomputed_tokens == sum(f.result(0).usage.recomputed_tokens for f in futures)
        num_tokens_computed_once = 3 * (8 + 15)  # of each request: its prompt, and its new tokens but the last
        assert recomputed_tokens == bench.runner.computed_tokens - num_tokens_computed_once

    def test_a_resumed_request_reuses_what_it_published(self) -> None:
        bench = Bench(num_blocks=12)
        old, young = bench.generate(range(8), 24), bench.generate(range(50, 58), 24)
        bench.run()
        assert tokens_of(old) == continuation(range(8), 24)
        assert tokens_of(young) == continuation(range(50, 58), 24)
        usage = young.result(0).usage
        assert 0 < usage.recomputed_tokens < 8 + 23
        assert usage.cached_tokens + usage.computed_tokens == 8

    def test_a_single_request_can_use_all_blocks_but_one(self) -> None:
        bench = Bench(num_blocks=6)
        num_new_tokens = 5 * BLOCK_SIZE - 6 + 1  # the last one needs no K/V
        future = bench.generate(range(6), num_new_tokens)
        bench.run()
        assert tokens_of(future) == continuation(range(6), num_new_tokens)

    def test_a_single_request_without_blocks_fails_with_the_expiry_of_held_leases(self) -> None:
        bench = Bench(num_blocks=4, held_lease_ttl_s=30.0)
        bench.prefill(range(8), hold_lease=True)
        future = bench.generate(range(50, 56), 8)
        bench.run()
        error = future.exception(0)
        assert isinstance(error, OutOfBlocks)
        assert error.retry_after_s == 30.0
        bench.core.held_leases.close()
        assert bench.cache.pool.num_leased == 0

    def test_a_tenant_at_its_ceiling_preempts_only_its_own_requests(self) -> None:
        bench = Bench(num_blocks=64, quotas={"acme": Quota(ceiling_blocks=8)})
        other = bench.generate(range(200, 208), 24, tenant="other")
        futures = [bench.generate(range(start, start + 8), 16, tenant="acme") for start in (0, 50)]
        bench.run()
        assert [tokens_of(f) for f in futures] == [continuation(range(s, s + 8), 16) for s in (0, 50)]
        assert bench.core.stats.load().requests.pauses > 0
        assert other.result(0).usage.recomputed_tokens == 0

    def test_a_generation_at_its_ceiling_is_not_preempted_for_every_token(self) -> None:
        bench = Bench(num_blocks=64, quotas={"acme": Quota(ceiling_blocks=4)})
        num_new_tokens = 4 * BLOCK_SIZE - 6 + 1  # the last one needs no K/V
        future = bench.generate(range(6), num_new_tokens, tenant="acme")
        bench.run()
        assert tokens_of(future) == continuation(range(6), num_new_tokens)
        usage = future.result(0).usage
        assert bench.core.stats.load().requests.pauses <= 1
        assert usage.recomputed_tokens <= BLOCK_SIZE
        assert usage.written_tokens <= 6 + 10 + BLOCK_SIZE

    def test_admission_spares_the_next_blocks_of_running_generations(self) -> None:
        bench = Bench(num_blocks=7)
        first = bench.generate(range(12), 12)
        bench.core.step()
        # Three blocks are available. The second prompt needs all of them, and the first request needs some to decode.
        second = bench.generate(range(50, 62), 8)
        bench.core.step()
        assert bench.core.stats.load().requests.running == 1
        bench.run()
        assert bench.core.stats.load().requests.pauses == 0
        assert tokens_of(first) == continuation(range(12), 12)
        assert tokens_of(second) == continuation(range(50, 62), 8)

    def test_a_request_that_waits_for_blocks_is_retried_in_each_step(self) -> None:
        bench = Bench(num_blocks=10)
        shared = bench.generate([*range(16), 96, 97, 98, 99], 12)
        short = bench.generate(range(50, 58), 2)
        bench.core.step()
        waiting = bench.generate([*range(16), 77, 78], 2)
        bench.core.step()
        assert short.done()
        assert not waiting.streamed, "the other two requests need the blocks that were free"
        bench.core.step()
        assert waiting.streamed, "the request needs one block besides the cached prefix, and not five"
        assert not shared.done()
        bench.run()

    def test_a_prefill_borrows_blocks_of_running_generations_for_a_step(self) -> None:
        bench = Bench(num_blocks=8)
        running = [bench.generate(range(start, start + 5), 6) for start in (0, 50)]
        while min(len(future.streamed) for future in running) < 2:
            bench.core.step()
        num_free = bench.cache.pool.num_free + bench.cache.num_evictable_blocks
        short = bench.submit(range(100, 100 + num_free * BLOCK_SIZE))
        held = bench.submit(range(200, 204), hold_lease=True)
        bench.core.step()  # started ahead, before the two prefills were submitted
        bench.core.step()
        assert short.done()
        assert not held.done(), "a held lease would keep the blocks that running generations need"
        bench.run()
        assert [tokens_of(f) for f in running] == [continuation(range(start, start + 5), 6) for start in (0, 50)]
        assert bench.core.stats.load().requests.pauses == 0

    def test_no_request_follows_a_resumed_request_that_decodes(self) -> None:
        bench = Bench()
        bench.has_pending_calls = True
        future = bench.generate(range(8), 40)
        for _ in range(9):
            bench.core.step()
        bench.core._preemptor.preempt(*bench.core._scheduler.running)  # all its tokens but the last are published
        bench.core.step()
        assert not bench.core._flights._leads
        bench.run()
        assert tokens_of(future) == continuation(range(8), 40)

    @pytest.mark.parametrize("options", [{"read_cache": False}, {"write_cache": False}], ids=["no read", "no write"])
    def test_a_preempted_request_without_cache_access_recomputes_everything(self, options: dict[str, bool]) -> None:
        bench = Bench(num_blocks=9)
        futures = [bench.generate(range(start, start + 8), 16, **options) for start in (0, 50, 100)]
        bench.run()
        assert [tokens_of(f) for f in futures] == [continuation(range(s, s + 8), 16) for s in (0, 50, 100)]
        assert bench.core.stats.stats().tokens.recomputed > 0

    def test_a_preempted_request_that_is_purged_publishes_nothing_and_returns_the_same_tokens(self) -> None:
        bench = Bench(num_blocks=9)
        futures = [bench.generate(range(start, start + 8), 16) for start in (0, 50, 100)]
        while not bench.core.stats.load().requests.paused:
            bench.core.step()
        purge_at_once(bench.core, tenant="")
        bench.run()
        assert [tokens_of(f) for f in futures] == [continuation(range(s, s + 8), 16) for s in (0, 50, 100)]
        assert bench.core.stats.load().blocks.published == 0

    def test_a_request_that_would_be_preempted_at_once_is_not_admitted(self) -> None:
        """Blocks suffice for the new request, but those that it reuses cannot be evicted for the running one."""
        bench = Bench(num_blocks=8)
        bench.prefill(range(100, 116))
        running = bench.generate(range(8), 8)
        while len(running.streamed) < 2:
            bench.core.step()
        assert (bench.cache.pool.num_free, bench.cache.num_evictable_blocks) == (1, 4)
        new = bench.generate(range(100, 120), 4)
        bench.run()
        assert tokens_of(running) == continuation(range(8), 8)
        assert tokens_of(new) == continuation(range(100, 120), 4)
        assert bench.core.stats.load().requests.pauses == 0
        (tenant,) = bench.core.stats.stats().tenants
        assert (tenant.hit_tokens, tenant.miss_tokens) == (16, 16 + 8 + 4), (
            "a request counts as a hit when it is admitted, not when it begins to wait"
        )

    def test_a_long_cached_path_does_not_block_a_request_that_reuses_its_beginning(self) -> None:
        bench = Bench(num_blocks=14)
        bench.prefill(range(100, 140))
        running = bench.generate(range(8), 8)
        while len(running.streamed) < 2:
            bench.core.step()
        assert (bench.cache.pool.num_free, bench.cache.num_evictable_blocks) == (1, 10)
        new = bench.submit([*range(100, 108), 1, 2, 3, 4])
        bench.core.step()  # started ahead, before the request was submitted
        bench.core.step()
        assert new.result(0).usage.cached_tokens == 8


class TestCancellationAndFailure:
    def test_a_cancelled_generation_releases_its_blocks_and_its_published_tokens_stay_cached(self) -> None:
        bench = Bench()
        future = bench.generate(range(10), 50)
        for _ in range(8):
            bench.core.step()
        future.cancel()
        bench.run()
        assert bench.cache.pool.num_leased == bench.cache.num_pinned_blocks == 0
        assert bench.core.stats.load().requests.cancelled == 1
        assert bench.prefill([*range(10), *continuation(range(10), 7), 0]).usage.cached_tokens == 16

    def test_a_preempted_request_can_be_cancelled(self) -> None:
        bench = Bench(num_blocks=9)
        futures = [bench.generate(range(start, start + 8), 16) for start in (0, 50, 100)]
        while not bench.core.stats.load().requests.paused:
            bench.core.step()
        (preempted,) = (request for request in bench.core._scheduler.idle_requests() if request.is_preempted)
        preempted.future.cancel()
        bench.run()
        assert bench.core.stats.load().requests.cancelled == 1
        assert sum(future.cancelled() for future in futures) == 1
        assert bench.cache.pool.num_leased == 0

    def test_a_following_request_can_be_cancelled(self) -> None:
        bench = Bench(num_blocks=4096, max_step_tokens=64)
        bench.submit([5000] * 2000)
        bench.core.step()
        leader = bench.submit([*range(100), *[6000] * 900])
        bench.core.step()
        follower = bench.generate([*range(100), 97], 4)
        bench.core.step()
        assert bench.core.stats.load().requests.following == 1
        follower.cancel()
        bench.run()
        assert bench.core.stats.load().requests.cancelled == 1
        assert leader.done()
        assert not bench.core._flights._waits
        assert bench.cache.pool.num_leased == 0

    def test_a_deadline_ends_a_generation_between_tokens(self) -> None:
        bench = Bench()
        future = bench.generate(range(10), 50, deadline_s=5.0)
        for _ in range(4):
            bench.core.step()
        bench.clock.now_s = 5.0
        bench.run()
        assert isinstance(future.exception(0), DeadlinePassed)
        assert len(future.streamed) == 5, "the step of the last token was running when the deadline passed"
        assert bench.cache.pool.num_leased == 0

    def test_a_callback_that_raises_fails_only_its_request(self) -> None:
        bench = Bench()
        failing, other = bench.generate(range(10), 5), bench.generate(range(20, 30), 5)
        failing.streamed = None  # so that the callback of `Bench` raises
        bench.run()
        assert isinstance(failing.exception(0), StepFailed)
        assert tokens_of(other) == continuation(range(20, 30), 5)
        assert bench.cache.pool.num_leased == 0

    def test_a_failed_step_fails_the_requests_in_it(self) -> None:
        bench = Bench()
        future = bench.generate(range(10), 5)
        bench.core.step()
        bench.runner.fail_next = RuntimeError("device")
        bench.run()
        assert isinstance(future.exception(0), StepFailed)
        assert bench.cache.pool.num_leased == 0


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("seed", range(60))
def test_random_concurrent_requests_in_a_small_pool_get_their_own_results(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(
        num_blocks=rng.choice((16, 24, 60)),
        max_step_tokens=rng.choice((3, 8, 30)),
        max_running_requests=rng.choice((2, 5, 20)),
    )
    stems = [[rng.randrange(256) for _ in range(24)] for _ in range(3)]
    expected: dict[Future[GenerateResult], tuple[int, ...]] = {}
    for _ in range(30):
        prompt = [*rng.choice(stems)[: rng.randint(1, 24)], rng.randrange(256)]
        num_new_tokens = rng.randint(1, 24)
        options = {"tenant": rng.choice("ab"), "read_cache": rng.random() < 0.9, "write_cache": rng.random() < 0.9}
        expected[bench.generate(prompt, num_new_tokens, **options)] = continuation(prompt, num_new_tokens)
        if rng.random() < 0.1:
            rng.choice(list(expected)).cancel()
        if rng.random() < 0.5:
            bench.core.step()
            bench.cache.check()
    bench.run()
    assert all(future.cancelled() or tokens_of(future) == token_ids for future, token_ids in expected.items())
    assert bench.cache.pool.num_leased == bench.cache.num_pinned_blocks == 0
    assert not bench.core._flights._waits
    assert not bench.core._flights._leads


def test_a_cached_prefix_that_would_be_pinned_does_not_count_as_free() -> None:
    bench = Bench(num_blocks=12, max_step_tokens=12)
    bench.prefill(range(16))
    growing = bench.generate(range(50, 62), 12)
    bench.core.step()
    bench.core.step()
    # Four blocks are free and four cached; the request would take the free ones and pin the cached ones.
    big = bench.submit([*range(16), *range(100, 116)])
    bench.core.step()
    assert bench.core.stats.load().requests.running == 1
    bench.run()
    assert bench.core.stats.load().requests.pauses == 0
    assert growing.done()
    assert big.done()


def test_a_callback_that_exits_the_thread_fails_only_its_request() -> None:
    bench = Bench()
    future, other = bench.generate(range(10), 7), bench.generate(range(50, 60), 7)
    request = next(iter(bench.core._scheduler.idle_requests()))

    def exit_thread(_: object) -> None:
        raise SystemExit

    assert request.generation is not None
    request.generation.on_tokens = exit_thread
    bench.run()
    assert isinstance(future.exception(0), StepFailed)
    assert tokens_of(other) == continuation(range(50, 60), 7)
