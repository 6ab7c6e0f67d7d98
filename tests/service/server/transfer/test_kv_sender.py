"""FetchKV as it leaves a server, and as `KVFetcher` of another one takes it, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from concurrent.futures import Future
from typing import Any

import pytest

from radixkv.api.caller import Caller
from radixkv.api.params import PrefillParams
from radixkv.cache.elsewhere.keyed_block import KeyedBlock
from radixkv.config import KVSourceConfig, TransferConfig
from radixkv.engine.transfer.exports import LeaseBlocks
from radixkv.engine.transfer.transfer import Transfer
from radixkv.errors import InvalidRequest, KVSourceError, RadixKVError, UnknownLease
from radixkv.namespace import Namespace
from radixkv.service.client import KVSource
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.transfer import kv_sender
from radixkv.service.server.transfer.kv_fetcher import KVFetcher
from radixkv.storage.tiers.block_key import BlockFormat, BlockKeys
from radixkv.storage.tiers.block_object import BlockObject, object_bytes
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serving

SIZE, PAYLOAD_BYTES, NUM_BLOCKS = 16, 5000, 6
FORMAT = BlockFormat("model", "float32", "fp32", "fake", SIZE, PAYLOAD_BYTES, "cpu")
PROMPT = bytes(range(1, 1 + 4 * SIZE)) * NUM_BLOCKS + bytes(4)


def blocks() -> list[KeyedBlock]:
    keys, namespace = BlockKeys(FORMAT), Namespace("model", "acme")
    parent, listed = keys.root(namespace), []
    for index in range(NUM_BLOCKS):
        own = PROMPT[4 * SIZE * index : 4 * SIZE * (index + 1)]
        listed.append(KeyedBlock(keys.child(parent, own), parent, own, namespace))
        parent = listed[-1].key
    return listed


class FakeTransfer:
    """Gives and takes blocks whose K and V are their index. `faults` says what to do instead, call by call."""

    block_format, object_bytes = FORMAT, object_bytes(SIZE, PAYLOAD_BYTES)
    payload_of = Transfer.payload_of

    def __init__(self, address: str = "", **config: Any) -> None:
        self.config = TransferConfig(serve=True, **config)
        self.sources = {"there": KVSourceConfig(address)}
        self.fleet_token: str | None = None
        self.faults: list[Any] = []
        self.num_reads = 0

    def blocks_of(self, lease_id: str, tenant: str) -> Future[LeaseBlocks]:
        return self._answer(lambda: LeaseBlocks(blocks(), range(NUM_BLOCKS)))

    def objects(self, lease_id: str, tenant: str, found: LeaseBlocks, start: int, end: int) -> Future[Any]:
        self.num_reads += 1
        return self._answer(
            lambda: [
                BlockObject(each.key, each.parent, 0, each.tokens, memoryview(bytes([index]) * PAYLOAD_BYTES))
                for index, each in list(enumerate(found.blocks))[start:end]
            ]
        )

    def wanted(self, tokens: bytes, caller: Caller) -> list[KeyedBlock]:
        return blocks()

    def _answer(self, make: Any) -> Future[Any]:
        future: Future[Any] = Future()
        fault = self.faults.pop(0) if self.faults else None
        if fault is None:
            future.set_result(make())
        elif isinstance(fault, Exception):
            future.set_exception(fault)
        else:
            future.set_result(fault(make()))
        return future


def fetched(sending: FakeTransfer, lease_id: str = "a lease", **config: Any) -> Any:
    """Fetch a prompt through two engines; returns what came, and the bytes that are free in the end."""

    async def run() -> Any:
        source, target = FakeEngine(), FakeEngine()
        source.transfer = sending
        async with serving(source) as (_, address):
            target.transfer = FakeTransfer(address, **config)
            fetcher = KVFetcher(target, Mailbox())
            params = PrefillParams(PROMPT, Caller("acme"))
            try:
                came = await fetcher.fetch(params, KVSource(address=address, lease_id=lease_id))
                told = None if came is None else (came.first_block, [payload[0] for payload in came.payloads])
                taken = fetcher._room.capacity - fetcher._room.free
                del came
            finally:
                with contextlib.suppress(RadixKVError):
                    await fetcher._sources.client_of(address).close()
            gc.collect()
            await asyncio.sleep(0)
            assert fetcher._room.free == fetcher._room.capacity, "whatever happened"
            return told, taken

    return asyncio.run(run())


def test_blocks_come_as_they_are_and_give_their_room_back() -> None:
    assert fetched(FakeTransfer()) == ((0, list(range(NUM_BLOCKS))), NUM_BLOCKS * PAYLOAD_BYTES)


def test_no_more_is_fetched_than_there_is_room_for() -> None:
    assert fetched(FakeTransfer(), max_fetching_bytes=2 * PAYLOAD_BYTES + 1) == ((0, [0, 1]), 2 * PAYLOAD_BYTES)


def test_without_room_for_a_block_nothing_is_fetched() -> None:
    assert fetched(FakeTransfer(), max_fetching_bytes=PAYLOAD_BYTES - 1) == (None, 0)


def test_what_is_not_there_gives_its_room_back_at_once() -> None:
    sending = FakeTransfer()
    sending.faults = [lambda found: LeaseBlocks(found.blocks[:4], found.block_ids[:4])]
    assert fetched(sending) == ((0, [0, 1, 2, 3]), 4 * PAYLOAD_BYTES)


def test_large_blocks_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_sender, "_MAX_DATA_BYTES", 999)
    assert fetched(FakeTransfer())[0] == (0, list(range(NUM_BLOCKS)))


def test_a_stream_that_breaks_off_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_sender, "_SLICE_BYTES", PAYLOAD_BYTES)  # a block a call
    sending = FakeTransfer()
    sending.faults = [None, None, None, RuntimeError("broken")]
    assert fetched(sending)[0] == (0, list(range(NUM_BLOCKS)))
    assert sending.num_reads == NUM_BLOCKS + 1, "none was sent again"


def test_a_stream_that_breaks_off_each_time_is_given_up() -> None:
    sending = FakeTransfer()
    sending.faults = [RuntimeError("broken")] * 9
    with pytest.raises(KVSourceError, match="got INTERNAL"):
        fetched(sending)


def test_a_lease_that_ends_meanwhile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_sender, "_SLICE_BYTES", PAYLOAD_BYTES)
    sending = FakeTransfer()
    sending.faults = [None, None, UnknownLease("lease_id: expected another")]
    with pytest.raises(UnknownLease, match="kv_source: lease_id: expected another"):
        fetched(sending)


def test_a_block_that_is_changed_on_the_way_is_found() -> None:
    def damaged(objects: list[BlockObject]) -> list[Any]:
        class Changed:
            def pieces(self) -> list[bytes]:
                data = bytearray(b"".join(objects[1].pieces()))
                data[700] ^= 1
                return [bytes(data)]

        return [objects[0], Changed(), *objects[2:]]

    sending = FakeTransfer()
    sending.faults = [None, damaged]
    with pytest.raises(KVSourceError, match="got a block that is damaged"):
        fetched(sending)


def test_fields_out_of_range_are_named() -> None:
    async def run() -> str:
        engine = FakeEngine()
        engine.transfer = FakeTransfer()
        sender = kv_sender.KVSender(engine, Mailbox())
        with pytest.raises(InvalidRequest) as caught:
            async for _ in sender.responses(kv_sender.prefill_pb2.FetchKVRequest(lease_id="a", first_block=7)):
                pass
        return str(caught.value)

    assert asyncio.run(run()) == "first_block: expected at most the 6 blocks, got 7"
