"""Calls from other threads run on the event loop: all of them, in order, with few wake-ups."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from radixkv.service.server.mailbox import Mailbox
from tests.patience import PATIENCE_S


def test_calls_of_a_step_share_a_wake_up():
    async def run() -> tuple[list[int], int]:
        loop, called = asyncio.get_running_loop(), []
        mailbox, wake_ups, wake = Mailbox(), [], loop.call_soon_threadsafe

        def recorded_wake(*call: Any) -> asyncio.Handle:
            wake_ups.append(call)
            return wake(*call)

        loop.call_soon_threadsafe = recorded_wake  # type: ignore[method-assign]
        for number in range(16):
            mailbox.post(called.append, number)
        assert called == []  # the loop is busy with this test
        await asyncio.sleep(0)
        mailbox.post(called.append, 16)
        await asyncio.sleep(0)
        return called, len(wake_ups)

    assert asyncio.run(run()) == (list(range(17)), 2)


def test_calls_posted_from_other_threads_all_run_in_the_order_of_each_thread():
    num_calls = 20_000

    async def run() -> list[tuple[str, int]]:
        mailbox, called, has_all = Mailbox(), [], asyncio.Event()

        def take(call: tuple[str, int]) -> None:
            called.append(call)
            if len(called) == 2 * num_calls:
                has_all.set()

        def post_all(name: str) -> None:
            for number in range(num_calls):
                mailbox.post(take, (name, number))

        threads = [threading.Thread(target=post_all, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        await asyncio.wait_for(has_all.wait(), PATIENCE_S)
        for thread in threads:
            thread.join()
        return called

    called = asyncio.run(run())
    for name in "ab":
        assert [number for sender, number in called if sender == name] == list(range(num_calls))


def test_posting_to_a_closed_loop_does_nothing():
    async def make() -> Mailbox:
        return Mailbox()

    called: list[int] = []
    asyncio.run(make()).post(called.append, 1)
    assert called == []


def test_a_call_that_raises_does_not_delay_the_others():
    async def run() -> tuple[list[int], list[str]]:
        complaints: list[str] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(str(context["exception"])))
        mailbox, called = Mailbox(), []
        mailbox.post(called.append, 1)
        mailbox.post(lambda: 1 / 0)
        mailbox.post(called.append, 2)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return called, complaints

    assert asyncio.run(run()) == ([1, 2], ["division by zero"])
