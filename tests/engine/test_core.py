"""The engine core over a fake runner: prefills, held leases, and how requests end. Blocks have four tokens."""

import gc
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from radixkv.api.miss_reason import MissReason
from radixkv.api.params import PrefillParams
from radixkv.api.result import PrefillResult
from radixkv.api.retention import Grant, Retention
from radixkv.cache.purge import all_slices
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.tenants import Quota
from radixkv.compute.forward import Chunk
from radixkv.compute.runner import StepResult
from radixkv.engine.observer import Observer
from radixkv.errors import (
    CapacityError,
    Cause,
    DeadlinePassed,
    Draining,
    OutOfBlocks,
    QuotaExceeded,
    StepFailed,
    UnknownLease,
)
from radixkv.namespace import Namespace
from radixkv.scheduling.request import Request
from tests.core_bench import Bench, purge_at_once
from tests.fake_runner import next_token, tokens


def test_a_cold_prompt_is_computed_whole_and_a_repeated_one_to_its_last_token() -> None:
    bench = Bench()
    cold, warm = bench.prefill(range(10)), bench.prefill(range(10))
    assert (cold.usage.cached_tokens, cold.usage.computed_tokens, cold.usage.written_tokens) == (0, 10, 10)
    assert (warm.usage.cached_tokens, warm.usage.computed_tokens, warm.usage.written_tokens) == (9, 1, 0)
    assert (cold.miss_reason, warm.miss_reason) == (MissReason.COLD, MissReason.NONE)
    assert cold.next_token_id == warm.next_token_id == next_token(tokens(range(10)))
    assert bench.runner.steps == [[(0, 10)], [(9, 10)]]


def test_reuse_is_exact_to_the_token() -> None:
    bench = Bench()
    bench.prefill(range(10))
    result = bench.prefill([0, 1, 2, 3, 4, 5, 99, 98])
    assert result.usage.cached_tokens == 6
    assert result.miss_reason is MissReason.DIVERGED


def test_long_prompts_are_split_under_the_token_budget() -> None:
    bench = Bench(max_step_tokens=6)
    bench.prefill(range(20))
    assert bench.runner.steps == [[(0, 6)], [(6, 12)], [(12, 18)], [(18, 20)]]


def test_one_step_serves_several_requests() -> None:
    bench = Bench(max_step_tokens=32)
    futures = [bench.submit(range(start, start + 8)) for start in (0, 20, 40)]
    bench.run()
    assert len(bench.runner.steps) == 1
    assert [future.result(0).next_token_id for future in futures] == [
        next_token(tokens(range(start, start + 8))) for start in (0, 20, 40)
    ]


def test_waiting_requests_reuse_what_running_ones_publish() -> None:
    bench = Bench(max_step_tokens=8)
    futures = [bench.submit([*range(32), 100 + i]) for i in range(4)]
    bench.run()
    assert sum(future.result(0).usage.computed_tokens for future in futures) == 32 + 4
    assert bench.runner.computed_tokens == 32 + 4


def test_read_cache_off_computes_everything_and_reads_nothing() -> None:
    bench = Bench(max_step_tokens=5)
    bench.prefill(range(12))
    bench.runner.forget_everything()  # so that reading a cached block fails
    result = bench.prefill(range(12), read_cache=False)
    assert (result.usage.cached_tokens, result.usage.computed_tokens) == (0, 12)
    assert result.miss_reason is MissReason.READ_DISABLED


def test_a_prompt_can_be_retained_longer_than_others() -> None:
    bench = Bench(num_blocks=10)
    before_s = time.time()
    result = bench.prefill(range(8), retention=Retention(80, ttl_s=60))
    assert result.retained is not None
    assert result.retained.grant == Grant(8, 0, 0, expires_s=60.0)
    assert before_s + 59 < result.retained.expires_at_s < time.time() + 61
    bench.prefill(range(100, 132))
    bench.prefill(range(200, 232))
    assert bench.prefill(range(8)).usage.cached_tokens == 7
    bench.clock.now_s = 61
    bench.prefill(range(300, 332))
    bench.prefill(range(400, 440))
    expired = bench.prefill(range(8))
    assert (expired.usage.cached_tokens, expired.miss_reason) == (0, MissReason.EXPIRED)


