"""Streams that are closed before anybody has read from them, over a real server, and what closing does besides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest

from radixkv.service.client import AsyncClient, Client
from radixkv.service.client.streams import AnswerStream, AsyncAnswerStream
from tests.service.fake_engine import FakeEngine
from tests.service.serving import becomes_true, serving


class FakeCall:
    """A call of both kinds of stubs, with two answers."""

    def __init__(self) -> None:
        self.num_cancels = 0

    def cancel(self) -> None:
        self.num_cancels += 1

    def __iter__(self) -> Generator[int, None, None]:
        yield from (1, 2)

    async def __aiter__(self) -> AsyncGenerator[int, None]:
        for answer in self:
            yield answer


def test_closing_a_stream_that_nobody_has_read_cancels_the_request() -> None:
    async def run() -> None:
        engine = FakeEngine(is_gated=True)
        async with serving(engine) as (_, address), AsyncClient(address) as client:
            stream: Any = client.generate([1, 2, 3])
            assert await becomes_true(lambda: len(engine.futures) == 1)
            await stream.aclose()
            assert await becomes_true(engine.futures[0].cancelled)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    asyncio.run(run())


def test_closing_a_blocking_stream_that_nobody_has_read_cancels_the_request() -> None:
    async def run() -> None:
        engine = FakeEngine(is_gated=True)
        async with serving(engine) as (_, address):
            with Client(address) as client:
                stream: Any = client.generate([1, 2, 3])
                assert await becomes_true(lambda: len(engine.futures) == 1)
                stream.close()
                assert await becomes_true(engine.futures[0].cancelled)
                assert next(stream, None) is None

    asyncio.run(run())


@pytest.mark.parametrize("num_read", [0, 1, 3])
def test_however_much_is_read_the_call_is_cancelled(num_read: int) -> None:
    call = FakeCall()
    stream = AnswerStream(call)
    assert [next(stream, None) for _ in range(num_read)] == [1, 2, None][:num_read]
    stream.close()
    stream.close()
    assert call.num_cancels > 0
    assert list(stream) == []


@pytest.mark.parametrize("num_read", [0, 1, 3])
def test_however_much_is_awaited_the_call_is_cancelled(num_read: int) -> None:
    async def run() -> None:
        call = FakeCall()
        stream = AsyncAnswerStream(call)
        assert [await anext(stream, None) for _ in range(num_read)] == [1, 2, None][:num_read]
        await stream.aclose()
        await stream.aclose()
        assert call.num_cancels > 0
        assert [each async for each in stream] == []

    asyncio.run(run())


def test_an_error_that_is_raised_where_answers_are_read_ends_the_call() -> None:
    async def run() -> None:
        blocking, awaited = FakeCall(), FakeCall()
        stream, async_stream = AnswerStream(blocking), AsyncAnswerStream(awaited)
        assert (next(stream), await anext(async_stream)) == (1, 1)
        with pytest.raises(KeyError):
            stream.throw(KeyError("x"))
        with pytest.raises(KeyError):
            await async_stream.athrow(KeyError("x"))
        assert (blocking.num_cancels, awaited.num_cancels) == (1, 1)

    asyncio.run(run())
