import asyncio
import time

import pytest

from radixkv.config import ServerConfig
from radixkv.service.client import AsyncClient
from radixkv.service.server.servicers.engine_calls import seconds_left
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serving


class CallWithDeadline:
    """A call whose deadline ends after this time in seconds; None for no deadline."""

    def __init__(self, remaining_s):
        self.time_remaining = lambda: remaining_s


@pytest.mark.parametrize(("requested_s", "expected_s"), [(None, 20), (5, 5), (1e9, 30)])
def test_a_deadline_is_the_callers_own_within_bounds(requested_s, expected_s):
    config = ServerConfig(default_deadline_s=20, max_deadline_s=30)
    assert seconds_left(CallWithDeadline(requested_s), config) == expected_s


def test_the_default_is_bounded_too():
    config = ServerConfig(default_deadline_s=600, max_deadline_s=10)
    assert seconds_left(CallWithDeadline(None), config) == 10


def test_a_prompt_without_a_deadline_has_the_default():
    async def run():
        engine = FakeEngine()
        async with serving(engine, default_deadline_s=1000) as (_, address), AsyncClient(address) as client:
            await client.prefill([1])
            await client.prefill([1], timeout_s=60)
            default_s, own_s = (params.deadline_s - time.monotonic() for params in engine.params)
            return 61 < default_s <= 1000, own_s <= 61  # gRPC rounds up

    assert asyncio.run(run()) == (True, True)


def test_a_generation_is_bounded_too():
    async def run():
        engine = FakeEngine()
        async with serving(engine, max_deadline_s=100) as (_, address), AsyncClient(address) as client:
            async for _ in client.generate([1], max_new_tokens=1, timeout_s=100_000):
                pass
            return engine.params[0].deadline_s - time.monotonic()

    assert asyncio.run(run()) <= 100
