"""Sizes the memory for recurrent states, and refuses features that do not support models with such states yet."""

from __future__ import annotations

import logging

from radixkv.cache.recurrent_states import StateSlots
from radixkv.config import Config, EngineConfig
from radixkv.config.sections import STATE_SHARE
from radixkv.errors import ConfigError, UnsupportedModel
from radixkv.model.model import Model
from radixkv.storage.device_pool import KVShape

# Minimum number of snapshots if `cache.state_bytes` is not set. With `cache.state_bytes`, a warning is logged for a
# smaller number. A pool of fewer blocks has at most one snapshot per block.
_MIN_SNAPSHOTS = 64

_log = logging.getLogger(__name__)


def make_state_slots(
    model: Model, kv_shape: KVShape, num_blocks: int, config: Config, limits: EngineConfig
) -> StateSlots | None:
    """Return the slots for the recurrent states of a model; None for a model without them. Logs their number.

    Args:
        model: the model.
        kv_shape: the shape and format of K and V in the pool.
        num_blocks: blocks of the pool.
        config: the configuration, with the memory for snapshots in section `cache`.
        limits: the limits of the engine, among them the maximum number of running requests.

    Raises:
        UnsupportedModel: the configuration enables a feature that does not support states.
        ConfigError: the memory for snapshots has no room for a single snapshot.
    """
    shape, block_size = model.state_shape, config.cache.block_size
    if shape is None:
        return None
    _require_supported(model, config)
    state_bytes = config.cache.state_bytes
    if state_bytes is not None and 0 < state_bytes < shape.slot_bytes:
        raise ConfigError(
            f"cache.state_bytes: expected at least {shape.slot_bytes}, the bytes of one state, or 0 for no snapshots, "
            f"got {state_bytes}"
        )
    if state_bytes is None:
        kv_bytes = num_blocks * block_size * kv_shape.token_bytes
        num_snapshots = max(_MIN_SNAPSHOTS, int(STATE_SHARE * kv_bytes / shape.slot_bytes))
    else:
        num_snapshots = state_bytes // shape.slot_bytes
    num_snapshots = min(num_snapshots, num_blocks)  # a block has at most one snapshot
    num_requests = limits.max_running_requests
    _log.info(
        "allocated room for %d snapshots of states and for %d running requests: %.1f kB each, %.1f MB in all",
        num_snapshots,
        num_requests,
        shape.slot_bytes / 1e3,
        (num_snapshots + num_requests) * shape.slot_bytes / 1e6,
    )
    advised_snapshots = min(_MIN_SNAPSHOTS, num_blocks)
    if num_snapshots < advised_snapshots:
        _log.warning(
            "cache.state_bytes has room for %d snapshots of states, and each cached prompt needs one to be reused: "
            "%d snapshots need %d bytes",
            num_snapshots,
            advised_snapshots,
            advised_snapshots * shape.slot_bytes,
        )
    return StateSlots(num_blocks, block_size, num_requests, num_snapshots, config.cache.state_every_tokens)


def _require_supported(model: Model, config: Config) -> None:
    """Refuse tiers, shared stores and transfer: they keep K/V without states, so all tokens would be computed again."""
    tiers, transfer = config.tiers, config.transfer
    configured = {
        "tiers.host_bytes": tiers.host_bytes,
        "tiers.disk_path": tiers.disk_path,
        "tiers.redis_url": tiers.redis_url,
        "tiers.mooncake_master": tiers.mooncake_master,
        "stores": config.stores,
        "transfer.serve": transfer.serve,
        "transfer.role": transfer.role != "both",
        "kv_sources": config.kv_sources,
    }
    keys = [key for key, value in configured.items() if value]
    if keys:
        raise UnsupportedModel(
            f"{keys[0]}: expected no value for {type(model.module).__name__}, which keeps a state for each sequence: "
            "stores and other servers only have K and V"
        )
