"""Functions that process prompts of HTTP requests on a bounded number of threads."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from radixkv.service.http.prompts import PromptEncoder
from radixkv.service.server.model_tokenizer import ModelTokenizer
from tests.patience import PATIENCE_S

SMALL, LARGE = 100, 1_000_000


def waits(event: threading.Event, running: list[int], most_running: list[int]) -> None:
    running.append(1)
    most_running.append(len(running))
    event.wait(PATIENCE_S)
    running.pop()


@pytest.mark.parametrize("num_bytes", [SMALL, LARGE])
def test_cancelled_calls_do_not_occupy_more_threads(num_bytes: int) -> None:
    may_end, running, most_running = threading.Event(), [], []  # type: ignore[var-annotated]

    async def main() -> None:
        encoder = PromptEncoder(ModelTokenizer(None))
        try:
            for _ in range(5):
                slow = encoder.run_on_thread(num_bytes, lambda: waits(may_end, running, most_running))
                call = asyncio.ensure_future(slow)
                await asyncio.sleep(0.01)
                call.cancel()
            other = encoder.run_on_thread(LARGE if num_bytes == SMALL else SMALL, time.monotonic)
            assert await other > 0  # the other class has threads of its own
            assert max(most_running) == 2
            last = asyncio.ensure_future(encoder.run_on_thread(num_bytes, lambda: "over"))
            await asyncio.sleep(0.01)
            assert not last.done()
        finally:
            may_end.set()
        assert await last == "over"

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_a_function_that_raises_releases_its_thread() -> None:
    def fails() -> None:
        raise KeyError("no")

    async def main() -> None:
        encoder = PromptEncoder(ModelTokenizer(None))
        for _ in range(5):
            with pytest.raises(KeyError):
                await encoder.run_on_thread(SMALL, fails)

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
