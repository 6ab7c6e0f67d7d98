"""Streams of answers that cancel their call when nobody reads on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any


def closing(call: Any) -> Iterator[Any]:
    """Iterate over the answers of a call."""
    try:
        yield from call
    finally:
        call.cancel()


async def closing_async(call: Any) -> AsyncGenerator[Any]:
    """Iterate over the answers of a call; see `closing`."""
    try:
        async for response in call:
            yield response
    finally:
        call.cancel()
