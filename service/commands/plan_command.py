"""`radixkv plan`: its flags, and what they mean."""

from __future__ import annotations

import argparse
import dataclasses
import math
from decimal import Decimal, InvalidOperation
from typing import Any

from radixkv.config import CacheConfig
from radixkv.errors import ConfigError
from radixkv.planning.checkpoint import Checkpoint, read_checkpoint
from radixkv.planning.plan import GB, GIB, BlockUse, DecodingCost, DeviceMemory, PrefixSharing
from radixkv.service.commands import plan_report
from radixkv.service.commands.plan_report import Group
from radixkv.storage.kv_layout import FORMAT_OF_DTYPE, HeadKV, KVFormat, KVLayout, LatentKV, attention_kinds

_MOST = 2**50  # larger numbers are typing errors
_SUFFIXES = {"k": 2**10, "m": 2**20}

# The flag, and what config.json calls it, for each field of a Checkpoint that a layout needs.
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
        description="Memory and concurrency of a K/V cache. Counts of tokens take k = 1024 and m = 1024k: 128k is "
        "131072; write 128000 out. GB is 10^9 bytes and GiB is 2^30. The model comes from --model, from the flags, or "
        "from both: a flag wins.",
    )
    _add_model(plan)
    _add_load(plan)
    _add_device(plan)
    plan.add_argument("--json", action="store_true", help="one flat object, units in the names")
    plan.set_defaults(command=_plan)


def _add_model(plan: argparse.ArgumentParser) -> None:
    model = plan.add_argument_group("the model")
    model.add_argument("--model", metavar="DIR|FILE", help="a directory with a config.json, or such a file")
    model.add_argument("--layers", metavar="N", type=_count)
    model.add_argument("--query-heads", metavar="N", type=_count)
    model.add_argument("--kv-heads", metavar="N", type=_count, help="default: as many as query heads")
    model.add_argument("--head-dim", metavar="N", type=_count)
    model.add_argument("--mla-rank", metavar="N", type=_count, help="latent attention: numbers in the latent")
    model.add_argument("--rope-dim", metavar="N", type=_count, help="... and in the rotary key beside it")
    model.add_argument(
        "--dtype", metavar="D", help="fp32, bf16, fp16, fp8, int8, fp4, int4; default: the model's, or bf16"
    )
    model.add_argument("--scales", action="store_true", help="count a float32 scale for each stored vector")
    model.add_argument("--tp", metavar="N", type=_count, default=1, help="ranks of tensor parallelism")


def _add_load(plan: argparse.ArgumentParser) -> None:
    load = plan.add_argument_group("the load")
    load.add_argument("--batch", metavar="N", type=_count, default=1, help="sequences at the same time")
    load.add_argument("--context", metavar="N", type=_count, default=8192, help="tokens of a sequence; default: 8k")
    load.add_argument(
        "--block-size", metavar="N", type=_count, default=CacheConfig().block_size, help="tokens; default: 64"
    )
    load.add_argument("--shared-prefix", metavar="N", type=_count, help="tokens that --requests begin with alike")
    load.add_argument("--requests", metavar="N", type=_count, help="requests that begin with --shared-prefix")
    load.add_argument("--new-tokens", metavar="N", type=_count, help="compare decoding without and with a cache")


def _add_device(plan: argparse.ArgumentParser) -> None:
    device = plan.add_argument_group("one device")
    memory = device.add_mutually_exclusive_group()
    memory.add_argument("--memory-gb", metavar="X", dest="memory_bytes", type=_gb, help="say who fits; its memory")
    memory.add_argument("--memory-gib", metavar="X", dest="memory_bytes", type=_gib, help="the same in GiB")
    device.add_argument("--weights-gb", metavar="X", type=_gb, help="of all ranks; default: the safetensors of --model")
    device.add_argument("--overhead-gb", metavar="X", type=_gb, help="activations, CUDA context, graphs; default: 0")
    device.add_argument("--user-gb", metavar="X", type=_gb, help="K/V of a user on it; default: blocks for --context")
    device.add_argument("--params-b", metavar="X", type=_positive, help="billions; compare loading K/V with computing")
    device.add_argument("--tflops", metavar="X", type=_positive, default=989.0, help="default: H100, dense bf16, peak")
    device.add_argument("--pcie-gb-s", metavar="X", type=_positive, default=40.0, help="default: 40")
    device.add_argument("--hbm-gb-s", metavar="X", type=_positive, default=3350.0, help="default: 3350, H100 SXM")


def _plan(arguments: argparse.Namespace) -> None:
    groups = _groups(arguments, _model(arguments))
    print(plan_report.json_of(groups) if arguments.json else plan_report.text_of(groups))


def _model(arguments: argparse.Namespace) -> Checkpoint:
    """What --model says, and what the flags say better."""
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


def _count(text: str) -> int:
    digits, unit = (text[:-1], _SUFFIXES[text[-1].lower()]) if text[-1:].lower() in _SUFFIXES else (text, 1)
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 16 and 1 <= int(digits) * unit <= _MOST):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, such as 8192 or 8k, got {text}")
    return int(digits) * unit


def _gb(text: str) -> int:
    return _bytes(text, GB)


def _gib(text: str) -> int:
    return _bytes(text, GIB)


def _bytes(text: str, unit: int) -> int:
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("NaN")
    if not (value.is_finite() and 0 <= value <= _MOST):
        raise argparse.ArgumentTypeError(f"expected a number from 0, got {text}")
    return int(value * unit)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return value
