from __future__ import annotations

import asyncio
import signal

import pytest

from bench.parts.interruption import Interruption


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_ends_a_measurement_and_the_previous_handler_gets_the_second(number: signal.Signals) -> None:
    handled: list[int] = []

    async def run() -> None:
        interruption = Interruption()
        with interruption.handled():
            assert interruption.name is None
            signal.raise_signal(number)
            await interruption.event.wait()
            assert (interruption.name, handled) == (number.name, [])
            signal.raise_signal(number)
            assert handled == [number]

    before = signal.signal(number, lambda number, _: handled.append(number))
    try:
        asyncio.run(run())
    finally:
        signal.signal(number, before)


def test_without_a_signal_the_previous_handlers_are_restored() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)

    async def run() -> None:
        before = [signal.getsignal(number) for number in numbers]
        with Interruption().handled():
            assert [signal.getsignal(number) for number in numbers] != before
        assert [signal.getsignal(number) for number in numbers] == before

    asyncio.run(run())
