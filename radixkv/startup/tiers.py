"""Opens the stores below the device that a configuration names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch

from radixkv.cache.elsewhere.elsewhere import Elsewhere
from radixkv.cache.elsewhere.shared_shelf import SharedShelf
from radixkv.cache.elsewhere.shelf import Shares, Shelf
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.compute.forward import Chunk
from radixkv.compute.runner import Runner
from radixkv.config import KVSourceConfig, StoreConfig, TiersConfig, TransferConfig
from radixkv.engine.offload.disk_record import DiskRecord
from radixkv.engine.offload.offload import Offload
from radixkv.engine.offload.prompt_keys import PromptKeys
from radixkv.engine.transfer.shared_stores import SharedStores
from radixkv.engine.transfer.transfer import TransferParts
from radixkv.errors import ConfigError, StoreError, UnsupportedModel
from radixkv.invocation import InvocationMarks
from radixkv.kernels.native.copies import NativeCopies
from radixkv.model.on_cpu import native_copies
from radixkv.scheduling.load_or_compute import LoadOrCompute
from radixkv.startup.tier_secrets import ciphers_of, secret_of
from radixkv.storage.device_copies import CopyStream
from radixkv.storage.device_pool import KVStorage
from radixkv.storage.layer_bytes import LayerBytes
from radixkv.storage.mover import BlockMover, GpuCopies, payload_layout, payload_sizes
from radixkv.storage.pinned_memory import StagingSlots, map_memory, map_pinned_memory, staging_stride
from radixkv.storage.tiers.block_key import BlockFormat, BlockKeys
from radixkv.storage.tiers.block_object import object_bytes
from radixkv.storage.tiers.block_store import StoreBackend
from radixkv.storage.tiers.by_name import StoreOptions, open_backend
from radixkv.storage.tiers.disk import DiskStore
from radixkv.storage.tiers.guard.alarm_clock import AlarmClock
from radixkv.storage.tiers.guard.circuit import Circuit, CircuitState
from radixkv.storage.tiers.guard.guarded_store import GuardedStore
from radixkv.storage.tiers.sealing import TenantCiphers
from radixkv.storage.tiers.threaded_store import ThreadedStore
from radixkv.storage.tiers.tier import Tier

_log = logging.getLogger(__name__)

# Copies of blocks that wait to be stored, and blocks that were loaded and wait for their request: a share of the pool.
_WAITING_SHARE = 8
_LEAST_WAITING_BYTES = 64 << 20
# The prompt that is computed to learn how this process computes.
_TRIED_BLOCKS = 2
_STRIDE = 7919
_IN_PROCESS = ("host",)  # stores that nobody else can read
_PINNED = ("host",)  # stores whose payloads a GPU can copy where they are


class Transfers(NamedTuple):
    """K/V for other servers, and from them.

    Attributes:
        config: whether others may fetch, and how much is fetched at a time.
        sources: the servers that are asked, by the names of their sections.
    """

    config: TransferConfig
    sources: Mapping[str, KVSourceConfig]


@dataclass(frozen=True, slots=True)
class Stores:
    """The stores that could be opened, the fastest first, and what belongs to all of them.

    Attributes:
        backends: by name.
        closed: names of those that could not be opened.
        keys: of their blocks.
        elsewhere: knows where blocks are; to listen to the cache.
        mover: copies blocks.
        max_waiting_bytes: see `Offload`.
        ciphers: seal what is stored outside this process; None for none.
        transfer: K/V for other servers and from them; None for neither.
        layer_bytes: sizes of the layers of a block.
    """

    backends: dict[str, StoreBackend]
    closed: tuple[str, ...]
    keys: BlockKeys
    elsewhere: Elsewhere
    mover: BlockMover
    max_waiting_bytes: int
    ciphers: TenantCiphers | None
    transfer: Transfers | None
    layer_bytes: LayerBytes

    def offload(self, cache: PrefixCache, choice: LoadOrCompute | None = None) -> Offload:
        """Put them below a cache that `elsewhere` listens to.

        Args:
            cache: the trees.
            choice: decides between loading and computing; None for one by measured times.
        """
        choice = choice or LoadOrCompute(cache.block_size)
        self.elsewhere.trunk_of = cache.public.trunk_of
        for pool in cache.windows.pools:
            self.elsewhere.part_of = pool.part_of
        for shelf in self.elsewhere.shelves.values():
            if not shelf.is_shared:
                shelf.shares_of = partial(_shares_of, cache)
                shelf.retained_share = cache.max_retained_blocks / cache.pool.num_blocks
        alarms = AlarmClock()
        tiers, record = [], None
        for name, backend in self.backends.items():
            is_shared = self.elsewhere.shelves[name].is_shared
            circuit = Circuit(alarms.now_s, is_known=not is_shared)
            store = GuardedStore(name, ThreadedStore(backend, name=name), alarms, circuit)
            if is_shared:
                store.greet()
            ciphers, is_working = None if name in _IN_PROCESS else self.ciphers, partial(_is_closed, circuit)
            stage = _keep if name in _PINNED else self.mover.stage
            tiers.append(Tier(name, store, self.mover.sizes, is_working, ciphers, stage=stage, is_shared=is_shared))
            if isinstance(backend, DiskStore):
                record = DiskRecord(backend, self.keys)
        offload = Offload(
            cache, self.elsewhere, tiers, self.mover, self.max_waiting_bytes, self.keys, choice, record,
            on_close=alarms.close, closed=self.closed,
        )  # fmt: skip
        if self.transfer is not None:
            key_blocks, block_format = self.elsewhere.key_blocks, self.keys.format
            shared = {tier.name: tier for tier in tiers if self.elsewhere.shelves[tier.name].is_shared}
            stores = SharedStores(shared, offload.purger.is_purging_any)
            offload.transfer = TransferParts(
                cache, self.mover, key_blocks, block_format, *self.transfer, self.layer_bytes, stores
            )
        return offload


def open_stores(
    config: TiersConfig,
    runner: Runner,
    marks: InvocationMarks,
    others: Mapping[str, StoreConfig] | None = None,
    transfer: Transfers | None = None,
) -> Stores | None:
    """Open the stores. One that can't be used is left out, which is logged and told as one that does not work.

    What is in the pool is lost. Nothing waits for Redis and Mooncake: while they are away, the service works without.

    Args:
        config: our stores.
        runner: whose blocks are stored.
        marks: tell what invoked adapters computed.
        others: stores of other packages, by the names of their entry points.
        transfer: K/V for other servers and from them, whose format and keys are those of stores; None for neither.

    Returns:
        None if there is none, and no transfer.

    Raises:
        UnsupportedModel: transfers of K/V whose layers have different shapes.
        ConfigError: a store has no room for a block, or lacks its packages; an address or the secret is not one.
    """
    if not any((config.host_bytes, config.disk_path, config.redis_url, config.mooncake_master, others, transfer)):
        return None
    model, storage = runner.model, runner.storage
    if transfer is not None and model.kv_shape.heads:
        raise UnsupportedModel(
            f"{model.name}: layers with K/V of different shapes: expected neither transfer.serve nor kv_sources, since "
            "transfers cut blocks into layers of one size"
        )
    needs_copies = config.host_bytes is not None or config.disk_path is not None or model.device.type == "cpu"
    native = native_copies() if needs_copies else None
    waiting_bytes = max(_LEAST_WAITING_BYTES, storage.num_bytes // _WAITING_SHARE)
    is_on_gpu = model.device.type == "cuda"
    gpu = _gpu_copies(storage, waiting_bytes) if is_on_gpu else None
    mover = BlockMover(storage.pools, storage.part_pools, native, gpu)
    block_format = BlockFormat(
        model=model.fingerprint,
        dtype=str(model.kv_shape.dtype),
        kv_dtype=storage.kv_dtype,
        layout=payload_layout(storage.pools, storage.part_pools),
        block_size=storage.block_size,
        payload_bytes=mover.payload_bytes,
        computed_by=_computed_by(runner, mover),
    )
    keys, ciphers = BlockKeys(block_format, secret_of(config)), ciphers_of(config)
    backends: dict[str, StoreBackend] = {}
    closed: list[str] = []
    map_host_memory = map_pinned_memory if is_on_gpu else map_memory
    for name, options in _wanted(config, others or {}, block_format, native, map_host_memory).items():
        try:
            backends[name] = open_backend(name, options)
        except StoreError as error:
            _log.error("tier %s is off: %s", name, error)
            closed.append(name)
    shelves = [_shelf(name, backend, block_format) for name, backend in backends.items()]
    elsewhere = Elsewhere(shelves, PromptKeys(keys, marks).blocks, storage.block_size)
    layer_bytes = LayerBytes.of(storage.pools[0])  # transfers alone ask, and have no other pool
    return Stores(backends, tuple(closed), keys, elsewhere, mover, waiting_bytes, ciphers, transfer, layer_bytes)


def _wanted(
    config: TiersConfig,
    others: Mapping[str, StoreConfig],
    block_format: BlockFormat,
    native: NativeCopies | None,
    map_host_memory: Callable[[int], memoryview],
) -> dict[str, StoreOptions]:
    """Return what to open, the fastest first."""
    of_block = partial(object_bytes, block_format.block_size, block_format.payload_bytes)
    num_bytes = max(of_block(is_sealed=False), of_block(is_sealed=True))
    wanted: dict[str, StoreOptions] = {}
    if config.host_bytes is not None:
        wanted["host"] = StoreOptions(
            block_format, num_bytes, config.host_bytes, native=native, map_memory=map_host_memory
        )
    if config.disk_path is not None:
        wanted["disk"] = StoreOptions(block_format, num_bytes, config.disk_bytes, config.disk_path, native)
    if config.redis_url is not None:
        wanted["redis"] = StoreOptions(block_format, num_bytes, place=config.redis_url)
    if config.mooncake_master is not None:
        wanted["mooncake"] = StoreOptions(block_format, num_bytes, config.mooncake_bytes, config.mooncake_master)
    for name, store in others.items():
        wanted[name] = StoreOptions(block_format, num_bytes, store.max_bytes, store.place)
    return wanted


def _gpu_copies(storage: KVStorage, waiting_bytes: int) -> GpuCopies:
    """Allocate the pinned memory through which blocks leave a GPU, and come back from stores other than host memory."""
    _, payload_bytes = payload_sizes(storage.pools, storage.part_pools)
    stride = staging_stride(payload_bytes)
    num_bytes = max(_TRIED_BLOCKS, waiting_bytes // stride) * stride
    try:
        memory = map_pinned_memory(num_bytes)
    except MemoryError as error:
        raise ConfigError(f"tiers: {num_bytes} bytes of host memory for copies of blocks can't be mapped") from error
    return GpuCopies(CopyStream(storage.pools[0].blocks.device), StagingSlots(memory, payload_bytes))


def _keep(payload: memoryview) -> None:
    """Leave a payload where its store lends it."""


def _shares_of(cache: PrefixCache, tenant: str) -> Shares:
    """Return a tenant's shares of each store: those of the device."""
    quota, num_blocks = cache.tenants.quota_of(tenant), cache.pool.num_blocks
    return Shares(
        floor=quota.floor_blocks / num_blocks,
        ceiling=None if quota.ceiling_blocks is None else quota.ceiling_blocks / num_blocks,
        retained=1.0 if quota.max_retained_blocks is None else quota.max_retained_blocks / num_blocks,
    )


