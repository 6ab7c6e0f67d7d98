import asyncio

from bench.hostile.isolation.timing import audit
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serving


def test_an_audit_times_each_arm_and_counts_what_should_not_be_cached():
    async def run():
        async with serving(FakeEngine()) as (_, address):
            return await audit(address, 5, 1)

    timed = asyncio.run(run())
    assert timed.samples == 5
    assert min(timed.other_ms, timed.uncached_ms, timed.own_ms) > 0
    assert 0 <= timed.p_other <= 1
    assert 0 <= timed.p_own <= 1
