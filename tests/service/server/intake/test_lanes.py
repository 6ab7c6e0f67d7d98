import asyncio

import pytest

from radixkv.errors import DeadlineExceeded
from radixkv.service.server.intake import lanes as lanes_module
from radixkv.service.server.intake.bounds import WINDOW_BYTES
from radixkv.service.server.intake.lanes import Lanes
from tests.patience import PATIENCE_S

SMALL, LARGE = bytes(WINDOW_BYTES), bytes(WINDOW_BYTES + 1)


class Senders:
    """Connections that send to lanes with one place each; messages come when they are told to."""

    def __init__(self, timeout_s=PATIENCE_S, num_waiting=10):
        self.lanes = Lanes(2, num_waiting, timeout_s)
        self.being_read = []

    def start(self, connection, come=None, message=SMALL):
        async def read():
            self.being_read.append(connection)
            if come is not None:
                await come.wait()
            return message

        return asyncio.create_task(self.lanes.receive(connection, read))

    async def send(self, connection, message):
        return await self.start(connection, message=message)


async def rest():
    for _ in range(10):
        await asyncio.sleep(0)


def test_small_messages_do_not_wait_behind_large_ones():
    async def run():
        senders, come = Senders(), asyncio.Event()
        for name in ("a", "b"):
            await senders.send(name, LARGE)
        waiting = [senders.start(name, come, LARGE) for name in ("a", "b")]
        await rest()
        assert senders.being_read == ["a", "b", "a"]
        assert await senders.send("small", SMALL) == SMALL
        come.set()
        assert await asyncio.gather(*waiting) == [LARGE, LARGE]

    asyncio.run(run())


def test_large_messages_do_not_wait_behind_small_ones():
    async def run():
        senders, come = Senders(), asyncio.Event()
        await senders.send("large", LARGE)
        waiting = senders.start("small", come)
        await rest()
        assert await senders.send("large", LARGE) == LARGE
        come.set()
        await waiting

    asyncio.run(run())


def test_a_connection_that_sends_small_messages_again_is_among_them_again():
    async def run():
        senders, come = Senders(), asyncio.Event()
        for message in (LARGE, SMALL):
            await senders.send("a", message)
        waiting = senders.start("other", come)  # has the place of small ones
        await rest()
        late = senders.start("a")
        await rest()
        assert not late.done()
        come.set()
        await asyncio.gather(waiting, late)

    asyncio.run(run())


def test_a_connection_whose_message_does_not_come_is_among_the_large_ones():
    async def run():
        senders, come = Senders(timeout_s=0.01), asyncio.Event()
        with pytest.raises(DeadlineExceeded):
            await senders.start("slow", asyncio.Event())
        slow = senders.start("slow", come)
        await rest()
        assert await senders.send("small", SMALL) == SMALL
        come.set()
        await asyncio.gather(slow, return_exceptions=True)  # it may be late again

    asyncio.run(run())


def test_the_end_of_a_stream_is_small():
    async def run():
        senders, end, come = Senders(), object(), asyncio.Event()
        assert await senders.send("a", end) is end
        senders.start("other", come)
        await rest()
        late = senders.start("a")
        await rest()
        assert not late.done()
        come.set()
        await late

    asyncio.run(run())


def test_connections_are_not_remembered_without_bound(monkeypatch):
    monkeypatch.setattr(lanes_module, "_MOST_REMEMBERED", 2)

    async def run():
        senders = Senders()
        for name in "abc":
            await senders.send(name, LARGE)
        assert list(senders.lanes._with_large) == ["b", "c"]

    asyncio.run(run())
