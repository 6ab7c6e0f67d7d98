"""Builds the engine that a configuration describes: model, attention kernels, pool, cache, CUDA graphs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import cast

import torch

from radixkv.api.limits import longest_sequence
from radixkv.cache.changes import Listener
from radixkv.cache.policies import make_policy
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.sessions import MAX_SESSION_PROMPT_BYTES
from radixkv.cache.tenant_ledger import TenantLedger
from radixkv.cache.tenants import Quota
from radixkv.compute.graphs.capturer import GraphCapturer
from radixkv.compute.runner import Runner
from radixkv.config import Config, TenantConfig
from radixkv.doctor.miss_profiler import MissProfiler
from radixkv.engine.engine import Engine
from radixkv.engine.miss_feed import MissFeed
from radixkv.engine.observer import Observer
from radixkv.engine.page_reclaimer import PageReclaimer
from radixkv.engine.statement_feed import StatementFeed
from radixkv.errors import ConfigError
from radixkv.events.block_identity import Identities
from radixkv.events.event_log import EventLog
from radixkv.events.tree_feed import MAX_STEP_BLOCKS, TreeFeed
from radixkv.invocation import InvocationMarks
from radixkv.model.attention.interface import AttentionKernels, PlanningKernels
from radixkv.model.loading import load_model
from radixkv.model.model import Model
from radixkv.offload.load_or_compute import LoadOrCompute
from radixkv.scheduling.rate_limiter import RateLimiter
from radixkv.startup.adapters import adapter_source, load_adapters
from radixkv.startup.attention_choice import choose_attention_kernels
from radixkv.startup.first_launches import launch_all
from radixkv.startup.graph_check import drop_wrong_graphs
from radixkv.startup.malloc import give_back_freed_memory, keep_freed_memory, use_huge_pages
from radixkv.startup.mkl import fix_summation_order
from radixkv.startup.model_check import check_model
from radixkv.startup.openmp_threads import end_openmp_threads
from radixkv.startup.pool_size import available_bytes, choose_num_blocks, reserve_step_memory
from radixkv.startup.progress import StartProgress
from radixkv.startup.recurrent_state_slots import make_state_slots
from radixkv.startup.requirements import require_usable
from radixkv.startup.thread_count import choose_thread_count
from radixkv.startup.tiers import Transfers, open_stores, tier_shares
from radixkv.startup.windowed_layers import Division, divide_layers, windows_of
from radixkv.statements.day_files import DayFiles
from radixkv.statements.quota_shadow import QuotaShadows
from radixkv.statements.statement_book import StatementBook
from radixkv.storage.device_pool import KVShape, KVStorage

_log = logging.getLogger(__name__)


def build_engine(
    config: Config,
    observers: Iterable[Observer] = (),
    events_key: bytes | None = None,
    load_or_compute: LoadOrCompute | None = None,
    progress: StartProgress | None = None,
    open_day_files: Callable[[str], DayFiles] = DayFiles.open,
) -> Engine:
    """Load and check the model, allocate the pool, and build the engine. Logs the start and the result of each phase.

    From then on, the process keeps freed memory and requests huge pages: see `radixkv.startup.malloc`.

    Args:
        config: the configuration.
        observers: are notified of requests and steps.
        events_key: key that derives the names of namespaces in events, 16 to 64 bytes; None for a random one.
        load_or_compute: decides between loading from stores and computing; None to decide by measured times.
        progress: the progress of the start; None to log only the beginning of each phase.
        open_day_files: opens `server.statement_path`, if it is set.

    Returns:
        An engine that is not started yet.

    Raises:
        ConfigError: the model, an adapter or a file cannot be used, or the pool does not fit into memory.
        StoreUnavailable: the present day of the statements cannot be read.
    """
    progress = progress or StartProgress()
    require_usable(config)
    if config.model.exactness == "exact":
        fix_summation_order(os.environ)  # before MKL is called for the first time
    _set_threads(config.model.threads)
    quotas = {name: _quota(f"tenants.{name}", bounds, config) for name, bounds in config.tenants.items()}
    default_quota = _quota("default_tenant", config.default_tenant, config)
    with contextlib.ExitStack() as cleanup:  # closes the files if the start fails, so that the process can try again
        ledger, statements, statement_feed = _open_statements(config, quotas, open_day_files, cleanup)
        if statement_feed is not None:
            observers = (*observers, statement_feed)
        model = _load_model(config, progress)
        kv_shape = model.kv_shape.stored_as(config.cache.kv_dtype)
        progress.begin("checking attention and the model")
        kernels = _choose_kernels(model, kv_shape, config.cache.block_size, progress)
        limits = config.engine.on(model.device.type)
        progress.begin("allocating the pool of K/V blocks")
        capturer = GraphCapturer(model, kernels, limits)
        num_blocks_in_one_pool = choose_num_blocks(model, kernels, kv_shape, config.cache, limits, capturer)
        state_slots = make_state_slots(model, kv_shape, num_blocks_in_one_pool, config, limits)
        division = divide_layers(config, limits, model, num_blocks_in_one_pool)
        num_blocks = division.num_blocks
        _require_floors(quotas, num_blocks)
        storage = _allocate_pool(model, kernels, kv_shape, config.cache.block_size, division, progress)
        marks = InvocationMarks()
        events = _make_tree_feed(config, limits.step_tokens, marks, events_key)
        num_state_slots = 0 if state_slots is None else state_slots.num_slots
        runner = make_runner(model, storage, kernels, capturer, num_state_slots, progress)
        if model.device.type == "cuda":
            reserve_step_memory(model, kernels, storage, limits)
        progress.begin("opening the stores of blocks, and building the engine")
        has_transfers = config.transfer.sends or bool(config.kv_sources)
        transfer = Transfers(config.transfer, config.kv_sources) if has_transfers else None
        windows = windows_of(storage, limits.step_tokens)
        max_retained_blocks = int(config.cache.max_retained_share * num_blocks)
        stores = open_stores(
            config.tiers,
            runner,
            marks,
            config.stores,
            transfer,
            shares_of=tier_shares(quotas, default_quota, num_blocks),
            retained_share=max_retained_blocks / num_blocks,
            part_of=windows.pools[-1].part_of if windows.pools else None,
            ledger=ledger,
        )
        listeners: list[Listener] = [events]
        miss_profiler = miss_feed = None
        if config.server.diagnosed_share and config.transfer.role != "decode":  # prefill replicas profile the prompts
            miss_profiler = MissProfiler(config.server.diagnosed_share)
            miss_feed = MissFeed(miss_profiler)
            observers = (*observers, miss_feed)
            listeners.append(miss_feed)
        if stores is not None:
            listeners.append(stores.index)
            events.follow(stores.index)
        cache = PrefixCache(
            num_blocks,
            config.cache.block_size,
            policy=make_policy(config.cache.policy, num_blocks_in_one_pool),
            quotas=quotas,
            default_quota=default_quota,
            max_retained_blocks=max_retained_blocks,
            max_held_blocks=int(config.cache.max_held_share * num_blocks),
            max_public_blocks=int(config.cache.max_public_share * num_blocks),
            probation_share=config.cache.probation_share,
            max_evicted_prefixes=config.cache.evicted_prefixes,
            # Prompts of sessions are kept for loading ahead, which needs tiers.
            max_session_prompt_bytes=0 if stores is None else MAX_SESSION_PROMPT_BYTES,
            listeners=listeners,
            marks=marks,
            windows=windows,
            state_slots=state_slots,
            ledger=ledger,
        )
        if miss_feed is not None:
            miss_feed.cache = cache
        if windows.shares_memory:
            observers = (*observers, PageReclaimer(storage, cache.pool, windows.pools[-1]))
        weights = {tenant: bounds.weight for tenant, bounds in config.tenants.items()}
        rates = RateLimiter(config.tenants, config.default_tenant)
        engine = Engine(
            runner,
            cache,
            limits,
            weights=weights,
            observers=observers,
            events=events,
            rates=rates,
            adapters=adapter_source(config, model),
            open_offload=None if stores is None else partial(stores.connect, cache, load_or_compute),
            statements=statements,
            misses=miss_profiler,
        )
        cleanup.pop_all()  # from here on, `Engine.stop` closes the statements
        cleanup.callback(engine.stop)
        load_adapters(config.adapters, engine.adapters, progress.report)
        end_openmp_threads()
        cleanup.pop_all()  # the start has succeeded, so the engine is not stopped
    return engine


def _set_threads(configured: int | None) -> None:
    threads = choose_thread_count(configured)
    if threads.count != torch.get_num_threads():
        torch.set_num_threads(threads.count)
    _log.info("computing with %d %s: %s", threads.count, "thread" if threads.count == 1 else "threads", threads.reason)


def _load_model(config: Config, progress: StartProgress) -> Model:
    use_huge_pages()
    keep_freed_memory()  # before loading, which copies each weight of a model on a CPU
    progress.begin("loading the model")
    model = load_model(dataclasses.replace(config.model, max_adapters=config.max_adapters), progress.report)
    give_back_freed_memory()  # the memory of the weights as they were before packing
    dtype = str(model.module.dtype).removeprefix("torch.")
    mode = "exact" if model.is_exact else "fast"
    progress.note(f"model {model.name} on {model.device} in {dtype}, {mode} mode")
    if model.device.type == "cpu":
        num_threads = torch.get_num_threads()
        progress.note("1 thread" if num_threads == 1 else f"{num_threads} threads")
    return model


def _allocate_pool(
    model: Model,
    kernels: AttentionKernels,
    kv_shape: KVShape,
    block_size: int,
    division: Division,
    progress: StartProgress,
) -> KVStorage:
    storage = KVStorage(
        division.num_blocks,
        block_size,
        kv_shape,
        model.device,
        is_by_layer=kernels.prefers_layer_major_pool,
        groups=division.groups,
        num_parts=division.num_parts,
        num_dedicated_parts=division.num_dedicated_parts,
    )
    _log_pool(storage, model.device)
    progress.note(
        f"pool of {storage.num_blocks * block_size} tokens in blocks of {block_size} ({storage.num_bytes / 1e6:.1f} MB)"
    )
    return storage


def _log_pool(storage: KVStorage, device: torch.device) -> None:
    num_blocks, num_parts, groups = storage.num_blocks, storage.num_parts, storage.groups
    _log.info(
        "allocated a pool of %d blocks of %d tokens: %.1f MB in %s on %s",
        num_blocks,
        storage.block_size,
        storage.num_bytes / 1e6,
        storage.kv_dtype,
        device,
    )
    if groups is not None:
        # If both pools share memory, the numbers depend on the traffic.
        at_most = "" if storage.num_dedicated_parts is None else "at most "
        _log.info(
            "%d of %d layers have windows of at most %d tokens: the pool holds %s%d tokens for them in %.1f MB, and "
            "%s%d tokens for the other layers in %.1f MB",
            groups.num_windowed,
            len(groups.are_windowed),
            groups.window,
            at_most,
            num_parts * storage.block_size,
            num_parts * storage.part_bytes / 1e6,
            at_most,
            num_blocks * storage.block_size,
            num_blocks * storage.block_bytes / 1e6,
        )
    available = available_bytes() if device.type == "cpu" else None
    if available is not None and available < storage.num_bytes:
        _log.warning(
            "only %.1f MB of memory are available for the pool, which takes its memory as it fills: lower "
            "cache.capacity_tokens",
            available / 1e6,
        )


def make_runner(
    model: Model,
    storage: KVStorage,
    kernels: AttentionKernels,
    capturer: GraphCapturer,
    num_state_slots: int = 0,
    progress: StartProgress | None = None,
) -> Runner:
    """Compile kernels, capture short steps as CUDA graphs if possible, and drop graphs with wrong results.

    The contents of the pool are lost.

    Args:
        model: the weights.
        storage: the K/V memory.
        kernels: the operations on the pool.
        capturer: captures steps of this model with these kernels.
        num_state_slots: see `Runner`.
        progress: the progress of the start; None for none.
    """
    progress = progress or StartProgress()
    start_s = time.perf_counter()
    max_sequence_tokens = longest_sequence(storage.num_blocks * storage.block_size, model.max_tokens)
    if model.device.type == "cuda":
        progress.begin("compiling kernels, and capturing steps as CUDA graphs")
        launch_all(model, storage, cast("PlanningKernels", kernels).variants(), max_sequence_tokens)
    graphs = capturer.capture(storage, max_sequence_tokens)
    if graphs is not None:
        progress.begin("checking the captured steps")
        drop_wrong_graphs(graphs, model, storage, kernels, max_sequence_tokens, progress.report)
        num_steps, took_s = len(graphs.shapes), time.perf_counter() - start_s
        _log.info("compiled kernels, captured and checked %d steps as CUDA graphs in %.1f s", num_steps, took_s)
    return Runner(model, storage, kernels, graphs, num_state_slots)


def _choose_kernels(model: Model, kv_shape: KVShape, block_size: int, progress: StartProgress) -> AttentionKernels:
    """Choose attention kernels, and refuse a model for which their results are wrong."""
    start_s = time.perf_counter()
    kernels = choose_attention_kernels(model, kv_shape, block_size, progress=progress)
    try:
        check_model(model, kernels, block_size, kv_shape, progress.report)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"model.path: expected a model that leaves {model.device} memory for a short prompt, got {model.name}"
        ) from error
    mode = "exact" if model.is_exact else "fast"
    _log.info("checked attention and model in %s mode in %.1f s", mode, time.perf_counter() - start_s)
    return kernels


def _open_statements(
    config: Config,
    quotas: Mapping[str, Quota],
    open_day_files: Callable[[str], DayFiles],
    cleanup: contextlib.ExitStack,
) -> tuple[TenantLedger | None, StatementBook | None, StatementFeed | None]:
    """Return the ledger, the statement book and the observer that feeds them; None without `server.statement_path`.

    The files and the quota shadows are added to `cleanup`, which closes them if the start fails.
    """
    path = config.server.statement_path
    if path is None:
        return None, None, None
    files = open_day_files(path)
    cleanup.callback(files.close)
    ledger = TenantLedger(config.cache.block_size, config.tenants, read_day=files.read)
    ceilings = {tenant: quota.ceiling_blocks for tenant, quota in quotas.items() if quota.ceiling_blocks is not None}
    shadows = QuotaShadows(ceilings, config.cache.block_size) if ceilings else None
    if shadows is not None:
        cleanup.callback(shadows.close)
    book = StatementBook(ledger, files, config.server.statement_interval_s, shadows)
    return ledger, book, StatementFeed(ledger, shadows)


def _make_tree_feed(config: Config, step_tokens: int, marks: InvocationMarks, events_key: bytes | None) -> TreeFeed:
    block_size = config.events.block_size
    return TreeFeed(
        EventLog(config.events.buffer_steps),
        block_size,
        config.cache.block_size,
        Identities(config.gateway.tenant, events_key),
        max(MAX_STEP_BLOCKS, 2 * step_tokens // block_size),
        marks,
    )


def _quota(path: str, bounds: TenantConfig, config: Config) -> Quota:
    """Convert the quota of a configuration section to whole blocks.

    Raises:
        ConfigError: the ceiling has no room for a block, or for the floor.
    """
    block_size = config.cache.block_size
    ceiling, retained, held = bounds.ceiling_tokens, bounds.max_retained_tokens, bounds.max_held_tokens
    quota = Quota(
        floor_blocks=-(-bounds.floor_tokens // block_size),
        ceiling_blocks=None if ceiling is None else ceiling // block_size,
        max_retained_blocks=None if retained is None else retained // block_size,
        max_held_blocks=None if held is None else held // block_size,
        uses_public_prefixes=bounds.uses_public_prefixes,
    )
    min_blocks = max(1, quota.floor_blocks)
    if quota.ceiling_blocks is not None and quota.ceiling_blocks < min_blocks:
        raise ConfigError(
            f"{path}.ceiling_tokens: expected room for at least {min_blocks} whole blocks of {block_size} tokens, "
            f"got {ceiling}"
        )
    return quota


def _require_floors(quotas: Mapping[str, Quota], num_blocks: int) -> None:
    """Refuse floors that together exceed the pool."""
    floors = sum(quota.floor_blocks for quota in quotas.values())
    if floors > num_blocks:
        raise ConfigError(
            f"tenants.*.floor_tokens: expected at most the pool's {num_blocks} blocks in all, got {floors}"
        )
