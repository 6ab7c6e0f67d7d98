"""An engine core over a fake device with stores, whose calls complete when the test says so."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.tenant_ledger import TenantLedger
from radixkv.cache.window_pool import Reach, WindowPool
from radixkv.cache.windowed_layers import WindowedLayers
from radixkv.config import EngineConfig
from radixkv.engine.core import EngineCore
from radixkv.engine.statement_feed import StatementFeed
from radixkv.invocation import InvocationMarks
from radixkv.offload.block_keys import BlockFormat, BlockKeys, KeyScope, PromptKeys
from radixkv.offload.copies import CompleteCopy, Copy, ReadBlocks
from radixkv.offload.index.offload_index import OffloadIndex
from radixkv.offload.index.tier_index import SharedTierIndex, TierIndex
from radixkv.offload.load_or_compute import LoadOrCompute
from radixkv.offload.offload import Offload
from radixkv.offload.tiers.block_object import BlockObject, object_bytes
from radixkv.offload.tiers.block_store import Loan, PutResult, StoreSize
from radixkv.offload.tiers.host import HostStore, map_memory
from radixkv.offload.tiers.tier import Tier
from tests.core_bench import BLOCK_SIZE, Bench
from tests.fake_runner import FakeRunner
from tests.fakes import FakeClock

PAYLOAD_BYTES = 4096
BYTES_WITHOUT_PART = 4032  # of a payload without its part of windowed layers
WINDOW = 7  # tokens, in a bench with windowed layers
STEP_TOKENS = 8
SHARED = ("redis", "mooncake")
FORMAT = BlockFormat("fake", "float32", "fp32", "fake", BLOCK_SIZE, PAYLOAD_BYTES, "cpu")
OBJECT_BYTES = object_bytes(BLOCK_SIZE, PAYLOAD_BYTES)
PROMPT = range(13)  # three whole blocks and a token
FLOOD = range(100, 115)  # three whole blocks and three tokens, which need all blocks of a device with four


class FakeMover:
    """Fakes a `BlockMover`: payloads are the contents of a fake runner's blocks as JSON, padded with spaces.

    Attributes:
        has_parts: whether the model has windowed layers.
        written_parts: ids of the parts that were written.
    """

    payload_bytes = PAYLOAD_BYTES

    def __init__(self, runner: FakeRunner, *, has_parts: bool = False) -> None:
        self.has_parts = has_parts
        self._runner = runner
        self.written_parts: list[int] = []

    def has_part(self, payload: memoryview) -> bool:
        return payload.nbytes == PAYLOAD_BYTES

    def write_parts(self, part_ids: Sequence[int], payloads: Sequence[memoryview]) -> Copy:
        assert all(self.has_part(payload) for payload in payloads)
        self.written_parts += part_ids
        return CompleteCopy()

    def read(self, block_ids: Sequence[int], part_ids: Sequence[int | None] | None = None) -> ReadBlocks:
        payloads = []
        for block_id in block_ids:
            slots = [slot and (slot[0], slot[1].hex()) for slot in self._runner.content[block_id]]
            payloads.append(memoryview(json.dumps(slots).encode().ljust(PAYLOAD_BYTES)))
        if part_ids is None or not self.has_parts:
            return ReadBlocks(payloads, CompleteCopy())
        payloads = [
            payload if part_id is not None else payload[:BYTES_WITHOUT_PART]
            for payload, part_id in zip(payloads, part_ids, strict=True)
        ]
        return ReadBlocks(payloads, CompleteCopy())

    def write(self, block_ids: Sequence[int], payloads: Sequence[memoryview]) -> Copy:
        for block_id, payload in zip(block_ids, payloads, strict=True):
            slots = json.loads(bytes(payload))
            self._runner.content[block_id] = [slot and (slot[0], bytes.fromhex(slot[1])) for slot in slots]
        return CompleteCopy()


class SteppedStore:
    """A store in host memory whose calls run when the test says so.

    Attributes:
        num_blocks: number of blocks for which it has room.
        memory: the blocks.
        calls: calls that it has received and not executed.
        error: the error with which all calls fail; None while the store works.
        touches: the keys of each touch, also of those that have not been executed.
    """

    def __init__(self, num_blocks: int) -> None:
        slot_bytes = -(-OBJECT_BYTES // 64) * 64  # rounded up to whole cache lines
        self.num_blocks = num_blocks
        self.memory = HostStore(map_memory(num_blocks * slot_bytes), OBJECT_BYTES)
        self.calls: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.error: Exception | None = None
        self.touches: list[Sequence[bytes]] = []

    def run(self) -> None:
        """Run all queued calls."""
        calls, self.calls = self.calls, []
        for future, call in calls:
            if not future.set_running_or_notify_cancel():
                continue
            if self.error is not None:
                future.set_exception(self.error)
            else:
                future.set_result(call())

    def put(self, objects: Sequence[BlockObject], victims: Sequence[bytes] = ()) -> Future[PutResult]:
        return self._later(lambda: self.memory.put(objects, victims))

    def get(self, keys: Sequence[bytes]) -> Future[list[Loan | None]]:
        return self._later(lambda: self.memory.get(keys))

    def exists(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        return self._later(lambda: self.memory.exists(keys))

    def touch(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        self.touches.append(keys)
        return self._later(lambda: self.memory.exists(keys))

    def delete(self, keys: Sequence[bytes]) -> Future[int]:
        return self._later(lambda: self.memory.delete(keys))

    def purge(self, scope: KeyScope) -> Future[int]:
        return self._later(lambda: self.memory.delete(self._keys_of(scope)))

    def size(self) -> StoreSize:
        return self.memory.size()

    def close(self) -> None:
        self.run()

    def _keys_of(self, scope: KeyScope) -> list[bytes]:
        pattern = re.compile(scope.hex_pattern("."))
        return [key for key in self.memory._table._entries if pattern.match(key.hex())]

    def _later(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.calls.append((future, call))
        return future


class TieredBench(Bench):
    """A bench with stores below the device.

    Args:
        num_blocks: blocks on the device.
        max_bytes: see `Offload`.
        num_parts: parts of windowed layers on the device; 0 for a model without windowed layers.
        retained_share: see `TierIndex`.
        wake: see `Offload`.
        session_prompt_bytes: see `PrefixCache`, `max_session_prompt_bytes`.
        stores: the stores by the names of their tiers, the fastest first: a number of blocks for a store of its own, or
            a store that it shares with another bench.
    """

    def __init__(
        self,
        num_blocks: int = 4,
        max_bytes: int = 1 << 20,
        num_parts: int = 0,
        retained_share: float = 1.0,
        wake: Callable[[], None] = lambda: None,
        session_prompt_bytes: int = 0,
        **stores: int | SteppedStore,
    ) -> None:
        self.clock = FakeClock()
        self.has_pending_calls = False
        self.runner = FakeRunner(num_blocks, BLOCK_SIZE)
        stores = stores or {"host": 100}
        self.stores = {
            name: store if isinstance(store, SteppedStore) else SteppedStore(store) for name, store in stores.items()
        }
        marks = InvocationMarks()
        self.ledger = TenantLedger(BLOCK_SIZE, clock=self.clock)
        tier_indexes = [
            SharedTierIndex(name, 2**18, ledger=self.ledger)
            if name in SHARED
            else TierIndex(name, store.num_blocks, retained_share=retained_share, ledger=self.ledger)
            for name, store in self.stores.items()
        ]
        keys = BlockKeys(FORMAT)
        pools = (
            [WindowPool(num_blocks, num_parts, BLOCK_SIZE, Reach.of_window(WINDOW), STEP_TOKENS)] if num_parts else []
        )
        part_of = pools[0].part_of if pools else (lambda block_id: None)
        self.index = OffloadIndex(tier_indexes, PromptKeys(keys, marks).blocks, BLOCK_SIZE, part_of)
        self.cache = PrefixCache(
            num_blocks,
            BLOCK_SIZE,
            clock=self.clock,
            marks=marks,
            listeners=[self.index],
            windows=WindowedLayers(pools),
            max_session_prompt_bytes=session_prompt_bytes,
            ledger=self.ledger,
        )
        self.index.set_tokens_of_prefix(self.cache.public.tokens_of)
        sizes = (PAYLOAD_BYTES, BYTES_WITHOUT_PART) if num_parts else (PAYLOAD_BYTES,)
        tiers = [Tier(name, store, sizes) for name, store in self.stores.items()]
        self.choice = LoadOrCompute(BLOCK_SIZE)
        self.mover = mover = FakeMover(self.runner, has_parts=num_parts > 0)
        self.offload = Offload(
            self.cache, self.index, tiers, mover, max_bytes, keys, self.choice, clock=self.clock, wake=wake
        )
        limits = EngineConfig(max_step_tokens=STEP_TOKENS) if num_parts else EngineConfig()
        self.core = EngineCore.build(
            self.runner, self.cache, limits, clock=self.clock, work_clock=self.clock,
            has_pending_calls=lambda: self.has_pending_calls, offload=self.offload,
            observers=[StatementFeed(self.ledger)],
        )  # type: ignore[arg-type]  # fmt: skip

    def evict(self, num_blocks: int) -> None:
        """Evict blocks, and store them."""
        self.cache.evict(num_blocks)
        self.offload._saver.flush()
        for store in self.stores.values():
            store.run()
        self.offload._saver.flush()

    def run(self) -> None:
        """Run all requests, with stores that answer at once."""
        num_idle_steps = 0
        # One idle step is not enough, since a step that was started ahead does not process answers of stores.
        while num_idle_steps < 2:
            for store in self.stores.values():
                store.run()
            self.core.step()
            self.cache.check()
            has_calls = any(store.calls for store in self.stores.values())
            until_due_s = self.offload.seconds_until_due()
            is_idle = not self.core.has_work and not has_calls
            num_idle_steps = num_idle_steps + 1 if is_idle and until_due_s is None else 0
            if is_idle and until_due_s is not None:
                self.clock.now_s += until_due_s


def compute_and_evict_prompt(bench: TieredBench) -> TieredBench:
    """Compute `PROMPT` on a bench, evict it from the device to the stores, and return the bench."""
    bench.prefill(PROMPT)
    bench.evict(4)
    return bench