@pytest.mark.parametrize("options", [{}, {"read_cache": False}, {"read_cache": False, "write_cache": False}])
@pytest.mark.parametrize("length", [8, 7])
def test_a_low_priority_does_not_apply_to_tokens_that_others_published(length: int, options: dict[str, bool]) -> None:
    bench = Bench(num_blocks=10)
    bench.prefill(range(8))
    again = bench.prefill(range(length), retention=Retention(0), **options)
    assert again.retained is not None
    assert again.retained.grant == Grant(length, 0, 0)
    bench.prefill(range(90, 94))
    bench.cache.evict(2)
    assert bench.prefill(range(90, 94)).usage.cached_tokens == 3  # the two older blocks were evicted first


def test_a_waiting_request_publishes_nothing_after_a_purge() -> None:
    bench = Bench(max_running_requests=1, max_step_tokens=4)
    futures = [bench.submit(range(start, start + 8)) for start in (0, 20)]
    bench.core.step()
    purge_at_once(bench.core, tenant="")
    later = bench.submit(range(40, 48))
    bench.run()
    assert [future.result(0).usage.written_tokens for future in (*futures, later)] == [4, 0, 8]
    assert [bench.prefill(range(start, start + 8)).usage.cached_tokens for start in (0, 20, 40)] == [0, 0, 7]


def test_a_low_priority_applies_only_to_tokens_that_the_request_computed() -> None:
    bench = Bench(num_blocks=10)
    bench.prefill(range(8))
    extended = bench.prefill([*range(8), 90, 91, 92, 93], retention=Retention(0))
    assert extended.retained is not None
    assert extended.retained.grant == Grant(12, 0, 0)
    reused = bench.prefill([*range(8), 90, 91], retention=Retention(0, start=2, end=6))
    assert reused.retained is not None
    assert reused.retained.grant == Grant(4, 0, 0)
    bench.cache.evict(1)  # the block of the extension, which has the low priority
    assert bench.prefill([*range(8), 90, 91, 92, 93]).usage.cached_tokens == 8


def test_unpublished_tokens_are_not_retained() -> None:
    result = Bench().prefill(range(8), write_cache=False, retention=Retention(80))
    assert result.retained is not None
    assert result.retained.grant == Grant(0, 0, 8)


def test_write_cache_off_leaves_nothing_behind() -> None:
    bench = Bench()
    result = bench.prefill(range(12), write_cache=False)
    assert result.usage.written_tokens == 0
    assert bench.cache.pool.num_free == 64


def test_tenants_share_nothing() -> None:
    bench = Bench()
    bench.prefill(range(12), tenant="a")
    assert bench.prefill(range(12), tenant="b").miss_reason is MissReason.COLD
    assert bench.prefill(range(12), tenant="a").usage.cached_tokens == 11


def test_eviction_makes_room_and_is_reported_as_the_miss_reason() -> None:
    bench = Bench(num_blocks=4)
    bench.prefill(range(16))
    bench.prefill(range(100, 116))
    assert bench.prefill(range(16)).miss_reason is MissReason.EVICTED


def test_a_request_waits_for_blocks_of_running_ones() -> None:
    bench = Bench(num_blocks=4, max_step_tokens=32)
    first, second = bench.submit(range(12)), bench.submit(range(50, 62))
    bench.run()
    assert first.result(0).usage.computed_tokens == second.result(0).usage.computed_tokens == 12
    assert bench.runner.steps == [[(0, 12)], [(0, 12)]]


