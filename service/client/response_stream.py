"""Response streams that cancel their call when they are closed, whether or not anything was read."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, TypeVar

import grpc

Response = TypeVar("Response")
Explain = Callable[[grpc.RpcError], grpc.RpcError]


class ResponseStream(Generator[Response, None, None]):
    """The responses of a streaming call. Closing the stream cancels the call, even before the first response was read.

    Closing a plain generator that has not started would not run its body, and so would not cancel the call.

    Args:
        call: the call, made by a stub of `grpc`.
        explain: returns the exception to raise for an error of gRPC; None to raise that error itself.
    """

    def __init__(self, call: Any, explain: Explain | None = None) -> None:
        self._call = call
        self._responses: Generator[Response, None, None] = _responses(call, explain)

    def send(self, value: None) -> Response:
        """Read the next response."""
        return self._responses.send(value)

    def throw(self, *error: Any) -> Response:
        """Raise an error where responses are read, which ends the call."""
        return self._responses.throw(*error)

    def close(self) -> None:
        """Cancel the call unless it has ended."""
        self._call.cancel()
        self._responses.close()


class AsyncResponseStream(AsyncGenerator[Response, None]):
    """The asyncio version of `ResponseStream`.

    Args:
        call: the call, made by a stub of `grpc.aio`.
        explain: as for `ResponseStream`.
    """

    def __init__(self, call: Any, explain: Explain | None = None) -> None:
        self._call = call
        self._responses: AsyncGenerator[Response, None] = _async_responses(call, explain)

    async def asend(self, value: None) -> Response:
        """Read the next response."""
        return await self._responses.asend(value)

    async def athrow(self, *error: Any) -> Response:
        """Raise an error where responses are read, which ends the call."""
        return await self._responses.athrow(*error)

    async def aclose(self) -> None:
        """Cancel the call unless it has ended."""
        self._call.cancel()
        await self._responses.aclose()


def _responses(call: Any, explain: Explain | None) -> Generator[Any, None, None]:
    try:
        yield from call
    except grpc.RpcError as error:
        raise (error if explain is None else explain(error)) from None
    finally:
        call.cancel()


async def _async_responses(call: Any, explain: Explain | None) -> AsyncGenerator[Any, None]:
    try:
        async for response in call:
            yield response
    except grpc.RpcError as error:
        raise (error if explain is None else explain(error)) from None
    finally:
        call.cancel()
