"""Functions that process prompts of HTTP requests on a bounded number of threads."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from radixkv.service.http.prompts import PromptEncoder
from radixkv.service.server.model_tokenizer import ModelTokenizer
from tests.patience import PATIENCE_S

SMALL, LARGE = 100, 1_000_000  # bytes of a prompt


def wait_and_count(may_end: threading.Event, running: list[int], running_counts: list[int]) -> None:
    """Wait for an event, and record how many calls of this function were running when this one began."""
    running.append(1)
    running_counts.append(len(running))
    may_end.wait(PATIENCE_S)
    running.pop()


@pytest.mark.parametrize("num_bytes", [SMALL, LARGE])
def test_cancelled_calls_do_not_occupy_more_threads(num_bytes: int) -> None:
    may_end, running, running_counts = threading.Event(), [], []  # type: ignore[var-annotated]

    async def main() -> None:
        encoder = PromptEncoder(ModelTokenizer(None))
        try:
            for _ in range(5):
                slow = encoder.run_on_thread(num_bytes, lambda: wait_and_count(may_end, running, running_counts))
                call = asyncio.ensure_future(slow)
                await asyncio.sleep(0.01)
                call.cancel()
            other = encoder.run_on_thread(LARGE if num_bytes == SMALL else SMALL, time.monotonic)
            assert await other > 0  # prompts of the other size have threads of their own
            assert max(running_counts) == 2
            last = asyncio.ensure_future(encoder.run_on_thread(num_bytes, lambda: "over"))
            await asyncio.sleep(0.01)
            assert not last.done()
        finally:
            may_end.set()
        assert await last == "over"

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_a_function_that_raises_releases_its_thread() -> None:
    def fail() -> None:
        raise KeyError("no")

    async def main() -> None:
        encoder = PromptEncoder(ModelTokenizer(None))
        for _ in range(5):
            with pytest.raises(KeyError):
                await encoder.run_on_thread(SMALL, fail)

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
