import asyncio

import numpy as np
import pytest

from bench.hostile.isolation.timing import audit, p_value
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serving


def test_prompts_that_should_miss_share_no_prefix_with_the_callers_own():
    engine = FakeEngine()

    async def run():
        async with serving(engine) as (_, address):
            await audit(address, 60, 1)

    asyncio.run(run())
    own = [params.tokens for params in engine.params if params.caller.tenant == "attacker" and params.write_cache]
    timed = [params.tokens for params in engine.params if not params.write_cache]
    misses = [tokens for tokens in timed if tokens not in own]
    assert (len(own), len(misses)) == (60, 120)
    assert {tokens[:4] for tokens in misses}.isdisjoint(tokens[:4] for tokens in own)


def test_an_audit_times_prompts_of_others_uncached_prompts_and_own_prompts():
    async def run():
        async with serving(FakeEngine()) as (_, address):
            return await audit(address, 5, 1)

    timed = asyncio.run(run())
    assert timed.samples == 5
    assert min(timed.other_ms, timed.uncached_ms, timed.own_ms) > 0
    assert 0 <= timed.p_other <= 1
    assert 0 <= timed.p_own <= 1


def test_samples_of_one_distribution_have_a_high_p_value():
    rng = np.random.default_rng(1)
    assert p_value(rng.normal(size=250), rng.normal(size=250)) > 0.05


def test_a_shift_by_half_a_deviation_is_detected():
    rng = np.random.default_rng(1)
    assert p_value(rng.normal(size=250), rng.normal(size=250) + 0.5) < 1e-4


def test_the_p_value_is_that_of_the_formula():
    """For the distance 0.25 of two samples of 100, the statistic is 1.8057, and p is 2 * exp(-2 * 1.8057^2)."""
    assert p_value(range(100), range(25, 125)) == pytest.approx(0.0029, abs=0.0002)
    assert p_value([1, 2, 3], [1, 2, 3]) == 1.0
