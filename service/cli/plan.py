"""`radixkv plan`: computes memory and concurrency, and prints a report with the sections that the options request."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from radixkv.config import CacheConfig
from radixkv.errors import ConfigError
from radixkv.planning.checkpoint import Checkpoint
from radixkv.planning.plan import (
    GB,
    GIB,
    BlockUse,
    DecodingCost,
    DeviceMemory,
    PrefixSharing,
    WindowedUse,
    recompute_us,
)
from radixkv.planning.quantized_weights import quantized_weights_bytes
from radixkv.planning.time_model import LoadTime, TimeModel
from radixkv.service.cli import plan_report
from radixkv.service.cli.argument_types import COUNTS, number, positive_number, whole
from radixkv.service.cli.model_options import MODEL_OPTIONS, format_of, layout_of, model_of
from radixkv.service.cli.options import Option, add_choice, add_options, flag
from radixkv.service.cli.plan_report import ReportSection
from radixkv.service.cli.tier_options import tier_capacities, tier_numbers, tier_option
from radixkv.storage.kv_layout import KVFormat, KVLayout, LatentKV, MixedKV, attention_kinds

_DISK_GB_S = 3.0  # a drive on PCIe 3.0 or 4.0 x4
_NETWORK_GB_S = 1.25  # 10 Gbit/s


def _gb(text: str) -> int:
    return int(number(text) * GB)


def _gib(text: str) -> int:
    return int(number(text) * GIB)


_LOAD = (
    Option("--batch", "N", whole, "concurrent sequences", 1),
    Option("--context", "N", whole, "tokens per sequence", 8192),
    Option("--block-size", "N", whole, "tokens per block", CacheConfig().block_size),
    Option("--shared-prefix", "N", whole, "tokens that --requests share (default: none)"),
    Option("--requests", "N", whole, "requests that share --shared-prefix (default: none)"),
    Option(
        "--new-tokens", "N", whole, "compare decoding N tokens with and without a K/V cache (default: no comparison)"
    ),
)
_MEMORY = (
    Option(
        "--memory-gb",
        "X",
        _gb,
        "memory of the device in GB; prints how many sequences fit (default: not printed)",
        more={"dest": "memory_bytes"},
    ),
    Option("--memory-gib", "X", _gib, "like --memory-gb, in GiB (default: not printed)", more={"dest": "memory_bytes"}),
)
_DEVICE = (
    Option("--weights-gb", "X", _gb, "weights of all ranks in GB (default: the weight files of --model)"),
    Option(
        "--weights",
        None,
        None,
        "q8, q4 or int8: the weights of --model as model.weights quantizes them on a CPU (default: auto, as stored)",
        "auto",
        {"choices": ("auto", "q8", "q4", "int8")},
    ),
    Option("--overhead-gb", "X", _gb, "activations, CUDA context and graphs in GB (default: 0)"),
    Option("--user-gb", "X", _gb, "K/V per sequence in GB (default: that of the blocks for --context)"),
    Option(
        "--params-b",
        "X",
        positive_number,
        "billions of parameters; compares loading K/V with computing it (default: no comparison)",
    ),
    Option("--tflops", "X", positive_number, "peak dense bf16 TFLOPS; the default is that of an H100", 989.0),
    Option("--pcie-gb-s", "X", positive_number, "bandwidth from the host in GB/s", 40.0),
    Option("--hbm-gb-s", "X", positive_number, "memory bandwidth in GB/s; the default is that of an H100 SXM", 3350.0),
)
_TIERS = (
    tier_option("; prints the capacity of each tier in tokens, and whether loading is faster than computing"),
    Option(
        "--tier-gb-s",
        "NAME=X[,...]",
        tier_numbers,
        "bandwidth of tiers in GB/s (default: host that of --pcie-gb-s, disk 3, others 1.25)",
        {},
    ),
    Option("--tier-ms", "NAME=X[,...]", tier_numbers, "latency of tiers in ms (default: 0)", {}),
    Option(
        "--prefill-tokens-per-s",
        "X",
        positive_number,
        "measured prefill rate (default: from --params-b and --tflops, or none)",
    ),
    Option(
        "--time-model",
        "FILE",
        Path,
        "write the rates of tiers and prefill to a JSON file, the time model of `radixkv simulate` (default: no file)",
    ),
)


def add_arguments(plan: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    plan.description = (
        f"Compute the memory and concurrency of a K/V cache. {COUNTS} GB is 10^9 bytes, GiB is 2^30 bytes."
    )
    model = plan.add_argument_group("the model", "Give --model, or sizes, or both; a size overrides that of --model.")
    add_options(model, (*MODEL_OPTIONS, Option("--tp", "N", whole, "tensor parallel size", 1)))
    add_options(plan.add_argument_group("the workload"), _LOAD)
    device = plan.add_argument_group("one device")
    add_choice(device, _MEMORY)
    add_options(device, _DEVICE)
    add_options(plan.add_argument_group("the tiers"), _TIERS)
    add_options(plan, [flag("--json", "print one flat JSON object, with units in the names")])
    plan.set_defaults(command=_plan)


def _plan(arguments: argparse.Namespace) -> None:
    sections = _sections(arguments, _model_with_weights(arguments))
    print(plan_report.json_of(sections) if arguments.json else plan_report.text_of(sections))


def _model_with_weights(arguments: argparse.Namespace) -> Checkpoint:
    model, weights_bytes = model_of(arguments), arguments.weights_gb  # `_gb` has converted this value to bytes
    if arguments.weights != "auto":
        if weights_bytes is not None or arguments.model is None:
            got = "no --model" if weights_bytes is None else "--weights-gb"
            raise ConfigError(f"plan: --weights {arguments.weights} requires --model and no --weights-gb, got {got}")
        weights_bytes = quantized_weights_bytes(arguments.model, arguments.weights)
    return model if weights_bytes is None else dataclasses.replace(model, weights_bytes=weights_bytes)


def _sections(arguments: argparse.Namespace, model: Checkpoint) -> list[ReportSection]:
    layout, kv_format = layout_of(model, "plan"), format_of(model, arguments)
    requested_tokens = arguments.context
    if model.limit.max_tokens is not None:
        arguments.context = min(requested_tokens, model.limit.max_tokens)
    token_bytes, rank_token_bytes = layout.token_bytes(kv_format), layout.rank_token_bytes(kv_format, arguments.tp)
    sections = [
        plan_report.limit_section(model.limit, requested_tokens),
        plan_report.token_section(layout, kv_format, arguments.tp),
        plan_report.cache_section(arguments.batch, arguments.context, token_bytes, rank_token_bytes),
        _state_section(arguments, model, token_bytes),
        _fit_section(arguments, model, rank_token_bytes),
        _kinds_section(model, layout, kv_format, arguments.batch * arguments.context),
        plan_report.blocks_section(BlockUse(arguments.context, arguments.block_size), token_bytes),
        _windowed_section(arguments, model, layout, kv_format, token_bytes),
        _sharing_section(arguments, token_bytes),
        _transfer_section(arguments, token_bytes),
        _tier_section(arguments, token_bytes),
        _decoding_section(arguments, model),
    ]
    return [section for section in sections if section is not None]


def _state_section(arguments: argparse.Namespace, model: Checkpoint, token_bytes: int) -> ReportSection | None:
    if model.state_bytes is None:
        return None
    cache_bytes = arguments.batch * arguments.context * token_bytes
    return plan_report.state_section(model.state_bytes, arguments.batch, cache_bytes)


def _fit_section(arguments: argparse.Namespace, model: Checkpoint, rank_token_bytes: int) -> ReportSection | None:
    if arguments.memory_bytes is None:
        sizes = (arguments.weights_gb, arguments.overhead_gb, arguments.user_gb)
        if arguments.weights != "auto" or any(size is not None for size in sizes):
            raise ConfigError(
                "plan: --weights, --weights-gb, --overhead-gb and --user-gb require --memory-gb or --memory-gib"
            )
        return None
    if model.weights_bytes is None:
        raise ConfigError("plan: --memory-gb and --memory-gib require --weights-gb, or a --model with weight files")
    rank_weights_bytes = -(-model.weights_bytes // arguments.tp)  # rounded up
    device = DeviceMemory(arguments.memory_bytes, rank_weights_bytes, arguments.overhead_gb or 0)
    user_bytes, state_bytes = arguments.user_gb, model.state_bytes or 0
    if user_bytes is None:
        num_blocks = BlockUse(arguments.context, arguments.block_size).num_blocks
        user_bytes = num_blocks * arguments.block_size * rank_token_bytes + state_bytes
    return plan_report.fit_section(device, user_bytes, arguments.block_size, rank_token_bytes, state_bytes)


def _kinds_section(model: Checkpoint, layout: KVLayout, kv_format: KVFormat, num_tokens: int) -> ReportSection:
    if isinstance(layout, MixedKV):
        return ReportSection("attention kinds", [("requires the same K/V in all layers",)])
    if model.num_query_heads is None or model.head_dim is None:
        return ReportSection("attention kinds", [("requires --query-heads and --head-dim",)])
    kinds = attention_kinds(
        layout.num_layers,
        model.num_query_heads,
        model.head_dim,
        num_kv_heads=model.num_kv_heads,
        latent=layout if isinstance(layout, LatentKV) else None,
    )
    return plan_report.kinds_section(kinds, layout, kv_format, num_tokens)


def _windowed_section(
    arguments: argparse.Namespace, model: Checkpoint, layout: KVLayout, kv_format: KVFormat, token_bytes: int
) -> ReportSection | None:
    if model.window is None or not 0 < model.num_windowed_layers <= layout.num_layers:
        return None
    use = WindowedUse(arguments.context, arguments.block_size, model.window)
    return plan_report.windowed_section(use, model.num_windowed_layers, layout, kv_format, token_bytes)


def _sharing_section(arguments: argparse.Namespace, token_bytes: int) -> ReportSection | None:
    if arguments.shared_prefix is None and arguments.requests is None:
        return None
    if arguments.shared_prefix is None or arguments.requests is None:
        got = "--requests" if arguments.shared_prefix is None else "--shared-prefix"
        raise ConfigError(f"plan: --shared-prefix and --requests require each other, got only {got}")
    sharing = PrefixSharing(arguments.requests, arguments.shared_prefix, arguments.block_size)
    return plan_report.sharing_section(sharing, token_bytes)


def _transfer_section(arguments: argparse.Namespace, token_bytes: int) -> ReportSection | None:
    if arguments.params_b is None:
        return None
    return plan_report.transfer_section(
        token_bytes,
        parameters=arguments.params_b * 1e9,
        pcie_bytes_per_s=arguments.pcie_gb_s * GB,
        hbm_bytes_per_s=arguments.hbm_gb_s * GB,
        flops_per_s=arguments.tflops * 1e12,
    )


def _tier_section(arguments: argparse.Namespace, token_bytes: int) -> ReportSection | None:
    tiers = tier_capacities(arguments.tiers, lambda subject: token_bytes, arguments.block_size)
    for option, numbers in (("--tier-gb-s", arguments.tier_gb_s), ("--tier-ms", arguments.tier_ms)):
        unknown = set(numbers) - {tier.name for tier in tiers}
        if unknown:
            raise ConfigError(f"{option}: expected names of --tier, got {min(unknown)}")
    if not tiers:
        if arguments.time_model is not None:
            raise ConfigError("plan: --time-model requires --tier")
        return None
    gb_per_s = {"host": arguments.pcie_gb_s, "disk": _DISK_GB_S, **arguments.tier_gb_s}
    links = [
        LoadTime(gb_per_s.get(tier.name, _NETWORK_GB_S) * GB, arguments.tier_ms.get(tier.name, 0.0) / 1e3)
        for tier in tiers
    ]
    tokens_per_s = arguments.prefill_tokens_per_s
    if tokens_per_s is None and arguments.params_b is not None:
        tokens_per_s = 1e6 / recompute_us(arguments.params_b * 1e9, arguments.tflops * 1e12)
    if arguments.time_model is not None:
        _write_time_model(arguments.time_model, token_bytes, tokens_per_s, [tier.name for tier in tiers], links)
    return plan_report.tier_section(
        tiers, links, block_size=arguments.block_size, token_bytes=token_bytes, tokens_per_s=tokens_per_s
    )


def _write_time_model(
    path: Path, token_bytes: int, tokens_per_s: float | None, names: Sequence[str], links: Sequence[LoadTime]
) -> None:
    if tokens_per_s is None:
        raise ConfigError("plan: --time-model requires --prefill-tokens-per-s, or --params-b")
    TimeModel(token_bytes, 1 / tokens_per_s, tiers=dict(zip(names, links, strict=True))).write(path)


def _decoding_section(arguments: argparse.Namespace, model: Checkpoint) -> ReportSection | None:
    if arguments.new_tokens is None:
        return None
    if model.num_query_heads is None or model.head_dim is None:
        raise ConfigError("plan: --new-tokens requires --query-heads and --head-dim")
    hidden_size = model.num_query_heads * model.head_dim
    return plan_report.decoding_section(DecodingCost(arguments.context, arguments.new_tokens, hidden_size))
