"""`radixkv plan`: its options, and the groups of numbers that they ask for."""

from __future__ import annotations

import argparse
import dataclasses

from radixkv.config import CacheConfig
from radixkv.errors import ConfigError
from radixkv.planning.checkpoint import Checkpoint
from radixkv.planning.int8_weights import int8_weights_bytes
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
from radixkv.service.cli import plan_report
from radixkv.service.cli.argument_types import COUNTS, number, positive_number, whole
from radixkv.service.cli.model_options import add_model_arguments, format_of, layout_of, model_of
from radixkv.service.cli.plan_report import Group
from radixkv.service.cli.tier_options import add_tier_argument, rooms_of, tier_numbers
from radixkv.service.cli.tier_report import TierLink, tier_group
from radixkv.storage.kv_layout import KVFormat, KVLayout, LatentKV, MixedKV, attention_kinds

_DISK_GB_S = 3.0  # a drive on PCIe 3.0 or 4.0 x4
_NETWORK_GB_S = 1.25  # 10 Gbit/s


def add_plan_command(plan: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan` to its parser."""
    plan.description = (
        f"Compute the memory and concurrency of a K/V cache. {COUNTS} GB is 10^9 bytes, GiB is 2^30 bytes."
    )
    model = plan.add_argument_group("the model", "Give --model, or sizes, or both; a size overrides that of --model.")
    add_model_arguments(model)
    model.add_argument("--tp", metavar="N", type=whole, default=1, help="tensor parallel size")
    _add_load(plan)
    _add_device(plan)
    _add_tiers(plan)
    plan.add_argument("--json", action="store_true", help="print one flat JSON object, with units in the names")
    plan.set_defaults(command=_plan)


def _add_load(plan: argparse.ArgumentParser) -> None:
    load = plan.add_argument_group("the load")
    load.add_argument("--batch", metavar="N", type=whole, default=1, help="concurrent sequences")
    load.add_argument("--context", metavar="N", type=whole, default=8192, help="tokens per sequence")
    load.add_argument(
        "--block-size", metavar="N", type=whole, default=CacheConfig().block_size, help="tokens per block"
    )
    load.add_argument("--shared-prefix", metavar="N", type=whole, help="tokens that --requests share (default: none)")
    load.add_argument("--requests", metavar="N", type=whole, help="requests that share --shared-prefix (default: none)")
    load.add_argument(
        "--new-tokens",
        metavar="N",
        type=whole,
        help="compare decoding N tokens with and without a K/V cache (default: no comparison)",
    )


def _add_device(plan: argparse.ArgumentParser) -> None:
    device = plan.add_argument_group("one device")
    memory = device.add_mutually_exclusive_group()
    memory.add_argument(
        "--memory-gb",
        metavar="X",
        dest="memory_bytes",
        type=_gb,
        help="memory of the device in GB; prints how many users fit (default: not printed)",
    )
    memory.add_argument(
        "--memory-gib", metavar="X", dest="memory_bytes", type=_gib, help="the same in GiB (default: not printed)"
    )
    device.add_argument(
        "--weights-gb", metavar="X", type=_gb, help="weights of all ranks in GB (default: the safetensors of --model)"
    )
    device.add_argument(
        "--weights",
        choices=("auto", "int8"),
        default="auto",
        help="int8: the weights of --model with model.weights = int8, on a CPU (default: auto, as in the files)",
    )
    device.add_argument(
        "--overhead-gb", metavar="X", type=_gb, help="activations, CUDA context and graphs in GB (default: 0)"
    )
    device.add_argument("--user-gb", metavar="X", type=_gb, help="K/V per user in GB (default: blocks for --context)")
    device.add_argument(
        "--params-b",
        metavar="X",
        type=positive_number,
        help="billions of parameters; compares loading K/V with computing it (default: no comparison)",
    )
    device.add_argument(
        "--tflops",
        metavar="X",
        type=positive_number,
        default=989.0,
        help="peak dense bf16 TFLOPS; the default is an H100",
    )
    device.add_argument(
        "--pcie-gb-s", metavar="X", type=positive_number, default=40.0, help="bandwidth from the host in GB/s"
    )
    device.add_argument(
        "--hbm-gb-s",
        metavar="X",
        type=positive_number,
        default=3350.0,
        help="memory bandwidth in GB/s; the default is an H100 SXM",
    )


def _add_tiers(plan: argparse.ArgumentParser) -> None:
    tiers = plan.add_argument_group("the tiers", "Stores for blocks that leave the device.")
    add_tier_argument(tiers, "stores; prints their tokens, and whether loading is faster than computing")
    tiers.add_argument(
        "--tier-gb-s",
        metavar="NAME=X[,...]",
        type=tier_numbers,
        default={},
        help="bandwidth of tiers in GB/s (default: host that of --pcie-gb-s, disk 3, others 1.25)",
    )
    tiers.add_argument(
        "--tier-ms",
        metavar="NAME=X[,...]",
        type=tier_numbers,
        default={},
        help="latency of tiers in ms (default: 0)",
    )
    tiers.add_argument(
        "--prefill-tokens-per-s",
        metavar="X",
        type=positive_number,
        help="measured prefill rate (default: from --params-b and --tflops, or none)",
    )


def _plan(arguments: argparse.Namespace) -> None:
    groups = _groups(arguments, _model(arguments))
    print(plan_report.json_of(groups) if arguments.json else plan_report.text_of(groups))


def _model(arguments: argparse.Namespace) -> Checkpoint:
    model, weights_bytes = model_of(arguments), arguments.weights_gb
    if arguments.weights == "int8":
        if weights_bytes is not None or arguments.model is None:
            got = "no --model" if weights_bytes is None else "--weights-gb"
            raise ConfigError(f"plan: expected --weights int8 with --model and without --weights-gb, got {got}")
        weights_bytes = int8_weights_bytes(arguments.model)
    return model if weights_bytes is None else dataclasses.replace(model, weights_bytes=weights_bytes)


def _groups(arguments: argparse.Namespace, model: Checkpoint) -> list[Group]:
    layout, kv_format = layout_of(model, "plan"), format_of(model, arguments)
    token_bytes, rank_token_bytes = layout.token_bytes(kv_format), layout.rank_token_bytes(kv_format, arguments.tp)
    groups = [
        plan_report.token_group(layout, kv_format, arguments.tp),
        plan_report.cache_group(arguments.batch, arguments.context, token_bytes, rank_token_bytes),
        _state_group(arguments, model, token_bytes),
        _fit_group(arguments, model, rank_token_bytes),
        _kinds_group(model, layout, kv_format, arguments.batch * arguments.context),
        plan_report.blocks_group(BlockUse(arguments.context, arguments.block_size), token_bytes),
        _windowed_group(arguments, model, layout, kv_format, token_bytes),
        _sharing_group(arguments, token_bytes),
        _transfer_group(arguments, token_bytes),
        _tier_group(arguments, token_bytes),
        _decoding_group(arguments, model),
    ]
    return [group for group in groups if group is not None]


def _state_group(arguments: argparse.Namespace, model: Checkpoint, token_bytes: int) -> Group | None:
    if model.state_bytes is None:
        return None
    cache_bytes = arguments.batch * arguments.context * token_bytes
    return plan_report.state_group(model.state_bytes, arguments.batch, cache_bytes)


def _fit_group(arguments: argparse.Namespace, model: Checkpoint, rank_token_bytes: int) -> Group | None:
    if arguments.memory_bytes is None:
        is_asked = not (arguments.weights_gb is arguments.overhead_gb is arguments.user_gb is None)
        if is_asked or arguments.weights == "int8":
            raise ConfigError(
                "plan: expected --memory-gb or --memory-gib with --weights, --weights-gb, --overhead-gb or --user-gb, "
                "got neither"
            )
        return None
    if model.weights_bytes is None:
        raise ConfigError("plan: expected --weights-gb, or a --model directory with safetensors, got neither")
    device = DeviceMemory(arguments.memory_bytes, -(-model.weights_bytes // arguments.tp), arguments.overhead_gb or 0)
    user_bytes, state_bytes = arguments.user_gb, model.state_bytes or 0
    if user_bytes is None:
        num_blocks = BlockUse(arguments.context, arguments.block_size).num_blocks
        user_bytes = num_blocks * arguments.block_size * rank_token_bytes + state_bytes
    return plan_report.fit_group(device, user_bytes, arguments.block_size, rank_token_bytes, state_bytes)


def _kinds_group(model: Checkpoint, layout: KVLayout, kv_format: KVFormat, num_tokens: int) -> Group:
    if isinstance(layout, MixedKV):
        return Group("attention kinds", [("expected the same K/V in all layers",)])
    if model.num_query_heads is None or model.head_dim is None:
        return Group("attention kinds", [("expected --query-heads and --head-dim",)])
    kinds = attention_kinds(
        layout.num_layers,
        model.num_query_heads,
        model.head_dim,
        num_kv_heads=model.num_kv_heads,
        latent=layout if isinstance(layout, LatentKV) else None,
    )
    return plan_report.kinds_group(kinds, layout, kv_format, num_tokens)


def _windowed_group(
    arguments: argparse.Namespace, model: Checkpoint, layout: KVLayout, kv_format: KVFormat, token_bytes: int
) -> Group | None:
    if model.window is None or not 0 < model.num_windowed_layers <= layout.num_layers:
        return None
    use = WindowedUse(arguments.context, arguments.block_size, model.window)
    return plan_report.windowed_group(use, model.num_windowed_layers, layout, kv_format, token_bytes)


def _sharing_group(arguments: argparse.Namespace, token_bytes: int) -> Group | None:
    if arguments.shared_prefix is None and arguments.requests is None:
        return None
    if arguments.shared_prefix is None or arguments.requests is None:
        got = "--requests" if arguments.shared_prefix is None else "--shared-prefix"
        raise ConfigError(f"plan: expected --shared-prefix and --requests together, got only {got}")
    sharing = PrefixSharing(arguments.requests, arguments.shared_prefix, arguments.block_size)
    return plan_report.sharing_group(sharing, token_bytes)


def _transfer_group(arguments: argparse.Namespace, token_bytes: int) -> Group | None:
    if arguments.params_b is None:
        return None
    return plan_report.transfer_group(
        token_bytes,
        parameters=arguments.params_b * 1e9,
        pcie_bytes_per_s=arguments.pcie_gb_s * GB,
        hbm_bytes_per_s=arguments.hbm_gb_s * GB,
        flops_per_s=arguments.tflops * 1e12,
    )


def _tier_group(arguments: argparse.Namespace, token_bytes: int) -> Group | None:
    rooms = rooms_of(arguments.tiers, lambda subject: token_bytes, arguments.block_size)
    for flag, numbers in (("--tier-gb-s", arguments.tier_gb_s), ("--tier-ms", arguments.tier_ms)):
        unknown = set(numbers) - {room.name for room in rooms}
        if unknown:
            raise ConfigError(f"{flag}: expected names of --tier, got {min(unknown)}")
    if not rooms:
        return None
    rates = {"host": arguments.pcie_gb_s, "disk": _DISK_GB_S, **arguments.tier_gb_s}
    links = [
        TierLink(rates.get(room.name, _NETWORK_GB_S) * GB, arguments.tier_ms.get(room.name, 0.0) / 1e3)
        for room in rooms
    ]
    tokens_per_s = arguments.prefill_tokens_per_s
    if tokens_per_s is None and arguments.params_b is not None:
        tokens_per_s = 1e6 / recompute_us(arguments.params_b * 1e9, arguments.tflops * 1e12)
    return tier_group(rooms, links, block_size=arguments.block_size, token_bytes=token_bytes, tokens_per_s=tokens_per_s)


def _decoding_group(arguments: argparse.Namespace, model: Checkpoint) -> Group | None:
    if arguments.new_tokens is None:
        return None
    if model.num_query_heads is None or model.head_dim is None:
        raise ConfigError("plan: expected --query-heads and --head-dim with --new-tokens, got not both")
    hidden_size = model.num_query_heads * model.head_dim
    return plan_report.decoding_group(DecodingCost(arguments.context, arguments.new_tokens, hidden_size))


def _gb(text: str) -> int:
    return int(number(text) * GB)


def _gib(text: str) -> int:
    return int(number(text) * GIB)
