"""Blocks of long prompts that are lent to short requests, in an engine core over a fake runner.

Unless a test says otherwise, the long prompt fills the pool of 64 blocks of 4 tokens, and a step computes 8 tokens.
"""

from __future__ import annotations

from concurrent.futures import Future
from unittest.mock import Mock

import pytest

from radixkv.api.result import PrefillResult
from radixkv.cache.lease import Lease
from radixkv.cache.tenants import Quota
from radixkv.namespace import PUBLIC_TENANT, Namespace
from radixkv.scheduling.lending import Lending
from tests.core_bench import Bench
from tests.fake_runner import next_token, tokens

_LONG_PROMPT = range(254)


def _bench(**config: object) -> tuple[Bench, Future[PrefillResult]]:
    """Make an engine core in which the long prompt has all blocks and its first tokens are computed."""
    bench = Bench(num_blocks=64, max_step_tokens=8, **config)
    long = bench.submit(_LONG_PROMPT, tenant="long")
    bench.core.step()
    return bench, long


def _steps_until_done(bench: Bench, future: Future[PrefillResult], max_steps: int = 10) -> int:
    for num_steps in range(1, max_steps + 1):
        bench.core.step()
        bench.cache.check()
        if future.done():
            return num_steps
    pytest.fail(f"no answer after {max_steps} steps")


def _assert_computed_once(bench: Bench, long: Future[PrefillResult]) -> None:
    """Assert that the long prompt is answered, and that none of its tokens was computed twice."""
    bench.run()
    result = long.result(0)
    assert result.next_token_id == next_token(tokens(_LONG_PROMPT))
    assert (result.usage.computed_tokens, result.usage.recomputed_tokens) == (254, 0)
    assert bench.core.stats.load().requests.pauses == 0


@pytest.mark.parametrize("config", [{}, {"num_snapshots": 4}])
def test_a_short_prompt_does_not_wait_for_one_as_long_as_the_pool(config: dict[str, int]) -> None:
    bench, long = _bench(**config)
    short = bench.submit(range(100, 107), tenant="short")
    assert _steps_until_done(bench, short) <= 2
    assert not long.done()
    assert short.result(0).next_token_id == next_token(tokens(range(100, 107)))
    _assert_computed_once(bench, long)


def test_cached_tokens_of_a_short_prompt_need_no_borrowed_blocks() -> None:
    bench = Bench(num_blocks=85, max_step_tokens=8)
    bench.prefill(range(80), tenant="short")
    with bench.cache.lease(Namespace("fake", "short"), tokens(range(80))):  # keeps the beginning of the short prompt
        long = bench.submit(_LONG_PROMPT, tenant="long")
        for _ in range(27):
            bench.core.step()
        short = bench.submit([*range(80), 90, 91], tenant="short")
        assert _steps_until_done(bench, short) <= 2
    _assert_computed_once(bench, long)


def test_a_short_prompt_of_the_tenant_of_the_long_one_does_not_wait_either() -> None:
    bench, long = _bench()
    short = bench.submit(range(100, 107), tenant="long")
    assert _steps_until_done(bench, short) <= 3
    _assert_computed_once(bench, long)


def test_a_borrowing_generation_has_all_its_blocks_from_the_beginning() -> None:
    bench, long = _bench()
    answer = bench.generate(range(100, 106), 9, tenant="short")
    assert _steps_until_done(bench, answer, max_steps=12) <= 12
    assert len(answer.result(0).token_ids) == 9
    assert not long.done()
    _assert_computed_once(bench, long)


def test_many_short_prompts_borrow_in_sequence_and_at_the_same_time() -> None:
    bench, long = _bench()
    for first in range(0, 120, 6):
        futures = [bench.submit([200 + number, *range(first, first + 3)], tenant="short") for number in range(2)]
        for future in futures:
            assert future.done() or _steps_until_done(bench, future) <= 3
    assert not long.done()
    _assert_computed_once(bench, long)


def test_free_blocks_are_reclaimed_before_the_next_step() -> None:
    bench, _ = _bench()
    _steps_until_done(bench, bench.submit(range(100, 107), tenant="short"))
    assert bench.core._preemptor._lending.num_lent_blocks > 0
    bench.core.step()
    assert bench.core._preemptor._lending.num_lent_blocks == 0
    assert bench.cache.pool.num_free == 0


@pytest.mark.parametrize("max_new_tokens", [25, 200])
def test_a_generation_that_would_run_too_long_does_not_borrow(max_new_tokens: int) -> None:
    bench, long = _bench()
    answer = bench.generate(range(100, 104), max_new_tokens, tenant="short")
    while not long.done():
        bench.core.step()
        assert answer.streamed == []  # type: ignore[attr-defined]
    _assert_computed_once(bench, long)
    assert len(answer.result(0).token_ids) == max_new_tokens


