"""K/V of held leases: whole blocks of the prompt are available as long as the lease is held."""

from __future__ import annotations

import json
from concurrent.futures import Future

import pytest

from radixkv.api.params import PrefillParams
from radixkv.api.result import PrefillResult
from radixkv.engine.transfer.lease_exporter import LeaseExporter
from radixkv.errors import UnknownLease
from radixkv.namespace import Namespace
from radixkv.offload.tiers.block_mac import BlockMac
from radixkv.offload.tiers.block_object import ObjectFault, Wanted, open_object
from radixkv.scheduling.request import Request
from radixkv.storage.layer_bytes import LayerBytes, Layers
from tests.core_bench import purge_at_once
from tests.fake_runner import tokens
from tests.offload.tiered_bench import BLOCK_SIZE, PAYLOAD_BYTES, FakeMover, TieredBench

PROMPT = range(3 * BLOCK_SIZE + 2)


class Exporting:
    """An engine core that holds leases, and the exporter of their K/V."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.bench = TieredBench(num_blocks)
        mover = FakeMover(self.bench.runner)
        core = self.bench.core
        layers = LayerBytes(4, PAYLOAD_BYTES // 4, 0)
        keys = self.bench.index.key_blocks
        self.exports = LeaseExporter(core.held_leases, mover, keys, layers)  # type: ignore[arg-type]

    def make_public(self, ids: range) -> None:
        """Register and compute a public prefix."""
        cache = self.bench.cache
        prefix = cache.public.register("system", "fake", "", tokens(ids))
        future: Future[PrefillResult] = Future()
        self.bench.core.submit(Request(PrefillParams(prefix.tokens), prefix.namespace, future, 0.0))
        self.bench.run()
        cache.public.activate(prefix)

    def payloads(self, lease_id: str, tenant: str) -> list[bytes]:
        """Return the exported blocks of a tenant's lease."""
        exported = self.exports.blocks_of(lease_id, tenant)
        objects = self.exports.objects(lease_id, tenant, exported, range(len(exported.blocks)))
        return [bytes(each.payload) for each in objects]

    def hold(self, ids: range = PROMPT, tenant: str = "", **params: bool) -> str:
        """Prefill a prompt, and return the id of its held lease."""
        result = self.bench.prefill(ids, tenant=tenant, hold_lease=True, **params)
        assert result.held_lease is not None
        return result.held_lease.lease_id


def test_the_whole_blocks_of_a_lease_are_exported_with_their_tokens() -> None:
    exporting = Exporting()
    lease_id = exporting.hold()
    exported = exporting.exports.blocks_of(lease_id, "")
    assert [block.tokens for block in exported.blocks] == [
        tokens(range(start, start + BLOCK_SIZE)) for start in range(0, 3 * BLOCK_SIZE, BLOCK_SIZE)
    ]
    objects = exporting.exports.objects(lease_id, "", exported, range(1, 3))
    assert [each.key for each in objects] == [block.key for block in exported.blocks[1:3]]
    slots = json.loads(bytes(objects[1].payload))
    assert [bytes.fromhex(prefix) for _, prefix in slots] == [
        tokens(range(end)) for end in range(2 * BLOCK_SIZE + 1, 3 * BLOCK_SIZE + 1)
    ]
    assert exporting.exports.objects(lease_id, "", exported, ()) == []


def test_an_object_of_some_layers_has_its_own_checksum() -> None:
    exporting = Exporting()
    lease_id = exporting.hold()
    exported = exporting.exports.blocks_of(lease_id, "")
    objects_of_all_layers = exporting.exports.objects(lease_id, "", exported, [0, 2])
    objects_of_two_layers = exporting.exports.objects(lease_id, "", exported, [0, 2], Layers(1, 2))
    quarter = PAYLOAD_BYTES // 4
    assert [bytes(each.payload) for each in objects_of_two_layers] == [
        bytes(each.payload[quarter : 3 * quarter]) for each in objects_of_all_layers
    ]
    object_bytes = b"".join(objects_of_two_layers[1].pieces())
    wanted = Wanted(exported.blocks[2].key, exported.blocks[2].tokens)
    assert open_object(memoryview(object_bytes), wanted, 2 * quarter) == objects_of_two_layers[1].payload
    assert open_object(memoryview(object_bytes), wanted, PAYLOAD_BYTES) is ObjectFault.FOREIGN


