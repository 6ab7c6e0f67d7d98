"""Which streams continue in an iteration of the event loop, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from radixkv.service.server.receive.fair_shares import QuotaKey
from radixkv.service.server.servicers.stream_turns import StreamTurns

BUSY, OTHER = QuotaKey.of_tenant("busy"), QuotaKey.of_tenant("other")


async def turns_of(
    keys: Sequence[QuotaKey], num_chunks: int = 1, cancelled: Sequence[int] = (), *, cancelled_in: int = 1
) -> list[tuple[int, int]]:
    """Return, in order, in which iteration of the event loop a stream continued, and the number of the stream.

    Iterations count from 1. Stream 0 is the first to wait, and continues at once. All other streams wait after
    iteration 1. In iteration 2, the first of them gets its turn, and it continues in iteration 3.
    """
    turns, iteration, continued = StreamTurns(), 0, []

    async def stream(number: int) -> None:
        for _ in range(num_chunks):
            await turns.wait(keys[number])
            continued.append((iteration, number))

    tasks = [asyncio.create_task(stream(number)) for number in range(len(keys))]
    while not all(task.done() for task in tasks):
        iteration += 1
        await asyncio.sleep(0)
        if iteration == cancelled_in:
            for number in cancelled:
                tasks[number].cancel()
    return continued


def test_one_stream_continues_in_each_iteration() -> None:
    continued = asyncio.run(turns_of([BUSY] * 10, num_chunks=2))
    assert [number for _, number in continued] == [0, 0, *range(1, 10), *range(1, 10)]
    iterations = [iteration for iteration, _ in continued]
    assert len(set(iterations)) == len(iterations)


def test_a_single_stream_continues_at_once() -> None:
    assert [iteration for iteration, _ in asyncio.run(turns_of([BUSY]))] == [1]


def test_keys_take_turns() -> None:
    continued = asyncio.run(turns_of([BUSY, BUSY, BUSY, BUSY, OTHER, OTHER]))
    assert [number for _, number in continued] == [0, 1, 4, 2, 5, 3]


def test_a_cancelled_stream_leaves_its_turn_to_the_next() -> None:
    continued = asyncio.run(turns_of([BUSY] * 5, cancelled=[1, 3]))
    assert [number for _, number in continued] == [0, 2, 4]


@pytest.mark.parametrize("cancelled_in", [1, 2])
def test_the_turn_of_a_cancelled_stream_passes_to_another_one_of_its_key(cancelled_in: int) -> None:
    keys = [BUSY, BUSY, BUSY, OTHER, OTHER]
    continued = asyncio.run(turns_of(keys, cancelled=[1], cancelled_in=cancelled_in))
    assert [number for _, number in continued] == [0, 2, 3, 4]


@pytest.mark.parametrize("cancelled_in", [1, 2])
def test_the_turn_of_the_last_stream_of_a_key_passes_to_another_key(cancelled_in: int) -> None:
    continued = asyncio.run(turns_of([BUSY, OTHER, BUSY], cancelled=[1], cancelled_in=cancelled_in))
    assert [number for _, number in continued] == [0, 2]
