from __future__ import annotations

import asyncio
import signal

import pytest

from bench.parts.interruption import Interruption


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_ends_a_measurement_and_the_previous_handler_gets_the_second(
    signal_number: signal.Signals,
) -> None:
    handled: list[int] = []

    async def run() -> None:
        interruption = Interruption()
        with interruption.handled():
            assert interruption.name is None
            signal.raise_signal(signal_number)
            await interruption.event.wait()
            assert (interruption.name, handled) == (signal_number.name, [])
            signal.raise_signal(signal_number)
            assert handled == [signal_number]

    previous_handler = signal.signal(signal_number, lambda received_number, _: handled.append(received_number))
    try:
        asyncio.run(run())
    finally:
        signal.signal(signal_number, previous_handler)


def test_without_a_signal_the_previous_handlers_are_restored() -> None:
    signal_numbers = (signal.SIGINT, signal.SIGTERM)

    async def run() -> None:
        before = [signal.getsignal(signal_number) for signal_number in signal_numbers]
        with Interruption().handled():
            assert [signal.getsignal(signal_number) for signal_number in signal_numbers] != before
        assert [signal.getsignal(signal_number) for signal_number in signal_numbers] == before

    asyncio.run(run())
