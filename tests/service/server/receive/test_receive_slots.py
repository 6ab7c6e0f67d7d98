import asyncio
import time

import pytest

from radixkv.errors import DeadlinePassed, QueueFull
from radixkv.service.server.receive.receive_slots import SlotQueue
from tests.patience import PATIENCE_S


async def run_ready_tasks():
    """Let all tasks continue until they wait."""
    for _ in range(10):
        await asyncio.sleep(0)


class Message:
    """A message that arrives when `may_arrive` is set."""

    def __init__(self):
        self.is_being_read = False
        self.may_arrive = asyncio.Event()

    async def read(self):
        self.is_being_read = True
        await self.may_arrive.wait()
        return b"message"


def start(slots, connection):
    """Start to receive a message of a connection; return the message and the task."""
    message = Message()
    return message, asyncio.create_task(slots.receive(connection, message.read))


def test_as_many_messages_are_read_at_once_as_there_are_slots():
    async def run():
        slots = SlotQueue(2, 10, PATIENCE_S)
        calls = [start(slots, "a") for _ in range(3)]
        await run_ready_tasks()
        before = [message.is_being_read for message, _ in calls]
        calls[0][0].may_arrive.set()
        assert await calls[0][1] == b"message"
        await run_ready_tasks()
        after = calls[2][0].is_being_read
        for message, _ in calls:
            message.may_arrive.set()
        await asyncio.gather(*(task for _, task in calls))
        return before, after

    assert asyncio.run(run()) == ([True, True, False], True)


def test_connections_get_slots_in_turn():
    async def run():
        slots = SlotQueue(1, 10, PATIENCE_S)
        order = []

        async def read(name):
            order.append(name)
            return b""

        first, task = start(slots, "a")
        await run_ready_tasks()
        waiting = [asyncio.create_task(slots.receive("a", lambda: read("a"))) for _ in range(3)]
        await run_ready_tasks()
        waiting.append(asyncio.create_task(slots.receive("b", lambda: read("b"))))
        await run_ready_tasks()
        first.may_arrive.set()
        await asyncio.gather(task, *waiting)
        return order

    assert asyncio.run(run()) == ["a", "b", "a", "a"]


def test_the_last_call_of_the_longest_queue_is_refused():
    async def run():
        slots = SlotQueue(1, 3, PATIENCE_S)
        calls = [start(slots, name) for name in ("a", "a", "a", "a")]
        await run_ready_tasks()
        calls.append(start(slots, "b"))
        await run_ready_tasks()
        for message, _ in calls:
            message.may_arrive.set()
        return await asyncio.gather(*(task for _, task in calls), return_exceptions=True)

    outcomes = asyncio.run(run())
    assert [isinstance(each, QueueFull) for each in outcomes] == [False, False, False, True, False]


def test_a_slow_message_loses_its_slot_to_a_waiting_call():
    async def run():
        slots = SlotQueue(1, 10, PATIENCE_S)
        _, slow = start(slots, "a")
        await run_ready_tasks()
        message, task = start(slots, "b")
        message.may_arrive.set()
        return await task, (await asyncio.gather(slow, return_exceptions=True))[0]

    answer, refusal = asyncio.run(run())
    assert answer == b"message"
    assert isinstance(refusal, QueueFull)


def test_a_message_that_does_not_arrive_is_refused():
    async def run():
        slots = SlotQueue(1, 10, 0.01)
        _, slow = start(slots, "a")
        with pytest.raises(DeadlinePassed, match="message: only a part of it arrived within"):
            await slow
        message, task = start(slots, "b")
        message.may_arrive.set()
        return await task

    assert asyncio.run(run()) == b"message"


@pytest.mark.parametrize("moment", ["waiting", "reading", "granted"])
def test_a_caller_that_disconnects_leaves_no_slot_occupied(moment):
    async def run():
        slots = SlotQueue(1, 10, PATIENCE_S)
        first, first_task = start(slots, "a")
        await run_ready_tasks()
        _, cancelled = start(slots, "b")
        await run_ready_tasks()
        if moment == "waiting":
            cancelled.cancel()
        first.may_arrive.set()
        if moment == "granted":
            await first_task  # its end has granted the slot to the next call, which has not continued yet
            cancelled.cancel()
        await first_task
        if moment == "reading":
            await run_ready_tasks()
            cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        last, last_task = start(slots, "c")
        last.may_arrive.set()
        return await asyncio.wait_for(last_task, PATIENCE_S)

    assert asyncio.run(run()) == b"message"


def test_a_message_that_loses_its_slot_while_the_loop_is_busy_ends_once():
    async def run():
        unhandled = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        slots = SlotQueue(1, 10, 0.3)
        _, slow = start(slots, "a")
        await asyncio.sleep(0.26)  # shortly before the timeout of the slow message
        message, waiting = start(slots, "b")
        await run_ready_tasks()
        time.sleep(0.6)  # meanwhile all timers become due: the slow message is late, and a call waits for its slot
        message.may_arrive.set()
        results = await asyncio.gather(slow, waiting, return_exceptions=True)
        return results, unhandled

    (slow, waited), unhandled = asyncio.run(run())
    assert isinstance(slow, DeadlinePassed | QueueFull)
    assert waited == b"message"
    assert unhandled == []
