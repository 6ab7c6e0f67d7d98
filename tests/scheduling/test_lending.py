"""Blocks of long prompts that short requests use meanwhile, in an engine core over a fake runner.

The long prompt fills the pool of 64 blocks of 4 tokens, and a step computes 8 tokens.
"""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from radixkv.api.result import PrefillResult
from radixkv.cache.tenants import Quota
from radixkv.errors import QuotaExceeded
from radixkv.scheduling import lending
from tests.core_bench import Bench
from tests.fake_runner import next_token, tokens

_LONG = range(254)


def _bench(**config: object) -> tuple[Bench, Future[PrefillResult]]:
    """Make an engine core in which the long prompt has all blocks and its first tokens are computed."""
    bench = Bench(num_blocks=64, max_step_tokens=8, **config)
    long = bench.submit(_LONG, tenant="long")
    bench.core.step()
    return bench, long


def _steps_until_done(bench: Bench, future: Future[PrefillResult], most: int = 10) -> int:
    for num_steps in range(1, most + 1):
        bench.core.step()
        bench.cache.check()
        if future.done():
            return num_steps
    pytest.fail(f"no answer after {most} steps")


def _ends_unhurt(bench: Bench, long: Future[PrefillResult]) -> None:
    """Assert that the long prompt is answered in the end, and computed nothing twice."""
    bench.run()
    result = long.result(0)
    assert result.next_token_id == next_token(tokens(_LONG))
    assert (result.usage.computed_tokens, result.usage.recomputed_tokens) == (254, 0)
    assert bench.core.tally.load().requests.pauses == 0


@pytest.mark.parametrize("config", [{}, {"num_snapshots": 4}])
def test_a_short_prompt_does_not_wait_for_one_as_long_as_the_pool(config: dict[str, int]) -> None:
    bench, long = _bench(**config)
    short = bench.submit(range(100, 107), tenant="short")
    assert _steps_until_done(bench, short) <= 2
    assert not long.done()
    assert short.result(0).next_token_id == next_token(tokens(range(100, 107)))
    _ends_unhurt(bench, long)


def test_nor_does_one_of_the_same_tenant() -> None:
    bench, long = _bench()
    short = bench.submit(range(100, 107), tenant="long")
    assert _steps_until_done(bench, short) <= 3
    _ends_unhurt(bench, long)


def test_an_answer_has_its_blocks_from_the_beginning() -> None:
    bench, long = _bench()
    answer = bench.generate(range(100, 106), 9, tenant="short")
    assert _steps_until_done(bench, answer, most=12) <= 12
    assert len(answer.result(0).token_ids) == 9
    assert not long.done()
    _ends_unhurt(bench, long)


def test_many_short_ones_pass_one_after_the_other_and_side_by_side() -> None:
    bench, long = _bench()
    for first in range(0, 120, 6):
        futures = [bench.submit([200 + each, *range(first, first + 3)], tenant="short") for each in range(2)]
        assert max(_steps_until_done(bench, future) if not future.done() else 0 for future in futures) <= 3
    assert not long.done()
    _ends_unhurt(bench, long)


def test_what_is_free_is_taken_back_before_the_next_step() -> None:
    bench, _ = _bench()
    (long,) = bench.core._scheduler.running
    short = bench.submit(range(100, 107), tenant="short")
    _steps_until_done(bench, short)
    assert bench.core._growth._lending.num_lent_blocks(long) > 0
    bench.core.step()
    assert bench.core._growth._lending.num_lent_blocks(long) == 0
    assert bench.cache.pool.num_free == 0


@pytest.mark.parametrize("max_new_tokens", [25, 200])
def test_an_answer_that_would_last_too_long_waits(max_new_tokens: int) -> None:
    bench, long = _bench()
    answer = bench.generate(range(100, 104), max_new_tokens, tenant="short")
    while not long.done():
        bench.core.step()
        assert answer.told == []  # type: ignore[attr-defined]
    _ends_unhurt(bench, long)
    assert len(answer.result(0).token_ids) == max_new_tokens


def test_a_lease_that_is_held_afterwards_waits() -> None:
    bench, long = _bench()
    held = bench.submit(range(100, 104), tenant="short", hold_lease=True)
    while not long.done():
        assert not held.done()
        bench.core.step()
    bench.run()
    assert held.result(0).held_lease is not None


def test_a_prompt_that_needs_more_than_is_lent_waits_and_nothing_changes() -> None:
    bench, long = _bench()
    (running,) = bench.core._scheduler.running
    before = running.open_lease.block_ids.tolist()
    other = bench.submit([*range(100, 254), *range(100)], tenant="short")
    bench.core.step()
    assert running.open_lease.block_ids.tolist() == before
    _ends_unhurt(bench, long)
    assert other.result(0).usage.computed_tokens == 254


def test_a_borrower_that_is_late_is_paused_once_and_borrows_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "_TURN_TOKENS", 1000)  # it is expected to end with the step
    bench, long = _bench()
    late = bench.submit([*range(100, 220), *range(100)], tenant="short")
    bench.run()
    assert long.result(0).usage.recomputed_tokens == 0
    assert bench.core.tally.load().requests.pauses == 1
    assert late.result(0).next_token_id == next_token(tokens([*range(100, 220), *range(100)]))


def test_at_a_ceiling_only_an_own_prompt_helps() -> None:
    bench = Bench(num_blocks=64, max_step_tokens=8, quotas={"small": Quota(ceiling_blocks=32)})
    own, other = bench.submit(range(120), tenant="small"), bench.submit(range(120, 240), tenant="other")
    for _ in range(2):
        bench.core.step()
    (first, second) = sorted(bench.core._scheduler.running, key=lambda request: request.tenant)
    short = bench.submit(range(100, 111), tenant="small")
    bench.core.step()
    lent = bench.core._growth._lending.num_lent_blocks
    assert (first.tenant, lent(first), lent(second)) == ("other", 0, 4)
    assert _steps_until_done(bench, short, most=4) <= 4
    assert not own.done()
    bench.run()
    assert own.result(0).usage.recomputed_tokens == other.result(0).usage.recomputed_tokens == 0
    with pytest.raises(QuotaExceeded):
        bench.prefill(range(200), tenant="small")
