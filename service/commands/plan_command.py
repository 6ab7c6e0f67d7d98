"""`radixkv plan`: its options, and the groups of numbers that they ask for."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from radixkv.config import CacheConfig
from radixkv.errors import ConfigError
from radixkv.planning.checkpoint import Checkpoint, read_checkpoint
from radixkv.planning.plan import GB, GIB, BlockUse, DecodingCost, DeviceMemory, PrefixSharing
from radixkv.service.commands import plan_report
from radixkv.service.commands.argument_types import COUNTS, number, positive_number, whole
from radixkv.service.commands.plan_report import Group
from radixkv.storage.kv_layout import FORMAT_OF_DTYPE, HeadKV, KVFormat, KVLayout, LatentKV, attention_kinds

# The flag and the name in config.json, for each field of a Checkpoint that a layout needs.
_NAMES = {
    "num_layers": ("--layers", "num_hidden_layers"),
    "num_kv_heads": ("--kv-heads", "num_key_value_heads"),
    "head_dim": ("--head-dim", "head_dim"),
    "mla_rank": ("--mla-rank", "kv_lora_rank"),
    "rope_dim": ("--rope-dim", "qk_rope_head_dim"),
}


def add_plan_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add `plan` to the commands of a parser."""
    plan: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="memory and concurrency of a K/V cache",
        description=f"Memory and concurrency of a K/V cache. {COUNTS} GB is 10^9 bytes and GiB is 2^30. "
        "The model comes from --model, from the flags, or from both: a flag wins.",
    )
    _add_model(plan)
    _add_load(plan)
    _add_device(plan)
    plan.add_argument("--json", action="store_true", help="one flat object, units in the names")
    plan.set_defaults(command=_plan)


def _add_model(plan: argparse.ArgumentParser) -> None:
    model = plan.add_argument_group("the model", "Sizes that are not given are those of --model.")
    model.add_argument(
        "--model", metavar="DIR|FILE", help="a directory with a config.json, or that file (default: none)"
    )
    model.add_argument("--layers", metavar="N", type=whole, help="layers of the model (default: the model's)")
    model.add_argument("--query-heads", metavar="N", type=whole, help="query heads of a layer (default: the model's)")
    model.add_argument(
        "--kv-heads",
        metavar="N",
        type=whole,
        help="K/V heads of a layer (default: the model's, or as many as query heads)",
    )
    model.add_argument("--head-dim", metavar="N", type=whole, help="numbers of a head (default: the model's)")
    model.add_argument(
        "--mla-rank", metavar="N", type=whole, help="numbers in a latent (default: the model's, or none)"
    )
    model.add_argument(
        "--rope-dim", metavar="N", type=whole, help="numbers in the rotary key beside a latent (default: the model's)"
    )
    model.add_argument(
        "--dtype", metavar="D", help="fp32, bf16, fp16, fp8, int8, fp4, int4 (default: the model's, or bf16)"
    )
    model.add_argument("--scales", action="store_true", help="count a float32 scale for each stored vector")
    model.add_argument("--tp", metavar="N", type=whole, default=1, help="ranks of tensor parallelism")


def _add_load(plan: argparse.ArgumentParser) -> None:
    load = plan.add_argument_group("the load")
    load.add_argument("--batch", metavar="N", type=whole, default=1, help="sequences at the same time")
    load.add_argument("--context", metavar="N", type=whole, default=8192, help="tokens of a sequence")
    load.add_argument(
        "--block-size", metavar="N", type=whole, default=CacheConfig().block_size, help="tokens of a block"
    )
    load.add_argument("--shared-prefix", metavar="N", type=whole, help="tokens that --requests share (default: none)")
    load.add_argument("--requests", metavar="N", type=whole, help="requests that share --shared-prefix (default: none)")
    load.add_argument(
        "--new-tokens",
        metavar="N",
        type=whole,
        help="compare decoding N tokens without and with a cache (default: not)",
    )


def _add_device(plan: argparse.ArgumentParser) -> None:
    device = plan.add_argument_group("one device")
    memory = device.add_mutually_exclusive_group()
    memory.add_argument(
        "--memory-gb",
        metavar="X",
        dest="memory_bytes",
        type=_gb,
        help="its memory; prints how many users fit (default: not asked)",
    )
    memory.add_argument(
        "--memory-gib", metavar="X", dest="memory_bytes", type=_gib, help="the same in GiB (default: not asked)"
    )
    device.add_argument(
        "--weights-gb", metavar="X", type=_gb, help="of all ranks (default: the safetensors of --model)"
    )
    device.add_argument("--overhead-gb", metavar="X", type=_gb, help="activations, CUDA context, graphs (default: 0)")
    device.add_argument("--user-gb", metavar="X", type=_gb, help="K/V of a user on it (default: blocks for --context)")
    device.add_argument(
        "--params-b",
        metavar="X",
        type=positive_number,
        help="billions of parameters; compare loading K/V with computing it (default: not)",
    )
    device.add_argument(
        "--tflops", metavar="X", type=positive_number, default=989.0, help="dense bf16 at peak; an H100 has the default"
    )
    device.add_argument("--pcie-gb-s", metavar="X", type=positive_number, default=40.0, help="rate from the host")
    device.add_argument(
        "--hbm-gb-s",
        metavar="X",
        type=positive_number,
        default=3350.0,
        help="its memory's rate; an H100 SXM has the default",
    )


