"""Opens the stores below the device that a configuration names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.tenant_ledger import TenantLedger
from radixkv.cache.tenants import Quota
from radixkv.compute.forward import Chunk
from radixkv.compute.runner import Runner
from radixkv.config import KVSourceConfig, StoreConfig, TiersConfig, TransferConfig
from radixkv.engine.transfer.shared_stores import SharedStores
from radixkv.engine.transfer.transfer import TransferParts
from radixkv.errors import ConfigError, StoreError, UnsupportedModel
from radixkv.invocation import InvocationMarks
from radixkv.model.on_cpu import native_copies
from radixkv.offload.block_keys import BlockFormat, BlockKeys, PromptKeys
from radixkv.offload.block_mover import BlockMover, payload_sizes
from radixkv.offload.disk_record import DiskRecord
from radixkv.offload.gpu_copies import CopyStream, GpuCopies, StagingSlots, map_pinned_memory, staging_stride
from radixkv.offload.index.offload_index import OffloadIndex
from radixkv.offload.index.tier_index import SharedTierIndex, TierIndex, TierShares
from radixkv.offload.load_or_compute import LoadOrCompute
from radixkv.offload.offload import Offload
from radixkv.offload.tiers.block_mac import BlockMac
from radixkv.offload.tiers.block_object import Protection
from radixkv.offload.tiers.block_store import StoreBackend
from radixkv.offload.tiers.disk import DiskStore
from radixkv.offload.tiers.guard import GuardedStore, TimerThread
from radixkv.offload.tiers.host import map_memory
from radixkv.offload.tiers.open_store import configured_stores, open_backend
from radixkv.offload.tiers.threaded_store import ThreadedStore
from radixkv.offload.tiers.tier import Tier
from radixkv.startup.tier_secrets import has_protection, mac_of, protection_of, secret_of, unprotected
from radixkv.storage.device_pool import KVStorage
from radixkv.storage.layer_bytes import LayerBytes, payload_layout

_log = logging.getLogger(__name__)

# Copies that wait to be stored, and loaded blocks that wait for their requests, may take the size of the pool divided
# by `_WAITING_DIVISOR`, but at least `_MIN_WAITING_BYTES`.
_WAITING_DIVISOR = 8
_MIN_WAITING_BYTES = 64 << 20
# A warning is logged for a tier that has fewer blocks than the number of the pool's blocks divided by this.
_SMALL_TIER_DIVISOR = 16
# The prompt whose K and V identify how this process computes: its number of blocks, and the distance between the ids of
# adjacent tokens; see `_identify_computation`.
_PROBE_BLOCKS = 2
_PROBE_STRIDE = 7919


class Transfers(NamedTuple):
    """Configuration of K/V transfers to and from other servers.

    Attributes:
        config: whether other servers may fetch, and how much is fetched at a time.
        sources: the servers to fetch from, by the names of their sections.
    """

    config: TransferConfig
    sources: Mapping[str, KVSourceConfig]


@dataclass(frozen=True, slots=True)
class Stores:
    """The stores that could be opened, the fastest first, and the objects that they share.

    Attributes:
        backends: the opened backends by name.
        unopened: names of the stores that could not be opened.
        keys: computes the keys of blocks.
        index: which tier holds which block; it listens to the cache.
        mover: copies blocks.
        max_waiting_bytes: see `Offload`.
        protection_of: returns the encryption or MAC of a tenant's blocks outside this process; None for neither.
        mac: authenticates blocks that servers send to each other; None without a secret.
        transfer: K/V transfers between servers; None to disable them.
        layer_bytes: sizes of the layers of a block.
    """

    backends: dict[str, StoreBackend]
    unopened: tuple[str, ...]
    keys: BlockKeys
    index: OffloadIndex
    mover: BlockMover
    max_waiting_bytes: int
    protection_of: Callable[[str], Protection | None]
    mac: BlockMac | None
    transfer: Transfers | None
    layer_bytes: LayerBytes

    def connect(
        self, cache: PrefixCache, load_or_compute: LoadOrCompute | None = None, wake: Callable[[], None] = lambda: None
    ) -> tuple[Offload, TransferParts | None]:
        """Connect the tiers to the cache and the engine.

        Args:
            cache: the radix trees, to which the index listens.
            load_or_compute: decides between loading and computing; None to decide by measured times.
            wake: wakes the engine's thread.

        Returns:
            The tiers, and what K/V transfers between servers need; None if transfers are disabled.
        """
        self.index.set_tokens_of_prefix(cache.public.tokens_of)
        timers = TimerThread()
        tiers = {name: self._make_tier(name, backend, timers) for name, backend in self.backends.items()}
        disk = self.backends.get("disk")
        offload = Offload(
            cache,
            self.index,
            list(tiers.values()),
            self.mover,
            self.max_waiting_bytes,
            self.keys,
            load_or_compute or LoadOrCompute(cache.block_size),
            DiskRecord(disk, self.keys, rejected=tiers["disk"].rejected) if isinstance(disk, DiskStore) else None,
            on_close=timers.close,
            unopened=self.unopened,
            wake=wake,
        )
        if self.transfer is None:
            return offload, None
        shared = {name: tier for name, tier in tiers.items() if self.index.tiers[name].is_shared}
        return offload, TransferParts(
            mover=self.mover,
            key_blocks=self.index.key_blocks,
            block_format=self.keys.format,
            config=self.transfer.config,
            sources=self.transfer.sources,
            layer_bytes=self.layer_bytes,
            stores=SharedStores(shared, offload.purger.is_purging_any),
            mac=self.mac,
        )

    def _make_tier(self, name: str, backend: StoreBackend, timers: TimerThread) -> Tier:
        """Put a time limit, a circuit breaker and verification around a store."""
        is_shared = self.index.tiers[name].is_shared
        # A shared store may be down at the start, so the first failure already opens its circuit breaker.
        store = GuardedStore(name, ThreadedStore(backend, name=name), timers, is_known=not is_shared)
        if is_shared:
            store.probe()
        is_host = name == "host"  # only this process reads this tier, and a GPU copies its payloads without staging
        return Tier(
            name,
            store,
            self.mover.sizes,
            store.is_working,
            unprotected if is_host else self.protection_of,
            stage=_do_not_stage if is_host else self.mover.stage,
            is_shared=is_shared,
        )


def open_stores(
    config: TiersConfig,
    runner: Runner,
    marks: InvocationMarks,
    plugin_stores: Mapping[str, StoreConfig] | None = None,
    transfer: Transfers | None = None,
    *,
    shares_of: Callable[[str], TierShares] = lambda tenant: TierShares(),
    retained_share: float = 1.0,
    part_of: Callable[[int], int | None] | None = None,
    ledger: TenantLedger | None = None,
) -> Stores | None:
    """Open the stores. A store that cannot be used is logged, and is reported as not working in the statistics.

    A test prompt is computed in the pool, which overwrites its contents. This does not wait for Redis or Mooncake:
    while they are unavailable, the service works without them.

    Args:
        config: the section `tiers`.
        runner: the runner whose blocks are stored.
        marks: identify the tokens that invoked adapters computed.
        plugin_stores: stores of plug-ins, by the names of their entry points.
        transfer: K/V transfers between servers, which use the same format and keys; None to disable them.
        shares_of: returns the shares of a tenant; see `tier_shares`.
        retained_share: fraction of each tier that retained blocks may take.
        part_of: see `OffloadIndex`; None if no layers are windowed.
        ledger: accounts the blocks of each tenant; None without statements.

    Returns:
        The stores; None if neither stores nor transfers are configured.

    Raises:
        UnsupportedModel: transfers are configured, and the layers have K/V of different shapes.
        ConfigError: a store has no room for a block, or its packages are missing; an address or a secret is invalid; or
            there is not enough host memory.
    """
    if not any(
        (config.host_bytes, config.disk_path, config.redis_url, config.mooncake_master, plugin_stores, transfer)
    ):
        return None
    model = runner.model
    storage = runner.storage
    if transfer is not None and model.kv_shape.heads:
        raise UnsupportedModel(
            f"{model.name}: layers with K/V of different shapes: expected neither transfer.serve nor kv_sources, since "
            "transfers cut blocks into layers of one size"
        )
    needs_copies = config.host_bytes is not None or config.disk_path is not None or model.device.type == "cpu"
    native = native_copies() if needs_copies else None
    waiting_bytes = max(_MIN_WAITING_BYTES, storage.num_bytes // _WAITING_DIVISOR)
    is_on_gpu = model.device.type == "cuda"
    gpu = _allocate_gpu_copies(storage, waiting_bytes) if is_on_gpu else None
    mover = BlockMover(storage.pools, storage.part_pools, native, gpu)
    block_format = BlockFormat(
        model=model.fingerprint,
        dtype=str(model.kv_shape.dtype),
        kv_dtype=storage.kv_dtype,
        layout=payload_layout(storage.pools, storage.part_pools),
        block_size=storage.block_size,
        payload_bytes=mover.payload_bytes,
        computed_by=_identify_computation(runner, mover),
    )
    keys = BlockKeys(block_format, secret_of(config))
    mac = mac_of(config, block_format)
    protection = protection_of(config, mac)
    backends: dict[str, StoreBackend] = {}
    unopened: list[str] = []
    map_host_memory = map_pinned_memory if is_on_gpu else map_memory
    must_be_private = not (has_protection(config) or config.trusted)
    configured = configured_stores(
        config, plugin_stores or {}, block_format, native, map_host_memory, must_be_private=must_be_private
    )
    for name, options in configured.items():
        try:
            backends[name] = open_backend(name, options)
        except StoreError as error:
            _log.error("tier %s is off: %s", name, error)
            unopened.append(name)
    tier_indexes = [
        _make_tier_index(
            name, backend, block_format, config.known_blocks, shares_of, retained_share, storage.num_blocks, ledger
        )
        for name, backend in backends.items()
    ]
    key_blocks = PromptKeys(keys, marks).blocks
    offload_index = OffloadIndex(tier_indexes, key_blocks, storage.block_size, part_of or (lambda block_id: None))
    layer_bytes = LayerBytes.of(storage.pools[0])  # used by transfers only, which require a single pool
    return Stores(
        backends, tuple(unopened), keys, offload_index, mover, waiting_bytes, protection, mac, transfer, layer_bytes
    )


def _allocate_gpu_copies(storage: KVStorage, waiting_bytes: int) -> GpuCopies:
    """Allocate the pinned memory through which blocks are copied from and to a GPU, except from the host tier."""
    _, payload_bytes = payload_sizes(storage.pools, storage.part_pools)
    stride = staging_stride(payload_bytes)
    num_bytes = max(_PROBE_BLOCKS, waiting_bytes // stride) * stride
    try:
        memory = map_pinned_memory(num_bytes)
    except MemoryError as error:
        raise ConfigError(f"tiers: mapping {num_bytes} bytes of host memory for copies of blocks failed") from error
    return GpuCopies(CopyStream(storage.pools[0].blocks.device), StagingSlots(memory, payload_bytes))


def _do_not_stage(payload: memoryview) -> None:
    """Do nothing: blocks of the host tier are copied to a GPU directly, not through a staging buffer."""


def tier_shares(
    quotas: Mapping[str, Quota], default_quota: Quota | None, num_blocks: int
) -> Callable[[str], TierShares]:
    """Return a function that returns the shares of a tenant in each tier: the same fractions as on the device.

    Args:
        quotas: quotas of the tenants that have one.
        default_quota: quota of all other tenants; None for no limits.
        num_blocks: blocks of the pool.
    """

    def shares_of(quota: Quota | None) -> TierShares:
        if quota is None:
            return TierShares()
        return TierShares(
            floor=quota.floor_blocks / num_blocks,
            ceiling=None if quota.ceiling_blocks is None else quota.ceiling_blocks / num_blocks,
            retained=1.0 if quota.max_retained_blocks is None else quota.max_retained_blocks / num_blocks,
        )

    shares = {tenant: shares_of(quota) for tenant, quota in quotas.items()}
    default_shares = shares_of(default_quota)
    return lambda tenant: shares.get(tenant, default_shares)


def _make_tier_index(
    name: str,
    backend: StoreBackend,
    block_format: BlockFormat,
    num_known_blocks: int,
    shares_of: Callable[[str], TierShares],
    retained_share: float,
    num_pool_blocks: int,
    ledger: TenantLedger | None,
) -> TierIndex:
    """Return the index of a tier. A store that states no capacity is taken for one that servers share."""
    num_blocks = backend.size().max_objects
    if num_blocks is None:
        if type(backend).purge is StoreBackend.purge:
            raise ConfigError(f"store {name}: a store without `max_objects` must implement `purge`")
        _log.info("tier %s is shared with servers whose blocks have the format %s", name, block_format.fingerprint)
        num_keys = max(num_known_blocks, num_pool_blocks)  # so that the blocks of any prompt fit
        return SharedTierIndex(name, num_keys, ledger=ledger)
    if num_blocks < num_pool_blocks // _SMALL_TIER_DIVISOR:
        _log.warning(
            "tier %s has room for only %d blocks, and the pool for %d, so it keeps few of the evicted blocks: all "
            "blocks of the pool take %d bytes",
            name,
            num_blocks,
            num_pool_blocks,
            num_pool_blocks * block_format.payload_bytes,
        )
    else:
        _log.info("tier %s has room for %d blocks", name, num_blocks)
    return TierIndex(name, num_blocks, shares_of=shares_of, retained_share=retained_share, ledger=ledger)


def _identify_computation(runner: Runner, mover: BlockMover) -> str:
    """Identify everything besides the model that the last bits of K and V depend on: device, libraries and kernels.

    Libraries choose kernels and numbers of threads at load time, which affects the last bits. Therefore a prompt is
    computed, and the digest of its K and V is part of the result. The contents of the blocks that it uses are lost.
    """
    storage = runner.storage
    device = runner.model.device
    num_blocks = min(_PROBE_BLOCKS, storage.num_blocks)
    num_tokens = num_blocks * storage.block_size
    tokens = (np.arange(num_tokens) * _PROBE_STRIDE % runner.model.vocab_size).astype("<u4").tobytes()
    block_ids = np.arange(num_blocks, dtype=np.int32)
    part_ids = block_ids if storage.part_pools else None  # every pool of parts has at least `_PROBE_BLOCKS`
    runner.run([Chunk(tokens, 0, num_tokens, block_ids, None, wants_logits=True, part_ids=part_ids)])
    digest = blake2b(digest_size=16)
    ids = block_ids.tolist()
    blocks = mover.read(ids, None if part_ids is None else ids)
    blocks.copy.wait()
    for payload in blocks.payloads:
        digest.update(payload)
    return f"{device.type}, torch {torch.__version__}, {digest.hexdigest()}"
