import asyncio

import pytest

from radixkv.errors import DeadlinePassed
from radixkv.service.server.receive import receive_slots
from radixkv.service.server.receive.grpc_options import WINDOW_BYTES
from radixkv.service.server.receive.receive_slots import ReceiveSlots
from tests.patience import PATIENCE_S

SMALL, LARGE = bytes(WINDOW_BYTES), bytes(WINDOW_BYTES + 1)


class Senders:
    """Connections that send messages to a server with one slot for small messages and one for large ones."""

    def __init__(self, timeout_s=PATIENCE_S):
        self.slots = ReceiveSlots(2, 10, timeout_s)
        self.being_read = []

    def start(self, connection, may_arrive=None, message=SMALL):
        """Begin to send a message, which arrives at once or when `may_arrive` is set; return the task."""

        async def read():
            self.being_read.append(connection)
            if may_arrive is not None:
                await may_arrive.wait()
            return message

        return asyncio.create_task(self.slots.receive(connection, read))

    async def send(self, connection, message):
        return await self.start(connection, message=message)


async def run_ready_tasks():
    """Let all tasks continue until they wait."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_small_messages_do_not_wait_behind_large_ones_and_new_connections():
    async def run():
        senders, may_arrive = Senders(), asyncio.Event()
        for name, message in (("small", SMALL), ("large", LARGE)):
            await senders.send(name, message)
        waiting = [senders.start(name, may_arrive, LARGE) for name in ("large", "new", "newer")]
        await run_ready_tasks()
        assert senders.being_read == ["small", "large", "large"]
        assert await senders.send("small", SMALL) == SMALL
        may_arrive.set()
        assert await asyncio.gather(*waiting) == [LARGE] * 3

    asyncio.run(run())


def test_large_messages_and_new_connections_do_not_wait_behind_small_ones():
    async def run():
        senders, may_arrive = Senders(), asyncio.Event()
        await senders.send("small", SMALL)
        waiting = senders.start("small", may_arrive)
        await run_ready_tasks()
        for _ in range(2):  # first as a new connection, then as one that sends large messages
            assert await senders.send("large", LARGE) == LARGE
        may_arrive.set()
        await waiting

    asyncio.run(run())


def test_a_connection_that_sends_small_messages_again_uses_their_slots_again():
    async def run():
        senders, may_arrive = Senders(), asyncio.Event()
        for message in (SMALL, LARGE, SMALL):
            await senders.send("a", message)
        waiting = senders.start("new", may_arrive)  # occupies the slot for large messages
        await run_ready_tasks()
        assert await senders.send("a", SMALL) == SMALL
        may_arrive.set()
        await waiting

    asyncio.run(run())


def test_a_connection_whose_message_does_not_arrive_uses_the_slots_for_large_ones():
    async def run():
        senders, may_arrive = Senders(timeout_s=0.01), asyncio.Event()
        for name in ("slow", "small"):
            await senders.send(name, SMALL)
        with pytest.raises(DeadlinePassed):
            await senders.start("slow", asyncio.Event())
        slow = senders.start("slow", may_arrive)
        await run_ready_tasks()
        assert await senders.send("small", SMALL) == SMALL
        may_arrive.set()
        await asyncio.gather(slow, return_exceptions=True)  # its message may be late again

    asyncio.run(run())


def test_a_connection_that_cancels_a_message_uses_the_slots_for_large_ones():
    async def run():
        senders, may_arrive = Senders(), asyncio.Event()
        for name in ("canceller", "small"):
            await senders.send(name, SMALL)
        cancelled = senders.start("canceller", asyncio.Event())
        await run_ready_tasks()
        cancelled.cancel()
        await asyncio.wait([cancelled])
        waiting = senders.start("canceller", may_arrive)
        await run_ready_tasks()
        assert await senders.send("small", SMALL) == SMALL
        may_arrive.set()
        await waiting

    asyncio.run(run())


def test_the_end_of_a_stream_counts_as_small():
    async def run():
        senders, end, may_arrive = Senders(), object(), asyncio.Event()
        assert await senders.send("a", end) is end
        waiting = senders.start("new", may_arrive)
        await run_ready_tasks()
        assert await senders.send("a", SMALL) == SMALL
        may_arrive.set()
        await waiting

    asyncio.run(run())


def test_the_number_of_remembered_connections_is_bounded(monkeypatch):
    monkeypatch.setattr(receive_slots, "_MAX_REMEMBERED_CONNECTIONS", 2)

    async def run():
        senders = Senders()
        for name in "abc":
            await senders.send(name, SMALL)
        assert list(senders.slots._small_senders) == ["b", "c"]

    asyncio.run(run())