def test_only_whole_blocks_have_a_mac() -> None:
    """An object does not say which layers it has, so objects of some layers could be exchanged for each other."""
    exporting = Exporting()
    lease_id = exporting.hold()
    exported = exporting.exports.blocks_of(lease_id, "")
    mac = BlockMac(b"secret", "format")
    wanted = Wanted(exported.blocks[0].key, exported.blocks[0].tokens, mac)
    for layers, has_mac in ((None, True), (Layers(0, 4), True), (Layers(0, 3), False)):
        (sent,) = exporting.exports.objects(lease_id, "", exported, [0], layers, mac)
        payload = open_object(memoryview(b"".join(sent.pieces())), wanted, sent.payload.nbytes)
        assert payload == (sent.payload if has_mac else ObjectFault.UNAUTHENTIC)


def test_leases_of_other_tenants_and_those_that_have_ended_are_unknown() -> None:
    exporting = Exporting()
    lease_id = exporting.hold()
    exported = exporting.exports.blocks_of(lease_id, "")
    with pytest.raises(UnknownLease, match="expected a lease that this tenant holds"):
        exporting.exports.blocks_of(lease_id, "other")
    exporting.bench.core.held_leases.release(lease_id, "")
    with pytest.raises(UnknownLease, match="expected a lease that this tenant holds"):
        exporting.exports.objects(lease_id, "", exported, range(1))


def test_no_block_of_a_purged_prompt_is_exported() -> None:
    exporting = Exporting()
    lease_id = exporting.hold()
    exported = exporting.exports.blocks_of(lease_id, "")
    purge_at_once(exporting.bench.core, tenant="")
    for call in (
        lambda: exporting.exports.blocks_of(lease_id, ""),
        lambda: exporting.exports.objects(lease_id, "", exported, range(1)),
    ):
        with pytest.raises(UnknownLease, match="got one whose prompt was purged"):
            call()


def test_tokens_that_a_request_did_not_publish_are_left_out() -> None:
    exporting = Exporting()
    assert exporting.exports.blocks_of(exporting.hold(write_cache=False), "").blocks == ()


def test_exported_blocks_stay_while_other_requests_run_and_the_prompt_is_extended() -> None:
    exporting = Exporting()
    lease_id = exporting.hold()
    exported = exporting.exports.blocks_of(lease_id, "")
    before = [bytes(each.payload) for each in exporting.exports.objects(lease_id, "", exported, range(3))]
    exporting.bench.prefill(range(5 * BLOCK_SIZE))
    for seed in range(1, 5):
        exporting.bench.prefill(range(1000 * seed, 1000 * seed + 4 * BLOCK_SIZE))
    assert exporting.exports.blocks_of(lease_id, "").blocks == exported.blocks
    assert [bytes(each.payload) for each in exporting.exports.objects(lease_id, "", exported, range(3))] == before


def test_the_blocks_of_a_public_prefix_are_exported_with_the_prompt() -> None:
    exporting = Exporting()
    exporting.make_public(range(2 * BLOCK_SIZE))
    lease_id = exporting.hold(tenant="acme")
    exported = exporting.exports.blocks_of(lease_id, "acme")
    assert len(exported.blocks) == 3
    assert {block.namespace for block in exported.blocks} == {Namespace("fake", "acme")}
    before = exporting.payloads(lease_id, "acme")
    exporting.bench.cache.public.unregister("system")
    exporting.bench.prefill(range(1000, 1000 + 12 * BLOCK_SIZE), tenant="other")
    assert exporting.payloads(lease_id, "acme") == before


def test_a_lease_from_before_its_prompt_was_public_exports_the_blocks_that_it_holds() -> None:
    exporting = Exporting()
    lease_id = exporting.hold(range(2 * BLOCK_SIZE), tenant="acme")
    before = exporting.payloads(lease_id, "acme")
    exporting.make_public(range(2 * BLOCK_SIZE))
    exported = exporting.exports.blocks_of(lease_id, "acme")
    exporting.bench.cache.public.unregister("system")
    exporting.bench.prefill(range(1000, 1000 + 14 * BLOCK_SIZE), tenant="other")  # takes all blocks that are free
    objects = exporting.exports.objects(lease_id, "acme", exported, range(2))
    assert [bytes(each.payload) for each in objects] == before
