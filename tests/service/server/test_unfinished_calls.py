import asyncio

import pytest

from radixkv.service.server.unfinished_calls import UnfinishedCalls
from tests.patience import PATIENCE_S


class Call:
    """A call's context as far as it is looked at."""

    def add_done_callback(self, callback):
        self.end = lambda: callback(self)


@pytest.fixture
def calls():
    return UnfinishedCalls()


def begun(calls):
    call = Call()
    calls.add(call)
    return call


def test_those_that_are_there_are_waited_for(calls):
    async def run():
        first, second = begun(calls), begun(calls)
        finish = asyncio.create_task(calls.finish(60))
        first.end()
        for _ in range(5):
            await asyncio.sleep(0)
        was_waiting = not finish.done()
        second.end()
        return was_waiting, await asyncio.wait_for(finish, PATIENCE_S)

    assert asyncio.run(run()) == (True, True)


def test_those_that_come_later_are_not(calls):
    async def run():
        call = begun(calls)
        finish = asyncio.create_task(calls.finish(60))
        await asyncio.sleep(0)
        begun(calls)
        call.end()
        return await asyncio.wait_for(finish, PATIENCE_S)

    assert asyncio.run(run())


def test_the_wait_has_an_end(calls):
    async def run():
        begun(calls)
        return await asyncio.wait_for(calls.finish(0.05), PATIENCE_S)

    assert not asyncio.run(run())
