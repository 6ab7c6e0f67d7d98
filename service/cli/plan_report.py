"""The report of `radixkv plan`: sections, each with a table to read and flat fields for scripts."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from radixkv.config.sections import STATE_SHARE
from radixkv.config.sequence_limit import SequenceLimit
from radixkv.offload.load_or_compute import LoadOrCompute
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
from radixkv.planning.tiers import TierCapacity
from radixkv.planning.time_model import LoadTime
from radixkv.service.cli.terminal import align_columns
from radixkv.storage.kv_layout import HeadKV, KVFormat, KVLayout, LatentKV, MixedKV, layer_shares

_BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_DECIMAL = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_MAX_RUN_BLOCKS = 2**13  # if loading a run of this length is not faster than computing it, loading never is
_LONG_LOAD_BLOCKS = 1024  # of the second of two loads, from which latency and bandwidth are measured


@dataclass(frozen=True, slots=True)
class ReportSection:
    """One section of the report.

    Attributes:
        title: the first line.
        rows: cells of the table, row by row.
        fields: the values, under names that no other section uses.
    """

    title: str
    rows: Sequence[tuple[str, ...]]
    fields: Mapping[str, int | float | str | bool | None] = field(default_factory=dict)


def text_of(sections: Sequence[ReportSection]) -> str:
    """Return the sections as tables, one below the other."""
    tables = []
    for section in sections:
        lines = [f"  {line}" for line in align_columns(section.rows)]
        tables.append("\n".join([section.title, *lines]))
    return "\n\n".join(tables)


def json_of(sections: Sequence[ReportSection]) -> str:
    """Return the fields of all sections as one flat, indented JSON object."""
    return json.dumps({name: value for section in sections for name, value in section.fields.items()}, indent=2)


def limit_section(limit: SequenceLimit, requested_tokens: int) -> ReportSection | None:
    """Return the maximum length of a sequence; None if there is none, or if it is as stated and covers the request."""
    if limit.max_tokens is None or not (limit.reason or requested_tokens > limit.max_tokens):
        return None
    rows = [("served", f"at most {limit.max_tokens:,} tokens")]
    if limit.reason:
        rows += [
            ("config.json", f"{limit.stated_tokens:,} tokens"),
            ("because", limit.reason),
            ("remedy", limit.remedy),
        ]
    if requested_tokens > limit.max_tokens:
        rows.append(("--context", f"{requested_tokens:,} tokens requested; {limit.max_tokens:,} are counted below"))
    fields = {"max_sequence_tokens": limit.max_tokens, "limit_reason": limit.reason or None}
    return ReportSection("longest sequence", rows, fields)


def token_section(layout: KVLayout, kv_format: KVFormat, tensor_parallel: int) -> ReportSection:
    """Return the K/V bytes per token."""
    token_bytes = layout.token_bytes(kv_format)
    rank_token_bytes = layout.rank_token_bytes(kv_format, tensor_parallel)
    scales = ", a float32 scale per vector" if kv_format.has_scales else ""
    latent = layout if isinstance(layout, LatentKV) else None
    shape = layout.other if isinstance(layout, MixedKV) else layout
    heads = shape if isinstance(shape, HeadKV) else None
    rows = [
        ("stored", f"{layout}, {kv_format.name}{scales}"),
        ("per token", f"{token_bytes:,} bytes, {_size(token_bytes)}"),
        ("per rank", f"{rank_token_bytes:,} bytes, {_size(rank_token_bytes)}, tp {tensor_parallel}"),
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
    return ReportSection("bytes per token", rows, fields)


def cache_section(batch: int, context_tokens: int, token_bytes: int, rank_token_bytes: int) -> ReportSection:
    """Return the K/V memory of a batch of sequences that share nothing and fill their last block."""
    sequence_bytes = context_tokens * token_bytes
    cache_bytes = batch * sequence_bytes
    rank_cache_bytes = batch * context_tokens * rank_token_bytes
    rows = [
        ("per sequence", f"{context_tokens:,} tokens, {_size(sequence_bytes)}"),
        ("the batch", f"{batch:,} sequences, {cache_bytes:,} bytes, {_size(cache_bytes)}"),
        ("per rank", f"{rank_cache_bytes:,} bytes, {_size(rank_cache_bytes)}"),
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
    return ReportSection("cache size", rows, fields)


def state_section(state_bytes: int, batch: int, cache_bytes: int) -> ReportSection:
    """Return the memory of recurrent states: of a batch of running sequences, and of snapshots next to their K/V."""
    batch_bytes, snapshot_bytes = batch * state_bytes, int(STATE_SHARE * cache_bytes)
    rows = [
        ("per state", f"{state_bytes:,} bytes, {_size(state_bytes)}"),
        ("the batch", f"{batch:,} running sequences, {_size(batch_bytes)}"),
        ("snapshots", f"{snapshot_bytes // state_bytes:,}, {_size(snapshot_bytes)}, cache.state_bytes by default"),
    ]
    fields = {
        "state_bytes": state_bytes,
        "batch_state_bytes": batch_bytes,
        "snapshot_bytes": snapshot_bytes,
        "snapshots": snapshot_bytes // state_bytes,
    }
    return ReportSection("states of sequences", rows, fields)


def fit_section(
    device: DeviceMemory, user_bytes: int, block_size: int, rank_token_bytes: int, state_bytes: int = 0
) -> ReportSection:
    """Return the number of sequences (users) and the pool capacity that fit on one device next to the weights.

    Each user has a recurrent state of `state_bytes`, and snapshots of states take a share of the K/V memory.
    """
    users = device.users(user_bytes)
    kv_bytes = device.kv_bytes if not state_bytes else int((device.kv_bytes - users * state_bytes) / (1 + STATE_SHARE))
    capacity_tokens = kv_bytes // (block_size * rank_token_bytes) * block_size
    missing_bytes = device.weights_bytes + device.overhead_bytes - device.total_bytes
    shortfall = f", {_size(missing_bytes)} short" if missing_bytes > 0 else ""
    rows = [
        ("memory", _size(device.total_bytes)),
        ("  weights", _size(device.weights_bytes)),
        ("  overhead", _size(device.overhead_bytes)),
        ("  left for K/V", _size(device.kv_bytes) + shortfall),
        ("per user", _size(user_bytes)),
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
    return ReportSection("users that fit on one device", rows, fields)


def kinds_section(kinds: Mapping[str, KVLayout], own: KVLayout, kv_format: KVFormat, num_tokens: int) -> ReportSection:
    """Compare the model with each kind of attention; `own` is the layout of the model."""
    rows: list[tuple[str, ...]] = [("", "stored per layer", "bytes per token", "cache")]
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
    return ReportSection(f"attention kinds, {num_tokens:,} tokens", rows, fields)


def blocks_section(use: BlockUse, token_bytes: int) -> ReportSection:
    """Return the blocks of one sequence, and the unused part of the last one."""
    block_bytes = use.block_size * token_bytes
    waste_bytes = use.free_tokens * token_bytes
    rows = [
        ("per block", f"{use.block_size} tokens, {_size(block_bytes)}"),
        ("per sequence", f"{use.num_tokens:,} tokens in {use.num_blocks:,} blocks"),
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
    return ReportSection("blocks and waste", rows, fields)


def windowed_section(
    use: WindowedUse, num_windowed_layers: int, layout: KVLayout, kv_format: KVFormat, token_bytes: int
) -> ReportSection:
    """Return the memory that a sequence needs if the windowed layers have a pool of their own.

    Args:
        use: the blocks of a sequence in the windowed layers.
        num_windowed_layers: number of windowed layers, at least 1.
        layout, kv_format, token_bytes: the layout, the format and the bytes per token of the whole model.
    """
    num_layers, num_blocks = layout.num_layers, BlockUse(use.num_tokens, use.block_size).num_blocks
    # The parts of a block's bytes in windowed and in other layers, as a ratio.
    windowed_parts, other_parts = num_windowed_layers, num_layers - num_windowed_layers
    if isinstance(layout, MixedKV):  # the layers store different numbers of bytes
        windowed_parts, other_parts = layout.sliding.token_bytes(kv_format), layout.other.token_bytes(kv_format)
    part_bytes = use.block_size * token_bytes // (windowed_parts + other_parts)
    sequence_bytes = part_bytes * (num_blocks * other_parts + use.num_blocks * windowed_parts)
    shares = layer_shares(windowed_parts, other_parts)
    rows = [
        ("layers", f"{num_windowed_layers} of {num_layers}, a window of {use.window:,} tokens"),
        (
            "per sequence",
            f"{use.num_blocks:,} of {num_blocks:,} blocks in these layers, {_size(sequence_bytes)} in all layers",
        ),
        ("cache.windowed_tokens", "if unset, on a CPU, both kinds of layers share the memory of one pool:"),
        ("  windowed layers", f"at most {shares.windowed:.3g} of cache.capacity_tokens"),
        ("  other layers", f"at most {shares.other:.3g} of cache.capacity_tokens"),
    ]
    fields = {
        "num_windowed_layers": num_windowed_layers,
        "window_tokens": use.window,
        "windowed_blocks": use.num_blocks,
        "windowed_sequence_bytes": sequence_bytes,
        "windowed_share": shares.windowed,
        "other_share": shares.other,
    }
    return ReportSection("windowed layers in a pool of their own", rows, fields)


def sharing_section(sharing: PrefixSharing, token_bytes: int) -> ReportSection:
    """Compare the cost of one prefix in many requests with and without sharing."""
    block_bytes = sharing.block_size * token_bytes
    prefix_bytes = sharing.num_blocks * block_bytes
    prefix_bytes_unshared = sharing.num_blocks_unshared * block_bytes
    rows = [
        ("", "shared", "unshared"),
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
    return ReportSection(title, rows, fields)


def transfer_section(
    token_bytes: int, *, parameters: float, pcie_bytes_per_s: float, hbm_bytes_per_s: float, flops_per_s: float
) -> ReportSection:
    """Compare loading the K/V of a token from the host with recomputing them."""
    load_token_us = load_us(token_bytes, pcie_bytes_per_s)
    recompute_token_us = recompute_us(parameters, flops_per_s)
    ratio = hbm_bytes_per_s / pcie_bytes_per_s
    rows = [
        ("load", f"{load_token_us:.2f} us per token, PCIe at {pcie_bytes_per_s / GB:g} GB/s"),
        (
            "recompute",
            f"{recompute_token_us:.2f} us per token, {parameters / 1e9:g}B params at {flops_per_s / 1e12:g} TFLOP/s",
        ),
        ("HBM to PCIe", f"{ratio:.1f}x, HBM at {hbm_bytes_per_s / GB:g} GB/s"),
    ]
    fields = {
        "load_us_per_token": load_token_us,
        "recompute_us_per_token": recompute_token_us,
        "hbm_to_pcie_ratio": ratio,
    }
    return ReportSection("load or recompute", rows, fields)


def decoding_section(cost: DecodingCost) -> ReportSection:
    """Compare the FLOPs of decoding without and with a K/V cache."""
    rows = [
        ("without K/V cache", f"{cost.naive_flops / 1e9:,.3f} GFLOP"),
        ("with K/V cache", f"{cost.cached_flops / 1e9:,.3f} GFLOP"),
        ("ratio", f"{cost.ratio:.2f}x"),
    ]
    fields = {
        "new_tokens": cost.new_tokens,
        "decode_naive_flops": cost.naive_flops,
        "decode_cached_flops": cost.cached_flops,
        "decode_flops_ratio": cost.ratio,
    }
    title = f"decoding {cost.new_tokens:,} tokens after {cost.prompt_tokens:,}, one attention layer"
    return ReportSection(title, rows, fields)


def tier_section(
    tiers: Sequence[TierCapacity],
    links: Sequence[LoadTime],
    *,
    block_size: int,
    token_bytes: int,
    tokens_per_s: float | None,
) -> ReportSection:
    """Return one line per tier.

    Args:
        tiers: names and capacities of the tiers.
        links: speeds of the tiers, in the same order.
        block_size: tokens per block.
        token_bytes: K/V bytes per token.
        tokens_per_s: prefill rate; None if it is not known.
    """
    block_bytes = block_size * token_bytes
    compute_us = None if tokens_per_s is None else block_size / tokens_per_s * 1e6
    rows: list[tuple[str, ...]] = [("", "tokens", "load a block", "compute it", "same time at", "faster to load")]
    fields: dict[str, int | float | None] = {}
    for tier, link in zip(tiers, links, strict=True):
        transfer_us = load_us(block_bytes, link.bytes_per_s)
        min_blocks = None
        if tokens_per_s is not None:
            min_blocks = min_loaded_blocks(link, block_bytes, block_size, tokens_per_s)
        latency = f" + {link.latency_s * 1e3:g} ms per call" if link.latency_s else ""
        rows.append(
            (
                tier.name,
                "unbounded" if tier.capacity_tokens is None else f"{tier.capacity_tokens:,}",
                f"{transfer_us:,.1f} us, {link.bytes_per_s / GB:g} GB/s{latency}",
                "?" if compute_us is None else f"{compute_us:,.1f} us",
                f"{link.bytes_per_s / token_bytes:,.0f} tokens/s",
                _verdict(tokens_per_s, min_blocks, block_size),
            )
        )
        fields |= {
            f"tier_{tier.name}_capacity_tokens": tier.capacity_tokens,
            f"tier_{tier.name}_load_us_per_block": transfer_us,
            f"tier_{tier.name}_compute_us_per_block": compute_us,
            f"tier_{tier.name}_latency_us": link.latency_s * 1e6,
            f"tier_{tier.name}_break_even_tokens_per_s": link.bytes_per_s / token_bytes,
            f"tier_{tier.name}_least_loaded_tokens": None if min_blocks is None else min_blocks * block_size,
        }
    return ReportSection(f"tiers, blocks of {block_size} tokens", rows, fields)


def min_loaded_blocks(link: LoadTime, block_bytes: int, block_size: int, tokens_per_s: float) -> int | None:
    """Return the length of the shortest run of blocks that the engine would load; None if it would always compute.

    The engine's own `LoadOrCompute` decides, after it has measured these rates.
    """
    load_or_compute = LoadOrCompute(block_size)
    load_or_compute.note_step(block_size / tokens_per_s, [(0, block_size)])
    for num_blocks in (1, _LONG_LOAD_BLOCKS):
        load_or_compute.note_start("tier", num_blocks)
        load_or_compute.note_end("tier", num_blocks, link.latency_s + num_blocks * block_bytes / link.bytes_per_s)

    def is_loaded(num_blocks: int) -> bool:
        return load_or_compute.choose(0, ["tier"] * num_blocks) > 0

    # Longer runs are loaded as well, so a binary search finds the shortest one.
    min_blocks = 1 + bisect_left(range(1, _MAX_RUN_BLOCKS + 1), True, key=is_loaded)
    return min_blocks if min_blocks <= _MAX_RUN_BLOCKS else None


def _verdict(tokens_per_s: float | None, min_blocks: int | None, block_size: int) -> str:
    if tokens_per_s is None:
        return "below that rate"
    if min_blocks is None:
        return "never"
    return "always" if min_blocks == 1 else f"from {min_blocks * block_size:,} tokens on"


def _size(num_bytes: int) -> str:
    if num_bytes < 2**10:
        return f"{num_bytes} B"
    return f"{_in_units(num_bytes, _BINARY)} ({_in_units(num_bytes, _DECIMAL)})"


def _in_units(num_bytes: int, units: tuple[tuple[int, str], ...]) -> str:
    size, name = next((unit for unit in units if num_bytes >= unit[0]), units[-1])
    return f"{num_bytes / size:,.2f} {name}"
