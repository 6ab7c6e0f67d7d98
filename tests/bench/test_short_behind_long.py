"""The wait of a prompt is compared with the two steps that it may wait for, observed by probes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from bench.short_behind_long import DelaySample, StepWatch, ask
from tests.fakes import FakeClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr("bench.short_behind_long.time", SimpleNamespace(monotonic=clock))
    return clock


class FakeClient:
    """Answers each probe at the end of the next step, and a prefill after a second, in virtual time."""

    def __init__(self, clock: FakeClock, steps_s: list[float]) -> None:
        self.clock = clock
        self.steps_s = steps_s
        self.is_last_step_over = asyncio.Event()

    async def probe(self, ids: list[int]) -> None:
        if not self.steps_s:
            self.is_last_step_over.set()
            await asyncio.Event().wait()
        self.clock.now_s += self.steps_s.pop(0)

    async def prefill(self, ids: list[int]) -> SimpleNamespace:
        self.clock.now_s += 1
        return SimpleNamespace(usage=SimpleNamespace(computed_tokens=len(ids)))


@pytest.mark.parametrize(
    ("start_s", "end_s", "two_steps_s"),
    [(0.5, 0.9, 3), (1.5, 2.5, 6), (3.5, 4, 5), (7.2, 7.5, 1), (0.5, 7.5, 6)],
    ids=["during step 1", "during steps 2 and 3", "during step 3", "during the last step", "during all steps"],
)
def test_the_longest_two_successive_steps_count(
    clock: FakeClock, start_s: float, end_s: float, two_steps_s: float
) -> None:
    """The steps end at 1, 3, 7 and 8 seconds."""

    async def watch() -> float:
        client = FakeClient(clock, [1, 2, 4, 1])
        steps = StepWatch(client)
        await client.is_last_step_over.wait()
        steps.stop()
        return steps.two_steps_s(start_s, end_s)

    assert asyncio.run(watch()) == two_steps_s


def test_a_prompt_may_take_two_steps_and_its_own_time() -> None:
    assert DelaySample(seconds=3, alone_s=1, two_steps_s=2).ratio == 1
    assert DelaySample(seconds=6, alone_s=1, two_steps_s=2).ratio == 2


def test_a_prompt_is_timed_from_call_to_answer(clock: FakeClock) -> None:
    clock.now_s = 5

    async def call() -> tuple[float, float]:
        return await ask(FakeClient(clock, []), [1, 2, 3])

    assert asyncio.run(call()) == (5, 1)
