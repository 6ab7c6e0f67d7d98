"""Streams of answers that cancel their call when nobody reads on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import grpc

Explain = Callable[[grpc.RpcError], grpc.RpcError]


class AnswerStream(Generator[Any, None, None]):
    """The answers of a call that is under way. Closing it cancels the call, also before the first answer is read.

    Closing a plain generator that has not begun runs none of its body, and so would cancel nothing.

    Args:
        call: of a blocking stub.
        explain: returns the exception to raise for an error of gRPC; None for that error itself.
    """

    def __init__(self, call: Any, explain: Explain | None = None) -> None:
        self._call = call
        self._answers = _answers(call, explain)

    def send(self, value: None) -> Any:
        """Read the next answer."""
        return self._answers.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an error where answers are read, which ends the call."""
        return self._answers.throw(*error)

    def close(self) -> None:
        """Cancel the call if it is not over."""
        self._call.cancel()
        self._answers.close()


class AsyncAnswerStream(AsyncGenerator[Any, None]):
    """The same for event loops; see `AnswerStream`.

    Args:
        call: of a stub of `grpc.aio`.
        explain: as for `AnswerStream`.
    """

    def __init__(self, call: Any, explain: Explain | None = None) -> None:
        self._call = call
        self._answers = _async_answers(call, explain)

    async def asend(self, value: None) -> Any:
        """Read the next answer."""
        return await self._answers.asend(value)

    async def athrow(self, *error: Any) -> Any:
        """Raise an error where answers are read, which ends the call."""
        return await self._answers.athrow(*error)

    async def aclose(self) -> None:
        """Cancel the call if it is not over."""
        self._call.cancel()
        await self._answers.aclose()


def _answers(call: Any, explain: Explain | None) -> Generator[Any, None, None]:
    try:
        yield from call
    except grpc.RpcError as error:
        raise (error if explain is None else explain(error)) from None
    finally:
        call.cancel()


async def _async_answers(call: Any, explain: Explain | None) -> AsyncGenerator[Any, None]:
    try:
        async for answer in call:
            yield answer
    except grpc.RpcError as error:
        raise (error if explain is None else explain(error)) from None
    finally:
        call.cancel()
