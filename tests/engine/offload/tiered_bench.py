"""An engine core with stores below a fake device, whose answers come when the test wants them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from radixkv.cache.elsewhere.elsewhere import Elsewhere
from radixkv.cache.elsewhere.shelf import Shelf
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine.core import EngineCore
from radixkv.engine.offload.offload import Offload
from radixkv.engine.offload.prompt_keys import PromptKeys
from radixkv.invocation import InvocationMarks
from radixkv.storage.tiers.block_key import BlockFormat, BlockKeys
from radixkv.storage.tiers.block_object import BlockObject, object_bytes
from radixkv.storage.tiers.block_store import Loan, PutResult, StoreSize
from radixkv.storage.tiers.host_memory import HostMemory, allocate_arena
from radixkv.storage.tiers.tier import Tier
from tests.core_bench import BLOCK_SIZE, Bench, Clock
from tests.fake_runner import FakeRunner

PAYLOAD_BYTES = 4096
FORMAT = BlockFormat("fake", "float32", "fp32", "fake", BLOCK_SIZE, PAYLOAD_BYTES, "cpu")
OBJECT_BYTES = object_bytes(BLOCK_SIZE, PAYLOAD_BYTES)


class FakeMover:
    """Moves what a fake runner has in its blocks."""

    payload_bytes = PAYLOAD_BYTES

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner

    def read(self, block_ids: Sequence[int]) -> list[memoryview]:
        slots = [
            [each and (each[0], each[1].hex()) for each in self._runner.content[block_id]] for block_id in block_ids
        ]
        return [memoryview(json.dumps(each).encode().ljust(PAYLOAD_BYTES)) for each in slots]

    def write(self, block_ids: Sequence[int], payloads: Sequence[memoryview]) -> None:
        for block_id, payload in zip(block_ids, payloads, strict=True):
            slots = json.loads(bytes(payload))
            self._runner.content[block_id] = [each and (each[0], bytes.fromhex(each[1])) for each in slots]


class SteppedStore:
    """Host memory that does what it is told when the test says so.

    Attributes:
        calls: what it was told and has not done.
        fails: whether calls raise this.
    """

    def __init__(self, num_blocks: int) -> None:
        slot_bytes = -(-OBJECT_BYTES // 64) * 64
        self.memory = HostMemory(allocate_arena(num_blocks * slot_bytes), OBJECT_BYTES)
        self.calls: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.error: Exception | None = None

    def run(self) -> None:
        """Do all that it was told."""
        calls, self.calls = self.calls, []
        for future, call in calls:
            if not future.set_running_or_notify_cancel():
                continue
            if self.error is not None:
                future.set_exception(self.error)
            else:
                future.set_result(call())

    def put(self, objects: Sequence[BlockObject], give_up: Sequence[bytes] = ()) -> Future[PutResult]:
        return self._later(lambda: self.memory.put(objects, give_up))

    def get(self, keys: Sequence[bytes]) -> Future[list[Loan | None]]:
        return self._later(lambda: self.memory.get(keys))

    def exists(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        return self._later(lambda: self.memory.exists(keys))

    def delete(self, keys: Sequence[bytes]) -> Future[int]:
        return self._later(lambda: self.memory.delete(keys))

    def size(self) -> StoreSize:
        return self.memory.size()

    def close(self) -> None:
        self.run()

    def _later(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.calls.append((future, call))
        return future


class TieredBench(Bench):
    """A bench with stores by name, the fastest first, each with room for a number of blocks."""

    def __init__(self, num_blocks: int = 4, max_bytes: int = 1 << 20, **stores: int) -> None:
        self.clock = Clock()
        self.has_news = False
        self.runner = FakeRunner(num_blocks, BLOCK_SIZE)
        stores = stores or {"host": 100}
        self.stores = {name: SteppedStore(room) for name, room in stores.items()}
        marks = InvocationMarks()
        shelves = [Shelf(name, room) for name, room in stores.items()]
        self.elsewhere = Elsewhere(shelves, PromptKeys(BlockKeys(FORMAT), marks).blocks, BLOCK_SIZE)
        self.cache = PrefixCache(num_blocks, BLOCK_SIZE, clock=self.clock, marks=marks, listeners=[self.elsewhere])
        self.elsewhere.trunk_of = self.cache.public.trunk_of
        tiers = [Tier(name, store, PAYLOAD_BYTES) for name, store in self.stores.items()]
        self.offload = Offload(self.cache, self.elsewhere, tiers, FakeMover(self.runner), max_bytes, clock=self.clock)  # type: ignore[arg-type]
        self.core = EngineCore(
            self.runner, self.cache, EngineConfig(), clock=self.clock, has_news=lambda: self.has_news,
            offload=self.offload,
        )  # type: ignore[arg-type]  # fmt: skip

    def evict(self, num_blocks: int) -> None:
        """Evict, and let the stores have what leaves."""
        self.cache.evict(num_blocks)
        self.offload.flush()
        for store in self.stores.values():
            store.run()
        self.offload.flush()

    def run(self) -> None:
        """Run all requests, with stores that answer at once."""
        while True:
            for store in self.stores.values():
                store.run()
            self.core.step()
            self.cache.check()
            if not self.core.has_work and not any(store.calls for store in self.stores.values()):
                return
