"""Decides whether windowed layers have a pool of their own, and how large it is."""

from __future__ import annotations

import logging
from typing import NamedTuple

from radixkv.cache.part_memory import PartMemory
from radixkv.cache.window_pool import Reach, WindowPool, min_parts
from radixkv.cache.windowed_layers import WindowedLayers
from radixkv.config import MAX_BLOCKS, Config, EngineConfig
from radixkv.errors import ConfigError
from radixkv.model.model import Model
from radixkv.storage.device_pool import KVShape, KVStorage, divided_layers
from radixkv.storage.kv_layout import layer_shares
from radixkv.storage.layer_groups import LayerGroups

_log = logging.getLogger(__name__)


class Division(NamedTuple):
    """The pools of a model's layers.

    Attributes:
        groups: the layers of both pools; None for one pool.
        num_blocks: blocks of the pool for all other layers, or of the only pool; trees and leases refer to these.
        num_parts: blocks of the windowed layers' pool; 0 for one pool.
        num_dedicated_parts: parts that have memory of their own, if the other parts share memory with blocks; None if
            all parts have memory of their own.
    """

    groups: LayerGroups | None
    num_blocks: int
    num_parts: int = 0
    num_dedicated_parts: int | None = None


def divide_layers(config: Config, limits: EngineConfig, model: Model, num_blocks: int) -> Division:
    """Choose the pools of a model's layers.

    Both pools together take the memory of one. The border between them moves with the traffic, unless
    `cache.windowed_tokens` fixes it. If the model has windowed layers and they keep the K/V of every token, the reason
    is logged, unless it is `cache.windowed_tokens = 0`.

    Args:
        config: the configuration.
        limits: the configuration of the engine for the model's device.
        model: the weights.
        num_blocks: blocks that one pool of all layers would have.

    Raises:
        ConfigError: `cache.windowed_tokens` cannot be applied.
    """
    windowed_tokens = config.cache.windowed_tokens
    groups = LayerGroups.of(model.windows, model.max_tokens)
    if windowed_tokens == 0 or (windowed_tokens is None and not groups.num_windowed):
        return Division(None, num_blocks)
    if reason := _reason_against(config, model, groups):
        if windowed_tokens is not None:
            raise ConfigError(f"cache.windowed_tokens: expected none, or 0, for {reason}, got {windowed_tokens}")
        _log.info("windowed layers keep K/V of every token, because of %s", reason)
        return Division(None, num_blocks)
    token_bytes = _token_bytes(model.kv_shape.stored_as(config.cache.kv_dtype), groups)
    num_dedicated_parts = _num_dedicated_parts(config, limits, groups, num_blocks if not token_bytes.other else None)
    num_divided_blocks = _num_blocks(token_bytes, num_blocks, num_dedicated_parts)
    if num_dedicated_parts > num_blocks or num_dedicated_parts >= num_divided_blocks:
        _log.info(
            "windowed layers keep K/V of every token: a pool of their own would need %d blocks, which saves no memory",
            num_dedicated_parts,
        )
        return Division(None, num_blocks)
    if windowed_tokens is None:
        return Division(groups, num_divided_blocks, num_blocks, num_dedicated_parts)
    return Division(groups, num_divided_blocks, num_dedicated_parts)


class _TokenBytes(NamedTuple):
    """Bytes per token in windowed layers, and in the other layers."""

    windowed: int
    other: int


def _token_bytes(shape: KVShape, groups: LayerGroups) -> _TokenBytes:
    other, windowed = divided_layers(shape, groups)
    return _TokenBytes(
        sum(shape.of(layers).token_bytes for layers in windowed), sum(shape.of(layers).token_bytes for layers in other)
    )


def _num_dedicated_parts(config: Config, limits: EngineConfig, groups: LayerGroups, lower_bound: int | None) -> int:
    """Return the number of parts with memory of their own: `cache.windowed_tokens`, or what one request needs.

    In the second case, the number is at least `lower_bound`.
    """
    block_size, windowed_tokens = config.cache.block_size, config.cache.windowed_tokens
    min_dedicated_parts = min_parts(Reach.of_window(groups.window), block_size, limits.step_tokens)
    if windowed_tokens is None:
        return min_dedicated_parts if lower_bound is None else max(min_dedicated_parts, lower_bound)
    if windowed_tokens // block_size < min_dedicated_parts:
        raise ConfigError(
            f"cache.windowed_tokens: expected at least {min_dedicated_parts * block_size}, for a window of "
            f"{groups.window} tokens and steps of {limits.step_tokens}, got {windowed_tokens}"
        )
    return windowed_tokens // block_size


def _num_blocks(token_bytes: _TokenBytes, num_blocks: int, num_parts: int) -> int:
    """Return how many blocks of the other layers fit, next to the parts, into the memory of `num_blocks` blocks."""
    if not token_bytes.other:  # all layers are windowed, so blocks take no memory
        return min(int(layer_shares(*token_bytes).other * num_blocks), MAX_BLOCKS)
    # The memory that the parts leave, divided by the number of tokens of a block.
    free_bytes = num_blocks * sum(token_bytes) - num_parts * token_bytes.windowed
    return min(max(0, free_bytes // token_bytes.other), MAX_BLOCKS)


def windows_of(storage: KVStorage, step_tokens: int) -> WindowedLayers:
    """Return the pools that a storage has for windowed layers.

    Args:
        storage: the K/V memory.
        step_tokens: maximum number of tokens of a step.
    """
    if storage.groups is None:
        return WindowedLayers()
    reach = Reach.of_window(storage.groups.window)
    memory = None
    if storage.num_dedicated_parts is not None:
        memory = PartMemory(storage.part_bytes, storage.block_bytes, storage.num_dedicated_parts)
    pool = WindowPool(storage.num_blocks, storage.num_parts, storage.block_size, reach, step_tokens, memory)
    return WindowedLayers([pool])


def _reason_against(config: Config, model: Model, groups: LayerGroups) -> str:
    """Return the reason why all layers must be in one pool; empty if they need not be."""
    conditions = {
        "a model without a sliding window that is shorter than its longest sequence": not groups.num_windowed,
        f"a model on {model.device.type}, whose kernels take one block table": model.device.type != "cpu",
        "a model with layers that keep states": model.state_shape is not None,
        "transfers of K/V, which send whole blocks": config.transfer.sends or bool(config.kv_sources),
    }
    return next((reason for reason, holds in conditions.items() if holds), "")
