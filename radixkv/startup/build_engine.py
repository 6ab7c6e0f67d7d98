"""Makes an engine of a configuration: model, pool, cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from radixkv.api.limits import longest_sequence
from radixkv.cache.policies.by_name import make_policy
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.tenants import Quota
from radixkv.compute.graphs.recorder import GraphRecorder
from radixkv.compute.runner import Runner
from radixkv.config import Config, TenantConfig
from radixkv.engine.engine import Engine
from radixkv.engine.observer import Observer
from radixkv.errors import ConfigError
from radixkv.model.attention.interface import AttentionKernels, AttentionUse
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.loading import load_model
from radixkv.model.model import Model
from radixkv.startup.attention_choice import choose_attention
from radixkv.startup.attention_trial import try_attention
from radixkv.startup.graph_check import drop_wrong_graphs
from radixkv.startup.model_check import check_model
from radixkv.startup.pool_size import choose_num_blocks
from radixkv.storage.device_pool import KVShape, KVStorage


def build_engine(config: Config, observers: Iterable[Observer] = ()) -> Engine:
    """Load the model, check it, allocate the pool; the engine still has to be started.

    Raises:
        ConfigError: the model can't be loaded or served, or the pool does not fit into memory.
    """
    model = load_model(config.model)
    kv_shape = model.kv_shape.stored_as(config.cache.kv_dtype)
    kernels = attention_kernels(model, kv_shape, config.cache.block_size)
    try:
        check_model(model, kernels, config.cache.block_size, kv_shape)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"model.path: expected a model that leaves {model.device} memory for a short prompt, got {model.name}"
        ) from error
    recorder = GraphRecorder(model, kernels, config.engine)
    num_blocks = choose_num_blocks(model, kernels, kv_shape, config.cache, config.engine, recorder)
    _require_bounds(config, num_blocks)
    storage = KVStorage(num_blocks, config.cache.block_size, kv_shape, model.device)
    cache = PrefixCache(
        storage.num_blocks,
        storage.block_size,
        policy=make_policy(config.cache.policy, storage.num_blocks),
        quotas={tenant: _quota(bounds, storage.block_size) for tenant, bounds in config.tenants.items()},
        max_retained_blocks=int(config.cache.max_retained_share * storage.num_blocks),
        evicted_prefixes=config.cache.evicted_prefixes,
    )
    runner = make_runner(model, storage, kernels, recorder)
    weights = {tenant: bounds.weight for tenant, bounds in config.tenants.items()}
    return Engine(runner, cache, config.engine, weights=weights, observers=observers)


def make_runner(model: Model, storage: KVStorage, kernels: AttentionKernels, recorder: GraphRecorder) -> Runner:
    """Record short steps, if there are CUDA graphs, and keep those that answer right. What is in the pool is lost.

    Args:
        model: as loaded.
        storage: the K/V memory.
        kernels: what works on it.
        recorder: of the same model and kernels.
    """
    pool_tokens = storage.num_blocks * storage.block_size
    max_sequence_tokens = longest_sequence(pool_tokens, model.max_tokens)
    graphs = recorder.record(storage, max_sequence_tokens)
    if graphs is not None:
        drop_wrong_graphs(graphs, model, storage, kernels, max_sequence_tokens)
    return Runner(model, storage, kernels, graphs)


def _require_bounds(config: Config, num_blocks: int) -> None:
    """Refuse what tenants can't have in whole blocks, in a pool whose size may be known only now."""
    quotas = {name: _quota(bounds, config.cache.block_size) for name, bounds in config.tenants.items()}
    for name, quota in quotas.items():
        least = max(1, quota.floor_blocks)
        if quota.ceiling_blocks is not None and quota.ceiling_blocks < least:
            raise ConfigError(
                f"tenants.{name}.ceiling_tokens: expected room for at least {least} whole blocks of "
                f"{config.cache.block_size} tokens, got {config.tenants[name].ceiling_tokens}"
            )
    floors = sum(quota.floor_blocks for quota in quotas.values())
    if floors > num_blocks:
        raise ConfigError(
            f"tenants.*.floor_tokens: expected at most the pool's {num_blocks} blocks in all, got {floors}"
        )


def _quota(bounds: TenantConfig, block_size: int) -> Quota:
    ceiling, retained = bounds.ceiling_tokens, bounds.max_retained_tokens
    return Quota(
        floor_blocks=-(-bounds.floor_tokens // block_size),
        ceiling_blocks=None if ceiling is None else ceiling // block_size,
        max_retained_blocks=None if retained is None else retained // block_size,
    )


def attention_kernels(
    model: Model,
    kv_shape: KVShape,
    block_size: int,
    attempt: Callable[[str, AttentionUse], None] = try_attention,
) -> AttentionKernels:
    """What works on the pool, where the model runs. On a GPU a short trial decides, see `choose_attention`.

    Args:
        model: that will be served.
        kv_shape: its K and V as the pool stores them.
        block_size: tokens a block.
        attempt: tries kernels by name; see `try_attention`.
    """
    if model.device.type != "cuda":
        return TorchKernels()
    from radixkv.model.attention.triton_kernels import candidates  # Triton is not there on every platform

    use = model.attention_use(kv_shape, block_size)
    kernels = candidates(use, torch.cuda.get_device_capability(model.device))
    return choose_attention(kernels, lambda name: attempt(name, use)).for_service()