def test_a_request_that_holds_its_lease_borrows_nothing() -> None:
    bench, long = _bench()
    held = bench.submit(range(100, 104), tenant="short", hold_lease=True)
    while not long.done():
        assert not held.done()
        bench.core.step()
    bench.run()
    assert held.result(0).held_lease is not None


def test_a_prompt_that_needs_more_than_is_lent_waits_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, long = _bench()
    release_last = Mock()
    monkeypatch.setattr(Lease, "release_last", release_last)
    second = bench.submit(range(100, 240), tenant="short")
    _assert_computed_once(bench, long)
    assert not release_last.called
    assert second.result(0).usage.computed_tokens == 140


def test_a_borrower_that_is_late_is_preempted_once_and_borrows_no_more() -> None:
    # With this weight, the second turn of the short prompt comes when the long prompt is computed.
    bench, long = _bench(weights={"short": 0.01})
    late = bench.submit(range(100, 112), tenant="short")
    bench.run()
    assert long.result(0).usage.recomputed_tokens == 0
    assert bench.core.stats.load().requests.pauses == 1
    assert late.result(0).next_token_id == next_token(tokens(range(100, 112)))


def test_a_preempted_request_borrows_no_more() -> None:
    bench, long = _bench()
    answer = bench.generate(range(100, 106), 9, tenant="short")
    for _ in range(3):
        bench.core.step()
    (borrower,) = (request for request in bench.core._scheduler.running if request.tenant == "short")
    bench.core._preemptor.preempt(borrower)
    while not long.done():
        assert not answer.done()
        bench.core.step()
    bench.run()
    assert len(answer.result(0).token_ids) == 9


def test_blocks_for_the_next_tokens_of_generations_stay_free() -> None:
    bench = Bench(num_blocks=92, max_step_tokens=16)
    long = bench.submit(_LONG_PROMPT, tenant="long")
    bench.core.step()
    answers = [bench.generate([first, *range(3)], 60, tenant="answers") for first in range(100, 108)]
    while bench.cache.pool.num_free:
        bench.core.step()
    short = bench.submit(range(120, 124), tenant="short")
    assert _steps_until_done(bench, short) <= 2
    bench.run()
    assert long.result(0).next_token_id == next_token(tokens(_LONG_PROMPT))
    assert all(len(answer.result(0).token_ids) == 60 for answer in answers)


@pytest.mark.parametrize(
    ("lender", "borrower"),
    [(Quota(), Quota(floor_blocks=8)), (Quota(ceiling_blocks=64), Quota())],
    ids=["the borrower has a floor", "the lender has a ceiling"],
)
def test_no_request_borrows_blocks_that_could_not_be_reclaimed(lender: Quota, borrower: Quota) -> None:
    bench, long = _bench(quotas={"long": lender, "short": borrower})
    short = bench.submit(range(100, 107), tenant="short")
    while not long.done():
        assert not short.done()
        bench.core.step()
    _assert_computed_once(bench, long)
    assert short.result(0).usage.computed_tokens == 7


def test_a_public_prefix_borrows_nothing() -> None:
    bench, long = _bench()
    prefix = bench.submit(range(100, 107), tenant=PUBLIC_TENANT)
    while not long.done():
        assert not prefix.done()
        bench.core.step()
    _assert_computed_once(bench, long)


def test_if_borrowing_fails_all_lent_blocks_are_reclaimed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, long = _bench()
    (running,) = bench.core._scheduler.running
    num_blocks_before = running.open_lease.block_ids.size
    # One block fewer is lent than the short prompt needs.
    monkeypatch.setattr(Lending, "max_tokens", lambda _, request: request.num_tokens - 4)
    short = bench.submit(range(100, 112), tenant="short")
    bench.core.step()
    assert not short.done()
    assert running.open_lease.block_ids.size == num_blocks_before
    _assert_computed_once(bench, long)


def test_a_step_inspects_running_requests_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, long = _bench()
    num_spare_blocks = Mock(return_value=0)
    monkeypatch.setattr(Lending, "_num_spare_blocks", num_spare_blocks)
    for tenant in range(40):
        bench.submit(range(100, 104), tenant=str(tenant))
    for _ in range(4):
        bench.core.step()
    assert 0 < num_spare_blocks.call_count <= 4 * 8, "at most 8 times per step"
    _assert_computed_once(bench, long)


def test_a_request_that_has_ended_does_not_lend() -> None:
    bench, _ = _bench()
    (long,) = bench.core._scheduler.running
    _steps_until_done(bench, bench.submit(range(100, 107), tenant="short"))
    assert bench.core._preemptor._lending.num_lent_blocks > 0
    long.future.cancel()
    bench.run()
    assert bench.core._preemptor._lending.num_lent_blocks == 0
    assert bench.prefill(range(200)).usage.computed_tokens == 200
