from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from radixkv.api.caller import Caller
from radixkv.config import TransferConfig
from radixkv.engine.transfer.shared_stores import SharedStores
from radixkv.engine.transfer.transfer import Transfer, TransferParts
from radixkv.namespace import Namespace, PromptKey
from radixkv.storage.layer_bytes import LayerBytes
from tests.fake_runner import tokens
from tests.offload.tiered_bench import BLOCK_SIZE, FORMAT, PAYLOAD_BYTES, FakeMover, TieredBench

PROMPT = range(2 * BLOCK_SIZE)


class Plain:
    """Adapters of an engine that has none."""

    def keyed(self, caller: Caller, prompt: bytes) -> Any:
        namespace = Namespace("fake", caller.tenant)
        return type("Keyed", (), {"key": PromptKey(namespace, prompt)})


def made(bench: TieredBench) -> tuple[Transfer, list[str]]:
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
    parts = TransferParts(bench.cache, mover, key_blocks, FORMAT, TransferConfig(), {}, layers, stores)
    adapters: Any = Plain()
    transfer = Transfer.of(parts, bench.core.held_leases, adapters, call)
    assert transfer is not None
    return transfer, tenants


def test_the_exported_blocks_are_those_that_the_receiver_wants() -> None:
    bench = TieredBench(16)
    transfer, tenants = made(bench)
    held = bench.prefill(PROMPT, hold_lease=True).held_lease
    assert held is not None
    found = transfer.blocks_of(held.lease_id, "").result()
    objects = transfer.objects(held.lease_id, "", found, [0, 1]).result()
    wanted = transfer.wanted(tokens(range(2 * BLOCK_SIZE + 1)), Caller())
    assert [each.key for each in objects] == [each.key for each in wanted]
    assert tenants == ["", ""]
    data = b"".join(objects[1].pieces())
    assert len(data) == transfer.object_bytes
    payload = transfer.payload_of(data, wanted[1])
    assert not isinstance(payload, str)
    assert bytes(payload) == bytes(objects[1].payload)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    transfer, _ = made(TieredBench(16))
    assert len(transfer.wanted(tokens(PROMPT), Caller())) == 1


@pytest.mark.parametrize(
    ("change", "fault"),
    [(lambda data: data[:-1], "cut"), (lambda data: data[:-40] + b"\1" + data[-39:], "damaged"), (len, "foreign")],
    ids=["cut", "damaged", "another"],
)
def test_an_invalid_block_is_reported_with_the_reason(change: Any, fault: str) -> None:
    bench = TieredBench(16)
    transfer, _ = made(bench)
    held = bench.prefill(PROMPT, hold_lease=True).held_lease
    assert held is not None
    found = transfer.blocks_of(held.lease_id, "").result()
    data = b"".join(transfer.objects(held.lease_id, "", found, [0]).result()[0].pieces())
    wanted = transfer.wanted(tokens(range(2 * BLOCK_SIZE + 1)), Caller())
    if change is len:
        assert transfer.payload_of(data, wanted[1]) == fault
    else:
        assert transfer.payload_of(change(data), wanted[0]) == fault


def test_an_engine_without_the_parts_has_no_transfer() -> None:
    bench = TieredBench(16)
    adapters: Any = Plain()
    assert Transfer.of(None, bench.core.held_leases, adapters, lambda *_: Future()) is None


def test_no_block_is_loaded_from_a_store_that_has_not_answered_a_purge() -> None:
    bench = TieredBench(16, redis=100)
    transfer, _ = made(bench)

    def ask(tenant: str) -> list[str]:
        return transfer.stores_for(transfer.wanted(tokens(PROMPT), Caller(tenant)), tenant).result()

    assert ask("acme") == ["redis"]
    bench.offload.purge("acme", None, None)
    assert (ask("acme"), ask("other")) == ([], ["redis"])
    bench.stores["redis"].run()
    assert ask("acme") == ["redis"]
