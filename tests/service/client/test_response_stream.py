"""Response streams cancel their call when they are closed, even before anything was read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest

from radixkv.service.client import AsyncClient, Client
from radixkv.service.client.response_stream import AsyncResponseStream, ResponseStream
from tests.service.fake_engine import FakeEngine
from tests.service.serving import becomes_true, serving


class FakeCall:
    """A streaming call with two responses, as a blocking and as an asyncio stub return it."""

    def __init__(self) -> None:
        self.num_cancels = 0

    def cancel(self) -> None:
        self.num_cancels += 1

    def __iter__(self) -> Generator[int, None, None]:
        yield from (1, 2)

    async def __aiter__(self) -> AsyncGenerator[int, None]:
        for answer in self:
            yield answer


def test_closing_an_unread_async_stream_cancels_the_request() -> None:
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


def test_closing_an_unread_blocking_stream_cancels_the_request() -> None:
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
def test_closing_a_blocking_stream_cancels_the_call_whatever_was_read(num_read: int) -> None:
    call = FakeCall()
    stream = ResponseStream(call)
    assert [next(stream, None) for _ in range(num_read)] == [1, 2, None][:num_read]
    stream.close()
    stream.close()
    assert call.num_cancels > 0
    assert list(stream) == []


@pytest.mark.parametrize("num_read", [0, 1, 3])
def test_closing_an_async_stream_cancels_the_call_whatever_was_read(num_read: int) -> None:
    async def run() -> None:
        call = FakeCall()
        stream = AsyncResponseStream(call)
        assert [await anext(stream, None) for _ in range(num_read)] == [1, 2, None][:num_read]
        await stream.aclose()
        await stream.aclose()
        assert call.num_cancels > 0
        assert [each async for each in stream] == []

    asyncio.run(run())


def test_throwing_an_error_into_a_stream_cancels_the_call() -> None:
    async def run() -> None:
        blocking, awaited = FakeCall(), FakeCall()
        stream, async_stream = ResponseStream(blocking), AsyncResponseStream(awaited)
        assert (next(stream), await anext(async_stream)) == (1, 1)
        with pytest.raises(KeyError):
            stream.throw(KeyError("x"))
        with pytest.raises(KeyError):
            await async_stream.athrow(KeyError("x"))
        assert (blocking.num_cancels, awaited.num_cancels) == (1, 1)

    asyncio.run(run())