def _plan(arguments: argparse.Namespace) -> None:
    groups = _groups(arguments, _model(arguments))
    print(plan_report.json_of(groups) if arguments.json else plan_report.text_of(groups))


def _model(arguments: argparse.Namespace) -> Checkpoint:
    """Return the sizes in --model, replaced by those of the flags."""
    model = Checkpoint(dtype="bf16") if arguments.model is None else read_checkpoint(arguments.model)
    given = {
        "num_layers": arguments.layers,
        "num_query_heads": arguments.query_heads,
        "num_kv_heads": arguments.kv_heads,
        "head_dim": arguments.head_dim,
        "mla_rank": arguments.mla_rank,
        "rope_dim": arguments.rope_dim,
        "dtype": arguments.dtype and FORMAT_OF_DTYPE.get(arguments.dtype, arguments.dtype),
        "weights_bytes": arguments.weights_gb,
    }
    model = dataclasses.replace(model, **{name: value for name, value in given.items() if value is not None})
    if model.num_kv_heads is None:
        model = dataclasses.replace(model, num_kv_heads=model.num_query_heads)
    return model


def _groups(arguments: argparse.Namespace, model: Checkpoint) -> list[Group]:
    layout = _layout(model)
    if model.dtype is None:
        raise ConfigError("dtype: expected --dtype, or float32, bfloat16 or float16 in the config.json, got neither")
    kv_format = KVFormat(model.dtype, arguments.scales)
    token_bytes, rank_token_bytes = layout.token_bytes(kv_format), layout.rank_token_bytes(kv_format, arguments.tp)
    groups = [
        plan_report.token_group(layout, kv_format, arguments.tp),
        plan_report.cache_group(arguments.batch, arguments.context, token_bytes, rank_token_bytes),
        _fit_group(arguments, model, rank_token_bytes),
        _kinds_group(model, layout, kv_format, arguments.batch * arguments.context),
        plan_report.blocks_group(BlockUse(arguments.context, arguments.block_size), token_bytes),
        _sharing_group(arguments, token_bytes),
        _transfer_group(arguments, token_bytes),
        _decoding_group(arguments, model),
    ]
    return [group for group in groups if group is not None]


def _layout(model: Checkpoint) -> KVLayout:
    is_latent = model.mla_rank is not None or model.rope_dim is not None
    needed = ("num_layers", "mla_rank", "rope_dim") if is_latent else ("num_layers", "num_kv_heads", "head_dim")
    sizes = [getattr(model, name) for name in needed]
    missing = [_NAMES[name] for name, size in zip(needed, sizes, strict=True) if size is None]
    if missing:
        flags, fields = (", ".join(names) for names in zip(*missing, strict=True))
        raise ConfigError(f"plan: expected {flags}, or a --model whose config.json has {fields}; got neither")
    if is_latent:
        return LatentKV(*sizes)
    num_layers, num_kv_heads, head_dim = sizes
    return HeadKV(num_layers, num_kv_heads, head_dim, model.num_query_heads)


def _fit_group(arguments: argparse.Namespace, model: Checkpoint, rank_token_bytes: int) -> Group | None:
    if arguments.memory_bytes is None:
        if not (arguments.weights_gb is arguments.overhead_gb is arguments.user_gb is None):
            raise ConfigError(
                "plan: expected --memory-gb or --memory-gib with --weights-gb, --overhead-gb or --user-gb, got neither"
            )
        return None
    if model.weights_bytes is None:
        raise ConfigError("plan: expected --weights-gb, or a --model directory with safetensors, got neither")
    device = DeviceMemory(arguments.memory_bytes, -(-model.weights_bytes // arguments.tp), arguments.overhead_gb or 0)
    user_bytes = arguments.user_gb
    if user_bytes is None:
        num_blocks = BlockUse(arguments.context, arguments.block_size).num_blocks
        user_bytes = num_blocks * arguments.block_size * rank_token_bytes
    return plan_report.fit_group(device, user_bytes, arguments.block_size, rank_token_bytes)


def _kinds_group(model: Checkpoint, layout: KVLayout, kv_format: KVFormat, num_tokens: int) -> Group:
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