def _is_closed(circuit: Circuit) -> bool:
    return circuit.state is CircuitState.CLOSED


def _shelf(name: str, backend: StoreBackend, block_format: BlockFormat) -> Shelf:
    """Return the books of a store: of a shared one, unless it knows its room."""
    num_blocks = backend.size().max_objects
    if num_blocks is None:
        if type(backend).purge is StoreBackend.purge:
            raise ConfigError(f"store {name}: expected `purge`, since it does not know its room, got none")
        _log.info("tier %s is shared with servers whose blocks have the format %s", name, block_format.fingerprint)
        return SharedShelf(name)
    _log.info("tier %s has room for %d blocks", name, num_blocks)
    return Shelf(name, num_blocks)


def _computed_by(runner: Runner, mover: BlockMover) -> str:
    """Name what the last bits of K and V depend on besides the model: torch, and how this process computes.

    Libraries, kernels and numbers of threads that are chosen at load give other last bits, so a prompt is computed, and
    the digest of its K and V is part of the name.
    """
    storage, device = runner.storage, runner.model.device
    num_blocks = min(_TRIED_BLOCKS, storage.num_blocks)
    num_tokens = num_blocks * storage.block_size
    tokens = (np.arange(num_tokens) * _STRIDE % runner.model.vocab_size).astype("<u4").tobytes()
    block_ids = np.arange(num_blocks, dtype=np.int32)
    part_ids = block_ids if storage.part_pools else None  # there are as many parts
    runner.run([Chunk(tokens, 0, num_tokens, block_ids, None, wants_logits=True, part_ids=part_ids)])
    digest, ids = blake2b(digest_size=16), block_ids.tolist()
    read = mover.read(ids, None if part_ids is None else ids)
    read.copy.wait()
    for payload in read.payloads:
        digest.update(payload)
    return f"{device.type}, torch {torch.__version__}, {digest.hexdigest()}"
