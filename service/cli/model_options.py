"""The options that determine the shape of a model's K/V: sizes, a config.json, or both."""

from __future__ import annotations

import argparse
import dataclasses
from importlib.resources import as_file, files

from radixkv.config import ModelConfig
from radixkv.config.sequence_limit import sequence_limit
from radixkv.errors import ConfigError
from radixkv.model.tiny_files import CONFIG
from radixkv.planning.checkpoint import Checkpoint, read_checkpoint
from radixkv.service.cli.argument_types import whole
from radixkv.service.cli.options import Option, flag
from radixkv.storage.kv_layout import FORMAT_OF_DTYPE, HeadKV, KVFormat, KVLayout, LatentKV, MixedKV

# For each field of a Checkpoint that a layout needs, the option and the name in config.json.
_NAMES = {
    "num_layers": ("--layers", "num_hidden_layers"),
    "num_kv_heads": ("--kv-heads", "num_key_value_heads"),
    "head_dim": ("--head-dim", "head_dim"),
    "mla_rank": ("--mla-rank", "kv_lora_rank"),
    "rope_dim": ("--rope-dim", "qk_rope_head_dim"),
}

MODEL_OPTIONS = (
    Option(
        "--model",
        "tiny|DIR|FILE|ORG/NAME",
        None,
        "the embedded model, a directory with a config.json, a config.json, a GGUF file, or a model of the Hugging "
        "Face Hub that is in the local cache (default: none)",
    ),
    Option("--layers", "N", whole, "number of layers (default: that of --model)"),
    Option("--query-heads", "N", whole, "query heads per layer (default: that of --model)"),
    Option("--kv-heads", "N", whole, "K/V heads per layer (default: that of --model, or --query-heads)"),
    Option("--head-dim", "N", whole, "dimension of a head (default: that of --model)"),
    Option("--mla-rank", "N", whole, "rank of the K/V latent of MLA (default: that of --model, or none)"),
    Option("--rope-dim", "N", whole, "dimension of the rotary key of MLA (default: that of --model)"),
    Option(
        "--dtype",
        "D",
        None,
        "K/V dtype: fp32, bf16, fp16, fp8, int8, k8v4, fp4, int4 (default: that of --model, or bf16)",
    ),
    Option(
        "--longrope",
        None,
        None,
        "RoPE factors of a --model with longrope, as model.longrope (default: short)",
        "short",
        {"choices": ("short", "long")},
    ),
    flag("--scales", "add a float32 scale for each vector"),
)


def model_of(arguments: argparse.Namespace) -> Checkpoint:
    """Return the sizes of --model, overridden by those of the other options.

    Raises:
        ConfigError: the model can't be read, or options set one shape for layers that have two.
    """
    model = Checkpoint(dtype="bf16") if arguments.model is None else _checkpoint(arguments)
    if model.sliding is not None and (arguments.layers or arguments.kv_heads or arguments.head_dim):
        raise ConfigError(
            "--layers, --kv-heads, --head-dim: can't be combined with a --model whose sliding layers store other K/V "
            "than its other layers"
        )
    overrides = {
        "num_layers": arguments.layers,
        "num_query_heads": arguments.query_heads,
        "num_kv_heads": arguments.kv_heads,
        "head_dim": arguments.head_dim,
        "mla_rank": arguments.mla_rank,
        "rope_dim": arguments.rope_dim,
        "dtype": arguments.dtype and FORMAT_OF_DTYPE.get(arguments.dtype, arguments.dtype),
    }
    model = dataclasses.replace(model, **{name: value for name, value in overrides.items() if value is not None})
    if model.num_kv_heads is None:
        model = dataclasses.replace(model, num_kv_heads=model.num_query_heads)
    return model


def _checkpoint(arguments: argparse.Namespace) -> Checkpoint:
    if arguments.model != ModelConfig().path:
        return read_checkpoint(arguments.model, arguments.longrope)
    return Checkpoint(
        num_layers=CONFIG["num_hidden_layers"],
        num_query_heads=CONFIG["num_attention_heads"],
        num_kv_heads=CONFIG["num_key_value_heads"],
        head_dim=CONFIG["head_dim"],
        dtype="fp32",
        weights_bytes=_tiny_weights_bytes(),
        limit=sequence_limit(CONFIG),
    )


def _tiny_weights_bytes() -> int:
    """Return the size of the embedded weights in float32, as they are served; their file has bfloat16."""
    with as_file(files("radixkv.model") / "tiny" / "weights.safetensors") as file:
        return 2 * file.stat().st_size


def layout_of(model: Checkpoint, subject: str) -> KVLayout:
    """Return the K/V layout of a model.

    Raises:
        ConfigError: a size is missing. The message begins with `subject`.
    """
    is_latent = model.mla_rank is not None or model.rope_dim is not None
    needed = ("num_layers", "mla_rank", "rope_dim") if is_latent else ("num_layers", "num_kv_heads", "head_dim")
    sizes = [getattr(model, name) for name in needed]
    missing = [_NAMES[name] for name, size in zip(needed, sizes, strict=True) if size is None]
    if missing:
        options = ", ".join(option for option, _ in missing)
        keys = ", ".join(key for _, key in missing)
        raise ConfigError(f"{subject}: requires {options}, or a --model whose config.json has {keys}")
    if is_latent:
        return LatentKV(*sizes)
    num_layers, num_kv_heads, head_dim = sizes
    if model.sliding is not None:
        num_other_layers = num_layers - model.sliding.num_layers
        return MixedKV(model.sliding, HeadKV(num_other_layers, num_kv_heads, head_dim, model.num_query_heads))
    return HeadKV(num_layers, num_kv_heads, head_dim, model.num_query_heads)


def format_of(model: Checkpoint, arguments: argparse.Namespace) -> KVFormat:
    """Return the K/V format of a model.

    Raises:
        ConfigError: no dtype is given, the dtype is unknown, or it has no scales.
    """
    if model.dtype is None:
        raise ConfigError("dtype: requires --dtype, or float32, bfloat16 or float16 in the config.json")
    return KVFormat(model.dtype, arguments.scales)
