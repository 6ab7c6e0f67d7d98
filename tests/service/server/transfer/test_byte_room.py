import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from radixkv.service.server.transfer.byte_room import ByteRoom


async def soon(*coroutines: Coroutine[Any, Any, None]) -> list[asyncio.Task[None]]:
    """Start tasks in their order, and let each go as far as it can."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


def test_bytes_are_taken_and_given_back() -> None:
    async def run() -> None:
        room = ByteRoom(10)
        await room.take(7)
        assert room.free == 3
        room.give(7)
        assert room.free == room.capacity == 10

    asyncio.run(run())


def test_who_came_first_is_served_first() -> None:
    async def run() -> None:
        room = ByteRoom(10)
        await room.take(8)
        large, small = await soon(room.take(5), room.take(1))
        assert (large.done(), small.done()) == (False, False), "the small one waits behind the large one"
        room.give(2)
        await soon()
        assert (large.done(), small.done()) == (False, False)
        room.give(1)
        await soon()
        assert (large.done(), small.done(), room.free) == (True, False, 0)
        room.give(5)
        await soon()
        assert (small.done(), room.free) == (True, 4)

    asyncio.run(run())


@pytest.mark.parametrize("comes_first", [False, True])
def test_who_goes_away_takes_nothing_and_lets_others_pass(comes_first: bool) -> None:
    async def run() -> None:
        room = ByteRoom(10)
        await room.take(8)
        large, small = await soon(room.take(5), room.take(1))
        if comes_first:
            room.give(8)  # its bytes come at the same moment
        large.cancel()
        await soon()
        assert large.cancelled()
        assert small.done()
        small.result()
        assert room.free == (9 if comes_first else 1)

    asyncio.run(run())
