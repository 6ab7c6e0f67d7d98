"""Groups of `radixkv plan`, each a short table for people and flat fields for scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from radixkv.config.sections import STATE_SHARE
from radixkv.planning.plan import (
    GB,
    GIB,
    BlockUse,
    DecodingCost,
    DeviceMemory,
    PrefixSharing,
    WindowedUse,
    load_us,
    recompute_us,
)
from radixkv.service.cli.terminal import aligned
from radixkv.storage.kv_layout import HeadKV, KVFormat, KVLayout, LatentKV, MixedKV, layer_shares

_BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_DECIMAL = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


@dataclass(frozen=True, slots=True)
class Group:
    """One subject of a plan.

    Attributes:
        title: the first line of its table.
        rows: the table's cells, row by row.
        fields: the values behind the cells and further ones, under names that no other group uses.
    """

    title: str
    rows: Sequence[tuple[str, ...]]
    fields: Mapping[str, int | float | str | bool | None] = field(default_factory=dict)


def text_of(groups: Sequence[Group]) -> str:
    """Return the groups one below the other, with columns aligned in each."""
    return "\n\n".join("\n".join([group.title, *(f"  {line}" for line in aligned(group.rows))]) for group in groups)


def json_of(groups: Sequence[Group]) -> str:
    """Return the fields of all groups as one flat indented JSON object."""
    return json.dumps({name: value for group in groups for name, value in group.fields.items()}, indent=2)


def token_group(layout: KVLayout, kv_format: KVFormat, tensor_parallel: int) -> Group:
    """Return the bytes of a token."""
    token_bytes = layout.token_bytes(kv_format)
    rank_token_bytes = layout.rank_token_bytes(kv_format, tensor_parallel)
    scales = ", a float32 scale a vector" if kv_format.has_scales else ""
    latent = layout if isinstance(layout, LatentKV) else None
    heads = layout.other if isinstance(layout, MixedKV) else layout if isinstance(layout, HeadKV) else None
    rows = [
        ("stored", f"{layout}, {kv_format.name}{scales}"),
        ("a token", f"{token_bytes:,} bytes, {_size(token_bytes)}"),
        ("on a rank", f"{rank_token_bytes:,} bytes, {_size(rank_token_bytes)}, tp {tensor_parallel}"),
    ]
    fields = {
        "num_layers": layout.num_layers,
        "num_query_heads": None if heads is None else heads.num_query_heads,
        "num_kv_heads": None if heads is None else heads.num_kv_heads,
        "head_dim": None if heads is None else heads.head_dim,
        "mla_rank": None if latent is None else latent.rank,
        "rope_dim": None if latent is None else latent.rope_dim,
        "dtype": kv_format.name,
        "has_scales": kv_format.has_scales,
        "tp": tensor_parallel,
        "token_bytes": token_bytes,
        "rank_token_bytes": rank_token_bytes,
    }
    return Group("bytes a token", rows, fields)


def cache_group(batch: int, context_tokens: int, token_bytes: int, rank_token_bytes: int) -> Group:
    """Return the K/V of a batch of sequences that share nothing and fill their last block."""
    sequence_bytes = context_tokens * token_bytes
    cache_bytes = batch * sequence_bytes
    rank_cache_bytes = batch * context_tokens * rank_token_bytes
    rows = [
        ("a sequence", f"{context_tokens:,} tokens, {_size(sequence_bytes)}"),
        ("the batch", f"{batch:,} sequences, {cache_bytes:,} bytes, {_size(cache_bytes)}"),
        ("on a rank", f"{rank_cache_bytes:,} bytes, {_size(rank_cache_bytes)}"),
    ]
    fields = {
        "batch": batch,
        "context_tokens": context_tokens,
        "sequence_bytes": sequence_bytes,
        "sequence_gib": sequence_bytes / GIB,
        "cache_bytes": cache_bytes,
        "cache_gib": cache_bytes / GIB,
        "cache_gb": cache_bytes / GB,
        "rank_cache_bytes": rank_cache_bytes,
        "rank_cache_gib": rank_cache_bytes / GIB,
        "rank_cache_gb": rank_cache_bytes / GB,
    }
    return Group("cache size", rows, fields)


def state_group(state_bytes: int, batch: int, cache_bytes: int) -> Group:
    """Return the memory of states: of a batch of running sequences, and of snapshots beside their K/V."""
    batch_bytes, snapshot_bytes = batch * state_bytes, int(STATE_SHARE * cache_bytes)
    rows = [
        ("a state", f"{state_bytes:,} bytes, {_size(state_bytes)}"),
        ("the batch", f"{batch:,} running sequences, {_size(batch_bytes)}"),
        ("snapshots", f"{snapshot_bytes // state_bytes:,}, {_size(snapshot_bytes)}, cache.state_bytes by default"),
    ]
    fields = {
        "state_bytes": state_bytes,
        "batch_state_bytes": batch_bytes,
        "snapshot_bytes": snapshot_bytes,
        "snapshots": snapshot_bytes // state_bytes,
    }
    return Group("states of sequences", rows, fields)


def fit_group(
    device: DeviceMemory, user_bytes: int, block_size: int, rank_token_bytes: int, state_bytes: int = 0
) -> Group:
    """Return the users, and the tokens of a block pool, that fit on one device beside the weights.

    A user has a state of `state_bytes`, and snapshots take a share of what K/V take.
    """
    users = device.users(user_bytes)
    kv_bytes = device.kv_bytes if not state_bytes else int((device.kv_bytes - users * state_bytes) / (1 + STATE_SHARE))
    capacity_tokens = kv_bytes // (block_size * rank_token_bytes) * block_size
    missing_bytes = device.weights_bytes + device.overhead_bytes - device.total_bytes
    shortfall = f", {_size(missing_bytes)} too little for the rest" if missing_bytes > 0 else ""
    rows = [
        ("memory", _size(device.total_bytes)),
        ("  weights", _size(device.weights_bytes)),
        ("  overhead", _size(device.overhead_bytes)),
        ("  left for K/V", _size(device.kv_bytes) + shortfall),
        ("a user", _size(user_bytes)),
        ("users", f"{users:,}"),
        ("cache.capacity_tokens", f"{capacity_tokens:,}"),
    ]
    fields = {
        "memory_bytes": device.total_bytes,
        "rank_weights_bytes": device.weights_bytes,
        "overhead_bytes": device.overhead_bytes,
        "kv_memory_bytes": device.kv_bytes,
        "user_bytes": user_bytes,
        "users": users,
        "capacity_tokens": capacity_tokens,
    }
    return Group("who fits on one device", rows, fields)


def kinds_group(kinds: Mapping[str, KVLayout], own: KVLayout, kv_format: KVFormat, num_tokens: int) -> Group:
    """Compare the model with each kind of attention; `own` marks the one that it has."""
    rows: list[tuple[str, ...]] = [("", "stored a layer", "bytes a token", "cache")]
    fields: dict[str, int | float] = {}
    for name, layout in kinds.items():
        if isinstance(layout, HeadKV):
            stored = f"2 x {layout.num_kv_heads} x {layout.head_dim}"
        else:
            assert isinstance(layout, LatentKV), "no kind has two shapes"
            stored = f"{layout.rank} + {layout.rope_dim}"
        token_bytes = layout.token_bytes(kv_format)
        cache_bytes = num_tokens * token_bytes
        rows.append((name, stored, f"{token_bytes:,}", _size(cache_bytes), "this model" if layout == own else ""))
        fields |= {
            f"{name.lower()}_token_bytes": token_bytes,
            f"{name.lower()}_cache_bytes": cache_bytes,
            f"{name.lower()}_cache_gib": cache_bytes / GIB,
        }
    return Group(f"attention kinds, {num_tokens:,} tokens", rows, fields)


def blocks_group(use: BlockUse, token_bytes: int) -> Group:
    """Return the blocks of one sequence, and what the last of them wastes."""
    block_bytes = use.block_size * token_bytes
    waste_bytes = use.free_tokens * token_bytes
    rows = [
        ("a block", f"{use.block_size} tokens, {_size(block_bytes)}"),
        ("a sequence", f"{use.num_tokens:,} tokens in {use.num_blocks:,} blocks"),
        ("last block", f"{use.last_block_tokens} used, {use.free_tokens} free"),
        ("waste", f"{_size(waste_bytes)}, {100 * use.free_tokens / (use.num_blocks * use.block_size):.2f} %"),
    ]
    fields = {
        "block_size": use.block_size,
        "block_bytes": block_bytes,
        "num_blocks": use.num_blocks,
        "last_block_tokens": use.last_block_tokens,
        "waste_tokens": use.free_tokens,
        "waste_bytes": waste_bytes,
    }
    return Group("blocks and waste", rows, fields)


def windowed_group(
    use: WindowedUse, num_windowed_layers: int, layout: KVLayout, kv_format: KVFormat, token_bytes: int
) -> Group:
    """Return what windowed layers need of a sequence where they have a pool of their own.

    Args:
        use, num_windowed_layers: their blocks and their number, at least one.
        layout, kv_format, token_bytes: of the whole model.
    """
    num_layers, whole = layout.num_layers, BlockUse(use.num_tokens, use.block_size).num_blocks
    windowed, other = num_windowed_layers, num_layers - num_windowed_layers  # in bytes if layers differ
    if isinstance(layout, MixedKV):
        windowed, other = layout.sliding.token_bytes(kv_format), layout.other.token_bytes(kv_format)
    unit_bytes = use.block_size * token_bytes // (windowed + other)
    sequence_bytes = unit_bytes * (whole * other + use.num_blocks * windowed)
    shares = layer_shares(use.window, windowed, other)
    rows = [
        ("layers", f"{num_windowed_layers} of {num_layers}, a window of {use.window:,} tokens"),
        ("a sequence", f"{use.num_blocks:,} of {whole:,} blocks there, {_size(sequence_bytes)} in all"),
        ("cache.windowed_tokens", f"{shares.windowed:.3g} of cache.capacity_tokens if unset, on a CPU"),
        ("other layers hold", f"{shares.other:.3g} of cache.capacity_tokens then, in the same memory"),
    ]
    fields = {
        "num_windowed_layers": num_windowed_layers,
        "window_tokens": use.window,
        "windowed_blocks": use.num_blocks,
        "windowed_sequence_bytes": sequence_bytes,
        "windowed_share": shares.windowed,
        "other_share": shares.other,
    }
    return Group("windowed layers in a pool of their own", rows, fields)


def sharing_group(sharing: PrefixSharing, token_bytes: int) -> Group:
    """Compare one prefix in many requests with and without sharing."""
    block_bytes = sharing.block_size * token_bytes
    prefix_bytes = sharing.num_blocks * block_bytes
    prefix_bytes_unshared = sharing.num_blocks_unshared * block_bytes
    rows = [
        ("", "shared", "each its own"),
        ("tokens computed", f"{sharing.computed_tokens:,}", f"{sharing.computed_tokens_unshared:,}"),
        ("blocks", f"{sharing.num_blocks:,}", f"{sharing.num_blocks_unshared:,}"),
        ("memory", _size(prefix_bytes), _size(prefix_bytes_unshared)),
    ]
    fields = {
        "requests": sharing.num_requests,
        "shared_prefix_tokens": sharing.prefix_tokens,
        "shared_blocks": sharing.shared_blocks,
        "prefix_blocks": sharing.num_blocks,
        "prefix_blocks_unshared": sharing.num_blocks_unshared,
        "prefix_computed_tokens": sharing.computed_tokens,
        "prefix_computed_tokens_unshared": sharing.computed_tokens_unshared,
        "prefix_bytes": prefix_bytes,
        "prefix_bytes_unshared": prefix_bytes_unshared,
    }
    title = f"sharing a prefix of {sharing.prefix_tokens:,} tokens, {sharing.num_requests:,} requests"
    return Group(title, rows, fields)


def transfer_group(
    token_bytes: int, *, parameters: float, pcie_bytes_per_s: float, hbm_bytes_per_s: float, flops_per_s: float
) -> Group:
    """Compare loading a token's K/V from the host with computing it again."""
    load, recompute = load_us(token_bytes, pcie_bytes_per_s), recompute_us(parameters, flops_per_s)
    ratio = hbm_bytes_per_s / pcie_bytes_per_s
    rows = [
        ("load", f"{load:.2f} us a token, PCIe at {pcie_bytes_per_s / GB:g} GB/s"),
        (
            "recompute",
            f"{recompute:.2f} us a token, {parameters / 1e9:g}B params at {flops_per_s / 1e12:g} TFLOP/s",
        ),
        ("HBM to PCIe", f"{ratio:.1f}x, HBM at {hbm_bytes_per_s / GB:g} GB/s"),
    ]
    fields = {"load_us_per_token": load, "recompute_us_per_token": recompute, "hbm_to_pcie_ratio": ratio}
    return Group("load or recompute", rows, fields)


def decoding_group(cost: DecodingCost) -> Group:
    """Compare the work of decoding without and with a cache."""
    rows = [
        ("without a cache", f"{cost.naive_flops / 1e9:,.3f} GFLOP"),
        ("with one", f"{cost.cached_flops / 1e9:,.3f} GFLOP"),
        ("ratio", f"{cost.ratio:.2f}x"),
    ]
    fields = {
        "new_tokens": cost.new_tokens,
        "decode_naive_flops": cost.naive_flops,
        "decode_cached_flops": cost.cached_flops,
        "decode_flops_ratio": cost.ratio,
    }
    title = f"decoding {cost.new_tokens:,} tokens after {cost.prompt_tokens:,}, one attention layer"
    return Group(title, rows, fields)


def _size(num_bytes: int) -> str:
    if num_bytes < 2**10:
        return f"{num_bytes} B"
    return f"{_in_units(num_bytes, _BINARY)} ({_in_units(num_bytes, _DECIMAL)})"


def _in_units(num_bytes: int, units: tuple[tuple[int, str], ...]) -> str:
    size, name = next((unit for unit in units if num_bytes >= unit[0]), units[-1])
    return f"{num_bytes / size:,.2f} {name}"
