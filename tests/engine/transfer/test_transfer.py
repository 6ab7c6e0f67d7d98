"""K/V transfer: blocks are exported, checked and authenticated by their receiver."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from radixkv.api.caller import Caller
from radixkv.config import TransferConfig
from radixkv.engine.transfer.shared_stores import SharedStores
from radixkv.engine.transfer.transfer import FleetAccess, Transfer, TransferParts
from radixkv.namespace import Namespace, PromptKey
from radixkv.offload.tiers.block_mac import BlockMac
from radixkv.offload.tiers.block_object import ObjectFault
from radixkv.storage.layer_bytes import LayerBytes
from tests.fake_runner import tokens
from tests.offload.tiered_bench import BLOCK_SIZE, FORMAT, PAYLOAD_BYTES, FakeMover, TieredBench

PROMPT = range(2 * BLOCK_SIZE)


class NoAdapters:
    """Adapters of an engine that has none."""

    def keyed(self, caller: Caller, prompt: bytes) -> Any:
        namespace = Namespace("fake", caller.tenant)
        return type("Keyed", (), {"key": PromptKey(namespace, prompt)})


def make_transfer(bench: TieredBench, mac: BlockMac | None = None) -> tuple[Transfer, list[str]]:
    """Return a transfer, and the list to which it adds the tenant of each call of the engine's thread."""
    tenants: list[str] = []

    def call(tenant: str, function: Any) -> Future[Any]:
        tenants.append(tenant)
        future: Future[Any] = Future()
        future.set_result(function())
        return future

    mover: Any = FakeMover(bench.runner)
    key_blocks, layers = bench.index.key_blocks, LayerBytes(1, PAYLOAD_BYTES, 0)
    shared = {name: tier for name, tier in bench.offload.tiers.items() if name == "redis"}
    stores = SharedStores(shared, bench.offload.purger.is_purging_any)
    parts = TransferParts(mover, key_blocks, FORMAT, TransferConfig(), {}, layers, stores, mac)
    adapters: Any = NoAdapters()
    return Transfer(parts, bench.core.held_leases, adapters, call), tenants


def test_exported_blocks_are_the_ones_that_a_receiver_requests_for_the_prompt() -> None:
    bench = TieredBench(16)
    transfer, tenants = make_transfer(bench)
    held = bench.prefill(PROMPT, hold_lease=True).held_lease
    assert held is not None
    exported = transfer.blocks_of(held.lease_id, "").result()
    objects = transfer.objects(held.lease_id, "", exported, [0, 1]).result()
    wanted = transfer.wanted(tokens(range(2 * BLOCK_SIZE + 1)), Caller())
    assert [each.key for each in objects] == [each.key for each in wanted]
    assert tenants == ["", ""]
    object_bytes = b"".join(objects[1].pieces())
    assert len(object_bytes) == transfer.object_bytes
    payload = transfer.payload_of(object_bytes, wanted[1], None)
    assert isinstance(payload, memoryview)
    assert bytes(payload) == bytes(objects[1].payload)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    transfer, _ = make_transfer(TieredBench(16))
    assert len(transfer.wanted(tokens(PROMPT), Caller())) == 1


@pytest.mark.parametrize(
    ("change", "wanted_index", "fault"),
    [
        (lambda object_bytes: object_bytes[:-1], 0, ObjectFault.CUT),
        (lambda object_bytes: object_bytes[:-40] + b"\1" + object_bytes[-39:], 0, ObjectFault.DAMAGED),
        (lambda object_bytes: object_bytes, 1, ObjectFault.FOREIGN),
    ],
    ids=["cut", "damaged", "another block"],
)
def test_an_invalid_block_is_reported_with_the_reason(change: Any, wanted_index: int, fault: ObjectFault) -> None:
    bench = TieredBench(16)
    transfer, _ = make_transfer(bench)
    held = bench.prefill(PROMPT, hold_lease=True).held_lease
    assert held is not None
    exported = transfer.blocks_of(held.lease_id, "").result()
    object_bytes = b"".join(transfer.objects(held.lease_id, "", exported, [0]).result()[0].pieces())
    wanted = transfer.wanted(tokens(range(2 * BLOCK_SIZE + 1)), Caller())
    assert transfer.payload_of(change(object_bytes), wanted[wanted_index], None) is fault


def test_no_block_is_loaded_from_a_store_that_has_not_answered_a_purge() -> None:
    bench = TieredBench(16, redis=100)
    transfer, _ = make_transfer(bench)

    def usable_stores(tenant: str) -> list[str]:
        return transfer.stores_for(transfer.wanted(tokens(PROMPT), Caller(tenant)), tenant).result()

    assert usable_stores("acme") == ["redis"]
    bench.offload.purge("acme", None, None)
    assert (usable_stores("acme"), usable_stores("other")) == ([], ["redis"])
    bench.stores["redis"].run()
    assert usable_stores("acme") == ["redis"]


def test_a_secret_of_the_servers_authenticates_members_of_the_fleet_and_other_servers() -> None:
    mac = BlockMac(b"secret", FORMAT.fingerprint)
    transfer, _ = make_transfer(TieredBench(16), mac)
    transfer.join(FleetAccess("token", b"key of the fleet"))
    assert transfer.mac_of(is_member=True) is transfer.mac_of(is_member=False) is mac


def test_without_a_secret_the_key_of_a_fleet_authenticates_its_members() -> None:
    macs = []
    for key in (b"key", b"key", b"another key"):
        transfer, _ = make_transfer(TieredBench(16))
        transfer.join(FleetAccess("token", key))
        assert transfer.mac_of(is_member=False) is None, (
            "a source in a section kv_sources is used without a MAC, since it must be `trusted`"
        )
        mac = transfer.mac_of(is_member=True)
        assert mac is not None
        macs.append(mac.of(bytes(16), [b"data"]))
    assert macs[0] == macs[1] != macs[2]


def test_exported_blocks_have_the_mac_of_the_secret_or_of_the_fleet() -> None:
    for secret in (BlockMac(b"secret", FORMAT.fingerprint), None):
        bench = TieredBench(16)
        transfer, _ = make_transfer(bench, secret)
        transfer.join(FleetAccess("token", b"key"))
        held = bench.prefill(PROMPT, hold_lease=True).held_lease
        assert held is not None
        exported = transfer.blocks_of(held.lease_id, "").result()
        object_bytes = b"".join(transfer.objects(held.lease_id, "", exported, [0]).result()[0].pieces())
        mac = transfer.mac_of(is_member=True)
        assert isinstance(transfer.payload_of(object_bytes, exported.blocks[0], mac), memoryview)
        other = BlockMac(b"another secret", FORMAT.fingerprint)
        assert transfer.payload_of(object_bytes, exported.blocks[0], other) is ObjectFault.UNAUTHENTIC