def test_a_request_that_lacks_blocks_because_of_held_leases_is_refused_immediately() -> None:
    bench = Bench(num_blocks=4, held_lease_ttl_s=30.0)
    bench.prefill(range(12), hold_lease=True)
    refused = bench.submit(range(50, 62))
    bench.run()
    error = refused.exception(0)
    assert isinstance(error, OutOfBlocks)
    assert error.retry_after_s == 30.0


def test_a_tenant_beyond_its_ceiling_is_refused_and_delays_no_other_tenant() -> None:
    bench = Bench(quotas={"acme": Quota(ceiling_blocks=2)})
    refused, served = bench.submit(range(12), tenant="acme"), bench.submit(range(12), tenant="other")
    bench.run()
    assert isinstance(refused.exception(0), QuotaExceeded)
    assert served.result(0).usage.computed_tokens == 12
    other, acme = bench.core.stats.stats().tenants
    assert (acme.tenant, acme.ceiling_blocks, acme.cached_blocks) == ("acme", 2, 0)
    assert (other.tenant, other.cached_blocks, other.miss_tokens) == ("other", 3, 12)


class TestHeldLeases:
    def test_a_held_lease_keeps_its_blocks_from_eviction(self) -> None:
        bench = Bench(num_blocks=4)
        held = bench.prefill(range(8), hold_lease=True).held_lease
        assert held is not None
        bench.prefill(range(50, 58))
        bench.prefill(range(70, 78))
        assert bench.prefill(range(8)).usage.cached_tokens == 7
        assert held.block_table.size == 2

    def test_a_released_lease_no_longer_pins_its_blocks(self) -> None:
        bench = Bench()
        held = bench.prefill(range(8), hold_lease=True).held_lease
        assert held is not None
        assert bench.core.stats.load().blocks.pinned == 2
        bench.core.held_leases.release(held.lease_id, "")
        bench.cache.check()
        assert bench.core.stats.load().blocks.pinned == 0

    def test_the_blocks_of_a_held_lease_are_counted_and_its_tokens_are_not_stored(self) -> None:
        bench = Bench()
        held = bench.prefill(range(10), hold_lease=True).held_lease
        assert held is not None
        assert bench.cache.held.num_blocks == 3
        lease, num_tokens = bench.core.held_leases.lease_of(held.lease_id, "")
        assert (bytes(lease.tokens), num_tokens) == (b"", 10)

    def test_a_second_release_is_refused(self) -> None:
        bench = Bench()
        held = bench.prefill(range(8), hold_lease=True).held_lease
        assert held is not None
        bench.core.held_leases.release(held.lease_id, "")
        with pytest.raises(UnknownLease):
            bench.core.held_leases.release(held.lease_id, "")

    def test_a_held_lease_is_unknown_to_another_tenant(self) -> None:
        bench = Bench()
        held = bench.prefill(range(8), tenant="a", hold_lease=True).held_lease
        assert held is not None
        with pytest.raises(UnknownLease):
            bench.core.held_leases.release(held.lease_id, "b")
        assert len(bench.core.held_leases) == 1

    def test_the_lease_of_a_prompt_whose_invoked_adapter_was_purged_is_not_held(self) -> None:
        bench = Bench(max_step_tokens=4)
        bench.cache.marks.add("law")
        invocation, future = bench.cache.marks.invocation("law", 6), Future[PrefillResult]()
        params = PrefillParams(tokens(range(8)), hold_lease=True)
        bench.core.submit(Request(params, Namespace("fake"), future, 0.0, invocation=invocation))
        bench.core.step()  # the first four tokens, which are before the invocation
        all_slices(bench.core.purge_in_slices(tenant=None, adapter="law", salt=None))
        bench.run()
        assert future.result(0).held_lease is None
        assert bench.cache.num_pinned_blocks == 0

    def test_a_held_lease_expires(self) -> None:
        bench = Bench(held_lease_ttl_s=5.0)
        bench.prefill(range(8), hold_lease=True)
        bench.clock.now_s = 4.9
        bench.core.step()
        assert len(bench.core.held_leases) == 1
        bench.clock.now_s = 5.0
        bench.core.step()
        assert len(bench.core.held_leases) == 0
        assert bench.cache.num_pinned_blocks == 0

    def test_a_renewed_lease_expires_later_than_those_that_began_after_it(self) -> None:
        bench = Bench(held_lease_ttl_s=5.0)
        held = [bench.prefill(range(start, start + 8), hold_lease=True).held_lease for start in (0, 50)]
        assert held[0] is not None
        bench.clock.now_s = 4.0
        bench.core.renew(held[0].lease_id, "")
        bench.clock.now_s = 5.0
        bench.core.step()
        assert len(bench.core.held_leases) == 1
        bench.clock.now_s = 8.9
        bench.core.step()
        assert len(bench.core.held_leases) == 1
        bench.clock.now_s = 9.0
        bench.core.step()
        assert len(bench.core.held_leases) == 0

    def test_no_reported_expiry_is_later_than_the_real_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each reading of a clock takes a second."""
        bench = Bench(held_lease_ttl_s=50.0, max_tenant_held_leases=9)

        class SlowClock:
            now_s = 0.0

            def __call__(self) -> float:
                self.now_s += 1.0
                return self.now_s

        clock = SlowClock()
        monkeypatch.setattr(type(bench.clock), "__call__", lambda _: clock())
        monkeypatch.setattr(time, "time", clock)  # Unix time and the clock of the engine agree here
        held = bench.prefill(range(8), hold_lease=True).held_lease
        assert held is not None
        real_s = bench.core.held_leases.next_expiry_s()
        assert real_s is not None
        assert held.expires_at_s <= real_s
        reported_s = bench.core.renew(held.lease_id, "")
        real_s = bench.core.held_leases.next_expiry_s()
        assert real_s is not None
        assert reported_s <= real_s
        for retained in (
            bench.prefill(range(8), retention=Retention(80, ttl_s=60)).retained,
            bench.core.retain(Namespace("fake"), tokens(range(8)), Retention(80, ttl_s=60)),
        ):
            assert retained is not None
            assert retained.expires_at_s is not None
            assert retained.grant.expires_s is not None
            assert retained.expires_at_s <= retained.grant.expires_s

    def test_only_its_tenant_renews_a_lease_and_only_while_it_is_held(self) -> None:
        bench = Bench(held_lease_ttl_s=5.0)
        held = bench.prefill(range(8), tenant="a", hold_lease=True).held_lease
        assert held is not None
        with pytest.raises(UnknownLease):
            bench.core.renew(held.lease_id, "b")
        bench.core.held_leases.release(held.lease_id, "a")
        with pytest.raises(UnknownLease):
            bench.core.renew(held.lease_id, "a")

    def test_held_leases_are_bounded_in_number_and_the_refusal_says_when_to_retry(self) -> None:
        bench = Bench(held_lease_ttl_s=5.0, max_tenant_held_leases=2, max_held_leases=3)
        held = [bench.prefill(range(start, start + 8), tenant="a", hold_lease=True) for start in (0, 50)]
        bench.clock.now_s = 1.0
        refused = bench.submit(range(8), tenant="a", hold_lease=True)
        bench.run()
        error = refused.exception(0)
        assert isinstance(error, QuotaExceeded)
        assert str(error) == "hold_lease: expected fewer than 2 held leases of this tenant, got 2"
        assert error.cause is Cause.HOLD_LEASE
        assert error.retry_after_s == 4.0
        assert bench.prefill(range(8), tenant="a").usage.cached_tokens == 7, "without a lease it is served"
        bench.prefill(range(8), tenant="b", hold_lease=True)
        refused = bench.submit(range(8), tenant="c", hold_lease=True)
        bench.run()
        assert str(refused.exception(0)) == "hold_lease: expected fewer than 3 held leases of all tenants, got 3"
        assert held[0].held_lease is not None
        bench.core.held_leases.release(held[0].held_lease.lease_id, "a")
        assert bench.prefill(range(8), tenant="c", hold_lease=True).held_lease is not None
        bench.core.held_leases.close()
        assert not bench.core.held_leases._by_tenant
        bench.cache.check()
        assert bench.cache.pool.num_leased == bench.cache.num_pinned_blocks == 0

    def test_a_tenant_at_its_own_bound_does_not_learn_when_another_tenants_lease_expires(self) -> None:
        bench = Bench(held_lease_ttl_s=10.0, max_tenant_held_leases=1, max_held_leases=2)
        for now_s, tenant in ((1.0, "a"), (3.0, "b")):
            bench.clock.now_s = now_s
            bench.prefill(range(8), tenant=tenant, hold_lease=True)
        bench.clock.now_s = 5.0
        refused = [bench.submit(range(8), tenant=tenant, hold_lease=True) for tenant in ("b", "c")]
        bench.run()
        errors = [future.exception(0) for future in refused]
        assert [type(error) for error in errors] == [QuotaExceeded, OutOfBlocks]
        assert [error.retry_after_s for error in errors if isinstance(error, CapacityError)] == [8.0, 6.0]

    def test_a_tenant_at_its_ceiling_without_a_held_lease_gets_no_time_to_retry(self) -> None:
        bench = Bench(quotas={"b": Quota(ceiling_blocks=2)}, held_lease_ttl_s=10.0)
        bench.prefill(range(8), tenant="a", hold_lease=True)
        refused = bench.submit(range(16), tenant="b")
        bench.run()
        error = refused.exception(0)
        assert isinstance(error, QuotaExceeded)
        assert error.retry_after_s == 1.0

    def test_requests_that_run_together_do_not_hold_more_leases_than_allowed(self) -> None:
        bench = Bench(max_step_tokens=64, max_tenant_held_leases=2)
        futures = [bench.submit(range(start, start + 8), hold_lease=True) for start in range(0, 500, 100)]
        bench.run()
        assert [future.exception(0) is None for future in futures] == [True, True, False, False, False]
        assert len(bench.core.held_leases) == 2

    def test_a_request_that_may_not_hold_its_lease_releases_its_blocks(self) -> None:
        bench = Bench(num_blocks=16)
        bench.cache.held.max_blocks = 4
        bench.prefill(range(8), hold_lease=True)
        refused = bench.submit(range(50, 62), hold_lease=True)
        bench.run()
        assert isinstance(refused.exception(0), QuotaExceeded)
        assert bench.cache.pool.num_leased == 0
        assert bench.cache.num_pinned_blocks == 2


def test_priorities_that_expire_together_expire_over_the_following_steps() -> None:
    bench = Bench(num_blocks=640)
    bench.cache.max_retained_blocks = bench.cache._retained.max_blocks = 640
    for start in range(300):
        bench.prefill([start, start], retention=Retention(priority=80, ttl_s=5.0))
    assert bench.cache._retained.num_blocks == 300
    bench.clock.now_s = 5.0
    bench.core.step()
    assert bench.cache._retained.num_blocks == 300 - 256
    bench.core.step()
    assert bench.cache._retained.num_blocks == 0


class TestEndsOfRequests:
    def test_a_cancelled_request_releases_its_blocks_between_chunks(self) -> None:
        bench = Bench(max_step_tokens=4)
        future = bench.submit(range(12))
        bench.core.step()
        assert future.cancel()
        bench.core.step()
        bench.cache.check()
        assert not bench.core.has_work
        assert bench.core.stats.load().requests.cancelled == 1
        assert bench.cache.pool.num_leased == 0
        assert bench.prefill(range(12)).usage.cached_tokens == 4, "what was published stays cached"

    def test_a_cancelled_waiting_request_never_runs(self) -> None:
        bench = Bench()
        future = bench.submit(range(12))
        future.cancel()
        bench.run()
        assert bench.runner.steps == []

    def test_a_deadline_is_honoured_between_chunks(self) -> None:
        bench = Bench(max_step_tokens=4)
        future = bench.submit(range(12), deadline_s=10.0)
        bench.core.step()
        bench.clock.now_s = 10.0
        bench.run()
        assert isinstance(future.exception(0), DeadlinePassed)
        assert len(bench.runner.steps) == 1
        assert bench.cache.pool.num_leased == 0

    def test_a_request_that_is_cancelled_after_its_deadline_counts_as_late(self) -> None:
        bench = Bench(max_step_tokens=4)
        in_time, late = bench.submit(range(12), deadline_s=20.0), bench.submit(range(12), deadline_s=10.0)
        bench.core.step()
        in_time.cancel()
        late.cancel()  # as a server does that enforces the deadline as well
        bench.clock.now_s = 10.0
        bench.core.step()
        ended = bench.core.stats.load().requests
        assert (ended.cancelled, ended.failed) == (1, 1)

    def test_a_failed_step_fails_its_requests_publishes_nothing_and_the_next_one_works(self) -> None:
        bench = Bench(max_step_tokens=32)
        bench.runner.fail_next = RuntimeError("no such luck")
        failed = [bench.submit(range(start, start + 8)) for start in (0, 20)]
        bench.core.step()
        assert all(isinstance(future.exception(0), StepFailed) for future in failed)
        assert bench.cache.pool.num_free == 64
        assert bench.prefill(range(8)).usage.cached_tokens == 0

    def test_values_that_are_not_finite_fail_their_request_alone_and_publish_nothing(self) -> None:
        bench = Bench(max_step_tokens=32)
        bench.runner.not_finite = tokens(range(8))
        bad, good = bench.submit(range(8)), bench.submit(range(20, 28))
        bench.run()
        assert isinstance(bad.exception(0), StepFailed)
        assert good.result(0).usage.written_tokens == 8
        bench.runner.not_finite = None
        assert bench.prefill(range(8)).usage.cached_tokens == 0

    def test_a_failure_while_the_logits_are_read_is_a_failed_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def lose_device(*_: object) -> None:
            raise RuntimeError("the device is gone")

        bench = Bench()
        monkeypatch.setattr("radixkv.engine.step.predict", lose_device)
        future = bench.submit(range(8))
        bench.run()
        assert isinstance(future.exception(0), StepFailed)
        assert bench.cache.pool.num_free == 64

    def test_a_deadline_that_passes_in_the_last_step_holds_no_lease(self) -> None:
        bench = Bench()
        future = bench.submit(range(8), deadline_s=1.0, hold_lease=True)
        run = bench.runner.run

        def slow_run(chunks: Sequence[Chunk]) -> StepResult:
            bench.clock.now_s = 2.0
            return run(chunks)

        bench.runner.run = slow_run  # type: ignore[method-assign]
        bench.run()
        assert isinstance(future.exception(0), DeadlinePassed)
        assert len(bench.core.held_leases) == 0

    def test_an_observer_that_raises_affects_no_request(self, caplog: pytest.LogCaptureFixture) -> None:
        class Broken(Observer):
            def request_ended(self, *_: object) -> None:
                raise ZeroDivisionError

        bench = Bench(observers=[Broken()])
        assert bench.prefill(range(8)).usage.prompt_tokens == 8
        assert "an observer raised an exception" in caplog.text

    def test_steps_without_finite_results_count_as_failed(self) -> None:
        bench = Bench()
        bench.runner.not_finite = tokens(range(8))
        for num_failed in (1, 2):
            bench.submit(range(8))
            bench.run()
            assert bench.core.num_failed_steps == num_failed
        bench.prefill(range(20, 28))
        assert bench.core.num_failed_steps == 0

    def test_a_trial_step_needs_no_quota_of_any_tenant(self) -> None:
        bench = Bench(quotas={"": Quota(ceiling_blocks=3)})
        bench.prefill(range(12), hold_lease=True)
        bench.runner.fail_next = RuntimeError("no such luck")
        bench.submit(range(8), tenant="other")
        bench.run()
        assert bench.core.num_failed_steps == 1
        bench.core.try_step()
        assert bench.core.num_failed_steps == 0
        assert bench.cache.pool.num_leased + bench.cache.num_pinned_blocks == 3, "only the blocks of the held lease"

    def test_closing_fails_everything_and_frees_every_lease(self) -> None:
        bench = Bench(max_step_tokens=4)
        bench.prefill(range(100, 108), hold_lease=True)
        running, waiting = bench.submit(range(12)), bench.submit(range(20, 32))
        bench.core.step()
        bench.core.close(Draining("stopped"))
        bench.cache.check()
        assert isinstance(running.exception(0), Draining)
        assert isinstance(waiting.exception(0), Draining)
        assert bench.cache.pool.num_leased == bench.cache.num_pinned_blocks == 0


def test_stats_add_up() -> None:
    bench = Bench()
    bench.prefill(range(10))
    bench.prefill(range(10))
    stats = bench.core.stats.stats()
    blocks = stats.load.blocks
    assert stats.tokens.prompt == 20 == stats.tokens.cached + stats.tokens.computed
    assert blocks.total == blocks.free + blocks.leased + blocks.published
    assert (stats.load.requests.finished, stats.segments, stats.load.namespaces) == (2, 1, 1)


def test_top_logprobs_are_sorted_and_begin_with_the_next_token() -> None:
    bench = Bench()
    result = bench.prefill(range(4), top_logprobs=3, return_logits=True)
    ids, values = zip(*result.top_logprobs, strict=True)
    assert ids[0] == result.next_token_id
    assert list(values) == sorted(values, reverse=True)
    assert result.logits is not None
    assert result.logits.argmax() == result.next_token_id


def test_a_request_that_has_ended_is_freed_without_the_garbage_collector() -> None:
    bench = Bench()
    gc.disable()
    try:
        futures: list[Future[Any]] = [bench.submit(range(8)), bench.generate(range(20, 24), max_new_tokens=2)]
        requests = [weakref.ref(request) for request in bench.core._scheduler.requests()]
        bench.run()
        assert all(future.done() for future in futures)
        assert [request() for request in requests] == [None, None]
    finally:
        gc.enable()


def test_no_more_requests_run_than_allowed() -> None:
    bench = Bench(max_step_tokens=64, max_running_requests=2)
    for start in (0, 20, 40):
        bench.submit(range(start, start + 8))
    bench.core.step()
    assert [len(step) for step in bench.runner.steps] == [2]
    assert bench.core.stats.load().requests.waiting == 1


def test_the_load_equals_that_of_stats_without_a_walk_through_the_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(num_blocks=4)
    for start in (0, 50):
        bench.prefill(range(start, start + 12), hold_lease=True)
        bench.core.held_leases.close()
    bench.submit(range(8), tenant="acme")
    stats = bench.core.stats.stats()
    assert (stats.load.evicted_blocks, stats.load.namespaces, stats.load.requests.waiting) == (2, 1, 1)

    def refuse_to_walk(tree: RadixTree) -> None:
        raise AssertionError("segments are not needed")

    monkeypatch.setattr(RadixTree, "nodes", refuse_to_walk)
    load = bench.core.stats.load()
    assert load == stats.load


def test_stats_report_the_largest_tenants_and_their_number_or_one_by_name() -> None:
    bench = Bench()
    for number in range(3):
        bench.submit(range(4 * number + 4), tenant=str(number))
    bench.run()
    collector = bench.core.stats
    stats = collector.stats(max_tenants=2)
    assert [each.tenant for each in stats.tenants] == ["2", "1"]
    assert stats.known_tenants == 3
    assert [each.tenant for each in collector.stats(tenant="0").tenants] == ["0"]
    assert collector.stats(tenant="unknown").tenants == ()
    assert collector.stats().known_tenants == 3
