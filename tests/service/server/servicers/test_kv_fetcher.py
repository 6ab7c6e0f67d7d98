"""Sources of K/V that stall: K/V that does not arrive in time is computed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.api.params import PrefillParams
from radixkv.service.server.servicers import kv_fetcher
from radixkv.service.server.servicers.kv_fetcher import _BlockStream
from radixkv.v1.prefill_pb2 import FetchKVResponse, KVFormat, KVSource
from tests.patience import PATIENCE_S

OBJECT_BYTES = 8
FORMAT = FetchKVResponse(format=KVFormat(fingerprint="equal"))


def block(number: int, num_bytes: int = OBJECT_BYTES) -> FetchKVResponse:
    return FetchKVResponse(block=number, data=bytes(num_bytes))


class StallingSource:
    """Sends some responses and then nothing, or one byte from time to time."""

    def __init__(self, *responses: FetchKVResponse, trickle_s: float | None = None) -> None:
        self.responses = responses
        self.trickle_s = trickle_s
        self.num_calls = 0
        self.is_cancelled = False

    async def fetch_kv(self, *_: Any, **__: Any) -> AsyncGenerator[FetchKVResponse]:
        self.num_calls += 1
        try:
            for response in self.responses:
                yield response
            while self.trickle_s is not None:
                await asyncio.sleep(self.trickle_s)
                yield block(len(self.responses), num_bytes=0)
            await asyncio.Event().wait()
        finally:
            self.is_cancelled = True


async def num_fetched_blocks(source: StallingSource, num_blocks: int) -> int:
    """Return how many blocks a fetch of `num_blocks` gets."""
    transfer = SimpleNamespace(
        object_bytes=OBJECT_BYTES,
        block_format=SimpleNamespace(fingerprint="equal"),
        payload_of=lambda data, wanted, mac: memoryview(data),
    )
    params, wanted = PrefillParams(bytes(4)), [SimpleNamespace(key=b"")] * num_blocks
    stream = _BlockStream(transfer, source, params, KVSource(address="peer:1"), 0, wanted, None)  # type: ignore[arg-type]
    async with asyncio.timeout(PATIENCE_S):
        return len(await stream.fetch_payloads(()))


@pytest.fixture
def short_block_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block may take 50 ms."""
    monkeypatch.setattr(kv_fetcher, "_MAX_BLOCK_S", 0.05)


@pytest.mark.usefixtures("short_block_timeout")
@pytest.mark.parametrize(
    ("responses", "num_fetched"),
    [((), 0), ((FORMAT,), 0), ((FORMAT, block(0), block(1)), 2), ((FORMAT, block(0), block(1, 3)), 1)],
    ids=["silent", "format only", "two blocks", "half a block"],
)
def test_a_source_that_stalls_keeps_its_caller_no_longer_than_a_block_may_take(
    responses: tuple[FetchKVResponse, ...], num_fetched: int, caplog: pytest.LogCaptureFixture
) -> None:
    source = StallingSource(*responses)
    assert asyncio.run(num_fetched_blocks(source, 3)) == num_fetched
    assert (source.num_calls, source.is_cancelled) == (1, True)
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert messages == ["kv_source peer:1: did not send a block in time; missing blocks are computed"]


@pytest.mark.usefixtures("short_block_timeout")
def test_a_source_that_sends_a_little_from_time_to_time_is_abandoned_as_well() -> None:
    assert asyncio.run(num_fetched_blocks(StallingSource(FORMAT, block(0), trickle_s=0.01), 3)) == 1


def test_the_time_for_all_blocks_together_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_fetcher, "_MAX_FETCH_S", 0.05)
    assert asyncio.run(num_fetched_blocks(StallingSource(FORMAT, block(0)), 3)) == 1
