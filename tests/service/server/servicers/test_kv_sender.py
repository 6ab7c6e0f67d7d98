"""FetchKV of one server and `KVFetcher` of another one, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import grpc
import pytest

from radixkv.api.caller import Caller
from radixkv.api.params import PrefillParams
from radixkv.config import KVSourceConfig, TransferConfig
from radixkv.engine.transfer.lease_exporter import LeaseBlocks
from radixkv.engine.transfer.transfer import Transfer
from radixkv.errors import (
    Cause,
    ConfigError,
    Draining,
    InvalidCredential,
    InvalidRequest,
    KVOfOtherPrompt,
    KVSourceError,
    NotPermitted,
    QueueFull,
    RadixKVError,
    UnknownLease,
)
from radixkv.namespace import Namespace
from radixkv.offload.block_keys import BlockFormat, BlockKeys
from radixkv.offload.index.prompt_blocks import KeyedBlock
from radixkv.offload.tiers.block_mac import BlockMac
from radixkv.offload.tiers.block_object import BlockObject, Wanted, object_bytes, open_object
from radixkv.offload.tiers.rejected_blocks import RejectedBlocks
from radixkv.service.client import KVSource
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.servicers import kv_sender
from radixkv.service.server.servicers.kv_fetcher import KVFetcher
from radixkv.service.server.status import status_of
from radixkv.storage.layer_bytes import LayerBytes, Layers
from radixkv.v1.prefill_pb2 import FetchKVRequest
from tests.offload.tiers import altered
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serving

BLOCK_SIZE, PAYLOAD_BYTES, NUM_BLOCKS = 16, 5000, 6
FORMAT = BlockFormat("model", "float32", "fp32", "fake", BLOCK_SIZE, PAYLOAD_BYTES, "cpu")
PROMPT = bytes(range(1, 1 + 4 * BLOCK_SIZE)) * NUM_BLOCKS + bytes(4)  # whole blocks and one more token, of 4 bytes each


def blocks() -> list[KeyedBlock]:
    """Return the blocks of the prompt, with their keys."""
    block_keys, namespace = BlockKeys(FORMAT), Namespace("model", "acme")
    parent, keyed_blocks = block_keys.root(namespace), []
    for index in range(NUM_BLOCKS):
        block_tokens = PROMPT[4 * BLOCK_SIZE * index : 4 * BLOCK_SIZE * (index + 1)]
        keyed_blocks.append(KeyedBlock(block_keys.child(parent, block_tokens), parent, block_tokens, namespace))
        parent = keyed_blocks[-1].key
    return keyed_blocks


def payload_of(index: int, layers: Layers | None = None) -> memoryview:
    """Return the K/V of a block, or of some of its layers: each byte is the index of the block."""
    payload = memoryview(bytes([index]) * PAYLOAD_BYTES)
    return payload if layers is None else FakeTransfer.layer_bytes.cut(payload, layers)


def done_future(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class FakeStores:
    """A fake of the shared stores of one side.

    Args:
        reported: indices of the blocks that the store reports; None if there is no store.
        missing: indices of the blocks that cannot be loaded although they may be reported.
        name: of the store.
    """

    def __init__(self, reported: Sequence[int] | None = None, missing: Sequence[int] = (), name: str = "redis") -> None:
        self.reported, self.missing, self.name = reported, missing, name
        self.num_loaded = 0

    def names(self) -> list[str]:
        return [] if self.reported is None else [self.name]

    def exists(self, name: str, asked: Sequence[KeyedBlock]) -> Future[Any]:
        assert name == self.name
        return done_future([blocks().index(each) in (self.reported or ()) for each in asked])

    def load(self, name: str, asked: Sequence[KeyedBlock]) -> Future[Any]:
        indices = [blocks().index(each) for each in asked]
        self.num_loaded += len(indices)
        return done_future([None if index in self.missing else payload_of(index) for index in indices])

    def copy_of(self, block: memoryview | None) -> memoryview | None:
        return block


class FakeTransfer:
    """Sends and receives blocks whose K/V consists of their index.

    Attributes:
        faults: one for each of the next calls of `blocks_of` and `objects`: an exception to raise, a function that
            changes the result, or None.
        num_read_blocks: blocks that `objects` has read.
        max_blocks_per_read: the most blocks that one call of `objects` has read.
    """

    block_format, object_bytes = FORMAT, object_bytes(BLOCK_SIZE, PAYLOAD_BYTES)
    layer_bytes = LayerBytes(5, PAYLOAD_BYTES // 5, 0)
    payload_of = Transfer.payload_of

    def __init__(self, address: str = "", mac: BlockMac | None = None, **config: Any) -> None:
        self.mac = mac
        self.config = TransferConfig(serve=True, **config)
        self.sources = {"there": KVSourceConfig(address)} if address else {}
        self.fleet = None
        self.faults: list[Any] = []
        self.num_read_blocks = self.max_blocks_per_read = 0
        self.stores = FakeStores()
        self.rejected = RejectedBlocks("kv_source")

    def mac_of(self, *, is_member: bool) -> BlockMac | None:
        return None if is_member else self.mac

    def blocks_of(self, lease_id: str, tenant: str) -> Future[LeaseBlocks]:
        return self._answer(lambda: LeaseBlocks(blocks(), range(NUM_BLOCKS)))

    def stores_for(self, blocks: Sequence[KeyedBlock], tenant: str) -> Future[list[str]]:
        return done_future(self.stores.names())

    def objects(
        self, lease_id: str, tenant: str, found: LeaseBlocks, indices: Sequence[int], layers: Layers | None = None
    ) -> Future[Any]:
        self.num_read_blocks += len(indices)
        self.max_blocks_per_read = max(self.max_blocks_per_read, len(indices))

        def block_object(index: int) -> BlockObject:
            block = found.blocks[index]
            return BlockObject(block.key, block.parent, 0, block.tokens, payload_of(index, layers), self.mac)

        return self._answer(lambda: [block_object(index) for index in indices])

    def wanted(self, tokens: bytes, caller: Caller) -> list[KeyedBlock]:
        return blocks()

    def _answer(self, make_result: Any) -> Future[Any]:
        """Return a future with the result, or with what the next fault makes of it."""
        future: Future[Any] = Future()
        fault = self.faults.pop(0) if self.faults else None
        if fault is None:
            future.set_result(make_result())
        elif isinstance(fault, Exception):
            future.set_exception(fault)
        else:
            future.set_result(fault(make_result()))
        return future


def fetch(sending: FakeTransfer, lease_id: str = "a lease", stores: FakeStores | None = None, **config: Any) -> Any:
    """Fetch a prompt from a server with the transfer `sending`, over a real connection.

    Returns:
        The index of the first block with the first byte of each block, or None if nothing was received; and the bytes
        that the received blocks held.
    """

    async def run() -> Any:
        source, target = FakeEngine(), FakeEngine()
        source.transfer = sending
        async with serving(source) as (_, address):
            target.transfer = FakeTransfer(address, **config)
            target.transfer.stores = stores or FakeStores()
            fetcher = KVFetcher(target, Mailbox())
            params = PrefillParams(PROMPT, Caller("acme"))
            try:
                fetched_blocks = await fetcher.fetch(params, KVSource(address=address, lease_id=lease_id))
                received = (
                    None
                    if fetched_blocks is None
                    else (fetched_blocks.first_block, [payload[0] for payload in fetched_blocks.payloads])
                )
                held_bytes = fetcher._held_bytes.used
                del fetched_blocks
            finally:
                with contextlib.suppress(RadixKVError):
                    await fetcher._sources.client_of(address).close()
            gc.collect()
            await asyncio.sleep(0)
            assert fetcher._held_bytes.used == 0, "memory was not released"
            return received, held_bytes

    return asyncio.run(run())


def test_blocks_arrive_unchanged_and_release_their_memory() -> None:
    assert fetch(FakeTransfer()) == ((0, list(range(NUM_BLOCKS))), NUM_BLOCKS * PAYLOAD_BYTES)


def test_no_more_is_fetched_than_the_memory_limit_allows() -> None:
    # A tenant may use half of the limit.
    assert fetch(FakeTransfer(), max_fetching_bytes=4 * PAYLOAD_BYTES + 2) == ((0, [0, 1]), 2 * PAYLOAD_BYTES)


def test_without_memory_for_a_block_nothing_is_fetched() -> None:
    assert fetch(FakeTransfer(), max_fetching_bytes=2 * PAYLOAD_BYTES - 1) == (None, 0)


def test_queued_generations_of_a_tenant_do_not_keep_other_tenants_from_fetching() -> None:
    """Fetched K/V stays in memory until the engine has copied it."""

    async def run() -> Any:
        source, target = FakeEngine(), FakeEngine()
        source.transfer = FakeTransfer()
        async with serving(source) as (_, address):
            target.transfer = FakeTransfer(address, max_fetching_bytes=4 * NUM_BLOCKS * PAYLOAD_BYTES)
            fetcher = KVFetcher(target, Mailbox())
            lease = KVSource(address=address, lease_id="a lease")
            tenants = ("busy", "busy", "busy", "other", "other", "third")
            fetched_blocks = [await fetcher.fetch(PrefillParams(PROMPT, Caller(tenant)), lease) for tenant in tenants]
            await fetcher._sources.client_of(address).close()
            return [None if each is None else len(each.blocks) for each in fetched_blocks], fetcher._held_bytes.used

    received, held_bytes = asyncio.run(run())
    # Half of the limit has 12 blocks: all of it for one tenant, then 6 for the second one, and 4 for the third one.
    assert received == [NUM_BLOCKS, NUM_BLOCKS, None, NUM_BLOCKS, None, 4]
    assert held_bytes <= 4 * NUM_BLOCKS * PAYLOAD_BYTES


def test_missing_blocks_release_their_memory_at_once() -> None:
    sending = FakeTransfer()
    sending.faults = [lambda found: LeaseBlocks(found.blocks[:4], found.block_ids[:4])]
    assert fetch(sending) == ((0, [0, 1, 2, 3]), 4 * PAYLOAD_BYTES)


def test_large_blocks_arrive_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_sender, "_MAX_DATA_BYTES", 999)
    assert fetch(FakeTransfer())[0] == (0, list(range(NUM_BLOCKS)))


def test_an_interrupted_stream_is_resumed_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_sender, "_SLICE_BYTES", PAYLOAD_BYTES)  # one block per call
    sending = FakeTransfer()
    sending.faults = [None, None, None, RuntimeError("broken")]
    assert fetch(sending)[0] == (0, list(range(NUM_BLOCKS)))
    assert sending.num_read_blocks == NUM_BLOCKS + 1, "only the block whose read failed is read again"


def test_a_stream_that_breaks_off_each_time_is_abandoned() -> None:
    sending = FakeTransfer()
    sending.faults = [RuntimeError("broken")] * 9
    with pytest.raises(KVSourceError, match="INTERNAL") as caught:
        fetch(sending)
    assert caught.value.cause is Cause.KV_SOURCE


def test_a_lease_that_ends_meanwhile_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_sender, "_SLICE_BYTES", PAYLOAD_BYTES)
    sending = FakeTransfer()
    sending.faults = [None, None, UnknownLease("lease_id: expected another")]
    with pytest.raises(UnknownLease, match="kv_source: lease_id: expected another") as caught:
        fetch(sending)
    assert caught.value.cause is Cause.KV_SOURCE


def test_a_block_that_is_modified_on_the_way_is_detected() -> None:
    def damage_second_block(objects: list[BlockObject]) -> list[Any]:
        class DamagedObject:
            def pieces(self) -> list[bytes]:
                data = bytearray(b"".join(objects[1].pieces()))
                data[700] ^= 1
                return [bytes(data)]

        return [objects[0], DamagedObject(), *objects[2:]]

    sending = FakeTransfer()
    sending.faults = [None, damage_second_block]
    assert fetch(sending) == ((0, [0]), PAYLOAD_BYTES), "the blocks from the damaged one on are computed"


class AlteredObject(NamedTuple):
    """Stands in for a BlockObject, with other bytes."""

    data: bytes

    def pieces(self) -> list[bytes]:
        return [self.data]


def test_a_message_that_is_larger_than_any_is_not_received(monkeypatch: pytest.MonkeyPatch) -> None:
    class Peer(FakeTransfer):
        def objects(self, *_: Any) -> Any:
            return done_future([AlteredObject(bytes(8 << 20))] * NUM_BLOCKS)

    monkeypatch.setattr(kv_sender, "_MAX_DATA_BYTES", 8 << 20)
    with pytest.raises(KVSourceError, match="RESOURCE_EXHAUSTED") as caught:
        fetch(Peer())
    assert caught.value.cause is Cause.KV_SOURCE


@pytest.mark.parametrize(("num_cases", "seed"), [(60, 1), pytest.param(10_000, 2, marks=pytest.mark.long)])
def test_no_block_that_a_peer_alters_is_used(num_cases: int, seed: int) -> None:
    rng = random.Random(seed)
    world = altered.make_world(is_sealed=False)
    wanted = [KeyedBlock(each.key, bytes(32), each.tokens, Namespace("model", "acme")) for each in world.wanted]
    mac = world.wanted[0].protection
    outcomes: Counter[str] = Counter()

    class Peer(FakeTransfer):
        """Sends the blocks of the prompt, of which it alters one."""

        block_format = altered.OURS
        object_bytes = object_bytes(altered.BLOCK_SIZE, altered.PAYLOAD_BYTES)

        def blocks_of(self, lease_id: str, tenant: str) -> Future[LeaseBlocks]:
            return done_future(LeaseBlocks(wanted, range(len(wanted))))

        def objects(self, lease_id: str, tenant: str, found: LeaseBlocks, indices: Any, layers: Any = None) -> Any:
            return done_future([AlteredObject(self.data[index]) for index in indices])

        def wanted(self, tokens: bytes, caller: Caller) -> list[KeyedBlock]:
            return wanted

    async def run() -> None:
        source, target = FakeEngine(), FakeEngine()
        source.transfer = Peer()
        async with serving(source) as (_, address):
            target.transfer = Peer(address, mac=mac)
            fetcher = KVFetcher(target, Mailbox())
            params = PrefillParams(PROMPT, Caller("acme"))
            for case in range(num_cases):
                index = rng.randrange(altered.NUM_BLOCKS)
                alteration = altered.ALTERATIONS[case % len(altered.ALTERATIONS)]
                source.transfer.data = list(world.sound)
                source.transfer.data[index] = alteration(world, index, rng)
                try:
                    fetched_blocks = await fetcher.fetch(params, KVSource(address=address, lease_id="a lease"))
                except KVSourceError:
                    outcomes["refused"] += 1
                    continue
                payloads = [] if fetched_blocks is None else fetched_blocks.payloads
                assert [bytes(each) for each in payloads] == [altered.payload_of(each) for each in range(index)]
                outcomes["computed"] += 1
            await fetcher._sources.client_of(address).close()

    asyncio.run(run())
    assert sum(outcomes.values()) == num_cases
    assert outcomes["computed"] > num_cases // 2


def test_a_lease_of_another_prompt_is_an_error_that_a_retry_does_not_fix() -> None:
    sending = FakeTransfer()
    others = [BlockObject(bytes(32), bytes(32), 0, each.tokens, payload_of(0)) for each in blocks()]
    sending.faults = [None, lambda _: others]
    with pytest.raises(KVOfOtherPrompt, match="the lease is of another prompt") as caught:
        fetch(sending)
    assert status_of(caught.value) is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.cause is Cause.KV_SOURCE


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (InvalidRequest("first_block: expected at most 2, got 3"), "INVALID_ARGUMENT"),
        (NotPermitted("expected a role"), "FAILED_PRECONDITION"),
        (InvalidCredential("expected a token"), "FAILED_PRECONDITION"),
        (ConfigError("expected another"), "FAILED_PRECONDITION"),
        (QueueFull("expected fewer"), "UNAVAILABLE"),
        (Draining("expected another server"), "UNAVAILABLE"),
    ],
)
def test_clients_retry_only_temporary_errors(refusal: RadixKVError, status: str) -> None:
    """Clients retry UNAVAILABLE, so it is for refusals that end by themselves."""
    sending = FakeTransfer()
    sending.faults = [refusal] * 3
    with pytest.raises(RadixKVError, match="kv_source: ") as caught:
        fetch(sending)
    assert status_of(caught.value).name == status
    assert caught.value.cause is Cause.KV_SOURCE


def test_blocks_of_a_shared_store_come_as_handles_and_are_loaded_there() -> None:
    sending, stores = FakeTransfer(), FakeStores(reported=())
    sending.stores = FakeStores(reported=(0, 1, 3, 5))
    assert fetch(sending, stores=stores)[0] == (0, list(range(NUM_BLOCKS)))
    assert (stores.num_loaded, sending.num_read_blocks) == (4, 2)


def test_blocks_that_cannot_be_loaded_are_fetched() -> None:
    sending, stores = FakeTransfer(), FakeStores(reported=(), missing=(1, 2, 5))
    sending.stores = FakeStores(reported=range(NUM_BLOCKS))
    assert fetch(sending, stores=stores)[0] == (0, list(range(NUM_BLOCKS)))
    assert stores.num_loaded == NUM_BLOCKS
    assert sending.num_read_blocks >= 3


def test_a_store_that_only_one_side_has_is_not_used() -> None:
    for ours, theirs in ((None, range(NUM_BLOCKS)), ((), None)):
        sending, stores = FakeTransfer(), FakeStores(ours)
        sending.stores = FakeStores(theirs)
        assert fetch(sending, stores=stores)[0] == (0, list(range(NUM_BLOCKS)))
        assert stores.num_loaded == 0
    sending, stores = FakeTransfer(), FakeStores((), name="mooncake")
    sending.stores = FakeStores(range(NUM_BLOCKS))
    assert fetch(sending, stores=stores)[0] == (0, list(range(NUM_BLOCKS)))


def test_a_handle_of_another_block_is_detected() -> None:
    sending = FakeTransfer()
    sending.stores = FakeStores(reported=range(NUM_BLOCKS))
    other = [each._replace(key=bytes(32)) for each in blocks()]
    sending.faults = [lambda found: LeaseBlocks(other, found.block_ids)]
    sending.stores.exists = lambda name, asked: done_future([True] * len(asked))
    with pytest.raises(KVOfOtherPrompt, match="a handle of a block that is not of this prompt"):
        fetch(sending, stores=FakeStores(reported=()))


def test_a_lease_that_ends_before_blocks_missing_in_the_store_are_fetched_is_reported() -> None:
    sending = FakeTransfer()
    sending.stores = FakeStores(reported=range(NUM_BLOCKS))
    sending.faults = [None, None, UnknownLease("lease_id: expected another")]
    with pytest.raises(UnknownLease, match="kv_source: lease_id: expected another"):
        fetch(sending, stores=FakeStores(reported=(), missing=(4,)))


@pytest.mark.parametrize(
    ("first_layer", "num_layers", "expected"), [(0, 0, (0, 5)), (0, 2, (0, 2)), (2, 0, (2, 3)), (4, 1, (4, 1))]
)
def test_a_range_of_layers_is_sent_from_any_block_on(
    first_layer: int, num_layers: int, expected: tuple[int, int]
) -> None:
    """With `num_layers` 0, all layers from the first one on are requested. `expected` has first layer and number."""
    request = FetchKVRequest(lease_id="a", first_block=4, first_layer=first_layer, num_layers=num_layers)
    head, *others = responses_to(request)
    num_bytes = expected[1] * PAYLOAD_BYTES // 5
    assert (head.format.first_layer, head.format.sent_layers, head.format.sent_bytes) == (*expected, num_bytes)
    assert (head.format.num_layers, head.format.block_bytes) == (5, PAYLOAD_BYTES)
    for index, response in enumerate(others, 4):
        wanted = Wanted(blocks()[index].key, blocks()[index].tokens)
        assert open_object(memoryview(response.data), wanted, num_bytes) == memoryview(bytes([index]) * num_bytes)
    assert len(others) == 2


def test_no_more_whole_blocks_are_read_at_a_time_than_a_slice_has_however_few_layers_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_sender, "_SLICE_BYTES", 2 * PAYLOAD_BYTES)
    transfer = FakeTransfer()
    responses = responses_to(FetchKVRequest(lease_id="a", num_layers=1), transfer)
    assert [each.block for each in responses[1:]] == list(range(NUM_BLOCKS))
    assert (transfer.max_blocks_per_read, transfer.num_read_blocks) == (2, NUM_BLOCKS)


def responses_to(request: FetchKVRequest, transfer: FakeTransfer | None = None) -> list[Any]:
    """Return all responses of a server whose shared store has the blocks 1 and 4."""

    async def run() -> list[Any]:
        engine = FakeEngine()
        engine.transfer = transfer or FakeTransfer()
        engine.transfer.stores = FakeStores(reported=(1, 4))
        return [each async for each in kv_sender.KVSender(engine, Mailbox()).responses(request)]

    return asyncio.run(run())


def test_handles_name_a_store_of_the_caller() -> None:
    stores = [
        each.handle.store for each in responses_to(FetchKVRequest(lease_id="a", stores=["mooncake", "redis"]))[1:]
    ]
    assert stores == ["", "redis", "", "", "redis", ""]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"first_block": 7}, "first_block: expected at most the 6 blocks, got 7"),
        ({"first_layer": 5}, "first_layer: expected at most 4, the last one, got 5"),
        ({"first_layer": 3, "num_layers": 3}, "num_layers: expected at most 2 from layer 3 on, got 3"),
        ({"num_layers": 6}, "num_layers: expected at most 5 from layer 0 on, got 6"),
        (
            {"num_layers": 1, "stores": ["redis"]},
            "stores: can't be combined with a range of layers, because stores hold whole blocks",
        ),
        ({"stores": ["redis"] * 17}, "stores: expected at most 16, got 17"),
    ],
)
def test_fields_out_of_range_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        responses_to(FetchKVRequest(lease_id="a", **fields))
    assert str(caught.value) == message
