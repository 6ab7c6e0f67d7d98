"""Decides whether windowed layers have a pool of their own, and how large it is."""

from __future__ import annotations

import logging

from radixkv.cache.parts.part_groups import PartGroups
from radixkv.cache.parts.part_pool import PartPool, least_parts
from radixkv.cache.parts.reach import Reach
from radixkv.cache.states.state_slots import StateSlots
from radixkv.config import Config, EngineConfig
from radixkv.errors import ConfigError
from radixkv.model.model import Model
from radixkv.storage.device_pool import KVStorage
from radixkv.storage.kv_layout import windowed_share
from radixkv.storage.layer_groups import LayerGroups

_log = logging.getLogger(__name__)


def divide_layers(
    config: Config, limits: EngineConfig, model: Model, num_blocks: int
) -> tuple[LayerGroups | None, int]:
    """Choose the pools of a model's layers. Logs what windowed layers hold, and why they hold everything if they do.

    Args:
        config: the configuration.
        limits: its engine's, on the model's device.
        model: the weights.
        num_blocks: blocks that trees and leases share.

    Returns:
        The layers of both pools, and the blocks of the windowed layers' pool; None and 0 for one pool.

    Raises:
        ConfigError: `cache.windowed_tokens` asks for what can't be.
    """
    wanted = config.cache.windowed_tokens
    groups = LayerGroups.of(model.windows, model.max_tokens)
    if wanted == 0 or (wanted is None and not groups.num_windowed):
        return None, 0
    if reason := _reason_against(config, model, groups):
        if wanted is not None:
            raise ConfigError(f"cache.windowed_tokens: expected none, or 0, for {reason}, got {wanted}")
        _log.info("windowed layers hold every token, because of %s", reason)
        return None, 0
    size = config.cache.block_size
    least = least_parts(Reach.of_window(groups.window), size, limits.step_tokens)
    num_parts = int(num_blocks * windowed_share(groups.window)) if wanted is None else wanted // size
    if wanted is None:
        num_parts = max(num_parts, 2 * least)  # so that more than one request runs
    elif num_parts < least:
        raise ConfigError(
            f"cache.windowed_tokens: expected at least {least * size}, for a window of {groups.window} tokens and "
            f"steps of {limits.step_tokens}, got {wanted}"
        )
    if num_parts >= num_blocks:
        _log.info("windowed layers hold every token: %d blocks of theirs would be no fewer than all", num_parts)
        return None, 0
    return groups, num_parts


def part_groups(storage: KVStorage, step_tokens: int, states: StateSlots | None = None) -> PartGroups:
    """Return the books of the parts that a storage has, and of states.

    Args:
        storage: the K/V memory.
        step_tokens: tokens of a step at most.
        states: snapshots of states; None for a model without.
    """
    if storage.groups is None:
        return PartGroups(states=states)
    reach = Reach.of_window(storage.groups.window)
    pool = PartPool(storage.num_blocks, storage.num_parts, storage.block_size, reach, step_tokens)
    return PartGroups([pool], states)


def _reason_against(config: Config, model: Model, groups: LayerGroups) -> str:
    """Return what needs all layers in one pool; empty if nothing does."""
    tiers = config.tiers
    has_tiers = any((tiers.host_bytes, tiers.disk_path, tiers.redis_url, tiers.mooncake_master, config.stores))
    reasons = {
        "a model without a sliding window that hides anything": not groups.num_windowed,
        f"a model on {model.device.type}, whose kernels take one table of blocks": model.device.type != "cpu",
        "a model with layers that keep states": model.state_shape is not None,
        "tiers, which save whole blocks": has_tiers,
        "transfers of K/V, which send whole blocks": config.transfer.sends or bool(config.kv_sources),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
