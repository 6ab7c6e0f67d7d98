"""Reads the shape of a model's K/V and the size of its weights from a model directory, without loading the model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.config.model_directory import INDEX, read_object, shown
from radixkv.config.sequence_limit import NO_LIMIT, SequenceLimit, sequence_limit, use_long_factors
from radixkv.errors import ConfigError
from radixkv.model_files.gguf_config import model_config
from radixkv.model_files.gguf_file import GgufFile, has_magic
from radixkv.model_files.hub_cache import HubName
from radixkv.model_files.model_location import locate
from radixkv.planning.quantized_weights import gguf_weights_bytes, weight_files
from radixkv.storage.kv_layout import FORMAT_OF_DTYPE, HeadKV, KVFormat

# Kinds of attention layers that store the same K/V.
_SAME_KV_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
# Layers of short convolutions, and the key with their width in tokens.
_SHORT_CONV, _CONV_WIDTH = "conv", "conv_L_cache"
# Model types whose sliding-window layers store K/V of another shape, and the keys that describe it.
_SLIDING_DIFFERS = {
    "gemma4_text": {"global_head_dim", "num_global_key_value_heads", "per_layer_config"},
    "mimo_v2_flash": {"swa_num_key_value_heads"},
}
_GEMMA4_GLOBAL_HEAD_DIM = 512  # the default without an entry in config.json
# Keys of models whose layers store different K/V, for which a guess would give plausible but wrong numbers.
_UNEQUAL_LAYER_KEYS = (
    "attn_layer_indices",
    "attn_layer_period",
    "block_configs",
    "full_attention_interval",
    "global_head_dim",
    "hybrid_override_pattern",
    "layers_block_type",
    "num_global_key_value_heads",
    "num_kv_shared_layers",
    "per_layer_config",
    "swa_head_dim",
    "swa_num_key_value_heads",
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The sizes in the files of a model. A field is None if the files do not contain it.

    Attributes:
        num_layers: `num_hidden_layers`, without layers of short convolutions; of LongCat-Flash twice its `num_layers`.
        num_query_heads: `num_attention_heads`.
        num_kv_heads: `num_key_value_heads`, or `num_query_heads` without this field; 1 for an old Falcon with
            `multi_query`. If layers of sliding attention differ, this and `head_dim` describe the layers of full
            attention.
        head_dim: `head_dim`, or `hidden_size` divided by the query heads; `v_head_dim` of latent attention.
        mla_rank: `kv_lora_rank`.
        rope_dim: `qk_rope_head_dim` of latent attention.
        dtype: `dtype` or `torch_dtype`, by its name in `KVFormat`; None if K/V can't be stored in it.
        weights_bytes: the size in the safetensors index; without an index, the size of the files. For a GGUF file, the
            size in the memory of a CPU.
        state_bytes: size of the last inputs of short convolutions (`conv_L_cache`), which each sequence keeps in
            `dtype` or bf16.
        window: tokens that a query of a windowed layer sees.
        num_windowed_layers: layers of `layer_types` with a window shorter than the longest sequence; in a Mistral with
            such a window, all layers. 0 if the files do not say which layers they are.
        sliding: the layers of sliding attention, if they store other K/V than the others; None if all are alike.
        limit: the longest sequence that is served.
    """

    num_layers: int | None = None
    num_query_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mla_rank: int | None = None
    rope_dim: int | None = None
    dtype: str | None = None
    weights_bytes: int | None = None
    state_bytes: int | None = None
    window: int | None = None
    num_windowed_layers: int = 0
    sliding: HeadKV | None = None
    limit: SequenceLimit = NO_LIMIT


def read_checkpoint(path: str | Path, longrope: str = "short") -> Checkpoint:
    """Read a model's config.json and the size of its weights, or both from a GGUF file.

    The text part of a multimodal model is read. GPT-2's names (`n_layer`, `n_head`, `n_embd`) are accepted.

    Args:
        path: a directory with a config.json, the config.json itself, or any other location that `locate` accepts.
        longrope: a value of `model.longrope`.

    Raises:
        ConfigError: a file can't be read, a field has the wrong type or range, layers store different K/V, or
            `longrope` is `long` for a model without longrope. The message names the file and the field.
    """
    file, config, weights_bytes = _read_model_files(path)
    text_config = config if config.get("text_config") is None else config["text_config"]
    if not isinstance(text_config, dict):
        raise ConfigError(f"{file}: text_config: expected an object, got {shown(text_config)}")
    if longrope == "long" and not use_long_factors(text_config):
        raise ConfigError(f'{file}: expected a model with longrope for model.longrope = "long", got another')
    fields = _Fields(file, text_config)
    fields.require_equal_layers()
    num_query_heads = fields.size("num_attention_heads", "n_head")
    mla_rank = fields.size("kv_lora_rank")
    dtype = _dtype(text_config, config)
    num_layers = _num_attending_layers(fields)
    num_windowed_layers = _num_windowed_layers(fields, num_layers or 0)
    num_kv_heads = _num_kv_heads(fields) or num_query_heads
    head_dim = _head_dim(fields, num_query_heads) if mla_rank is None else fields.size("v_head_dim")
    sliding = None
    if fields.values.get("model_type") in _SLIDING_DIFFERS and num_layers and num_kv_heads and head_dim:
        sliding, num_kv_heads, head_dim = _sliding_and_full_heads(fields, num_layers, num_kv_heads, head_dim)
    return Checkpoint(
        num_layers=num_layers,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mla_rank=mla_rank,
        rope_dim=None if mla_rank is None else fields.size("qk_rope_head_dim"),
        dtype=dtype,
        weights_bytes=weights_bytes,
        state_bytes=_state_bytes(fields, dtype),
        window=fields.size("sliding_window") if num_windowed_layers else None,
        num_windowed_layers=num_windowed_layers,
        sliding=sliding,
        limit=sequence_limit(text_config),
    )


def _read_model_files(path: str | Path) -> tuple[Path, dict[str, Any], int | None]:
    """Return the file that describes a model, its configuration, and the size of the weights in memory."""
    # `os.path` returns False for a name that is too long; `Path` would raise an OSError.
    is_directory, is_file = os.path.isdir(path), os.path.isfile(path)
    is_gguf = has_magic(Path(path)) if is_file else str(path).lower().endswith(".gguf")
    if is_gguf or (not is_directory and not is_file and HubName.parse(str(path))):
        location = locate(path)
        if location.is_gguf:
            file = GgufFile.read(location.path)
            return location.path, model_config(file), gguf_weights_bytes(file)
        path, is_directory = location.path, True
    config_file = Path(path) / "config.json" if is_directory else Path(path)
    return config_file, read_object(config_file), _weights_bytes(config_file.parent)


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of a configuration, and the file that contains it, for error messages."""

    file: Path
    values: dict[str, Any]

    def size(self, *names: str) -> int | None:
        """Return the first of these fields that is not null, an integer of at least 1; None if all are null."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{self.file}: {name}: expected an integer of at least 1, got {shown(value)}")
            return value
        return None

    def supported_layer_kinds(self) -> set[str]:
        """Return the supported kinds of layers: attention with equal K/V, and convolutions without K/V."""
        return _SAME_KV_KINDS | {_SHORT_CONV} if self.size(_CONV_WIDTH) else _SAME_KV_KINDS

    def num_short_convs(self) -> int:
        """Count the layers of short convolutions."""
        num_layers = self.size("num_hidden_layers")
        if self.size(_CONV_WIDTH) is None or num_layers is None:
            return 0
        types: list[object] | None = self.values.get("layer_types")
        if types is not None:
            return types[:num_layers].count(_SHORT_CONV)
        attention_layers = self.values.get("full_attn_idxs")  # older files have it instead of `layer_types`
        if attention_layers is None:
            return 0
        if not isinstance(attention_layers, list) or not {*attention_layers} <= {*range(num_layers)}:
            raise ConfigError(
                f"{self.file}: full_attn_idxs: expected a list of indices below {num_layers}, got "
                f"{shown(attention_layers)}"
            )
        return num_layers - len({*attention_layers})

    def require_equal_layers(self) -> None:
        """Refuse a model whose layers store different K/V, except for differences in `_SLIDING_DIFFERS`.

        Raises:
            ConfigError: the message names the key that describes the difference.
        """
        supported_keys = _SLIDING_DIFFERS.get(str(self.values.get("model_type")), set())
        refused_keys = [key for key in _UNEQUAL_LAYER_KEYS if self.values.get(key) and key not in supported_keys]
        types = self.values.get("layer_types") or []
        if not isinstance(types, list) or not {str(each) for each in types} <= self.supported_layer_kinds():
            refused_keys.append("layer_types")
        if refused_keys:
            key = refused_keys[0]
            raise ConfigError(
                f"{self.file}: {key}: expected layers that all store the same K/V, got {shown(self.values[key])}"
            )


def _dtype(*configs: dict[str, Any]) -> str | None:
    """Return the dtype of the first configuration that names one; None without one, or if K/V can't be stored in it."""
    for config in configs:
        for name in ("dtype", "torch_dtype"):
            if config.get(name) is not None:
                return FORMAT_OF_DTYPE.get(str(config[name]).removeprefix("torch."))
    return None


def _num_attending_layers(fields: _Fields) -> int | None:
    """Count the layers that store K/V; None if there are none, or if the files do not contain the number of layers."""
    num_layers = _num_layers(fields)
    return None if num_layers is None else (num_layers - fields.num_short_convs()) or None


def _state_bytes(fields: _Fields, dtype: str | None) -> int | None:
    num_layers, width, num_channels = fields.num_short_convs(), fields.size(_CONV_WIDTH), fields.size("hidden_size")
    if not num_layers or width is None or num_channels is None:
        return None
    return KVFormat(dtype or "bf16").bytes_of(0, num_layers * (width - 1) * num_channels)


def _num_layers(fields: _Fields) -> int | None:
    if fields.values.get("model_type") == "longcat_flash":  # each layer attends twice, and stores K/V twice
        num_pairs = fields.size("num_layers")
        return None if num_pairs is None else 2 * num_pairs
    return fields.size("num_hidden_layers", "n_layer")


def _num_windowed_layers(fields: _Fields, num_layers: int) -> int:
    """Count the layers whose window is shorter than the longest sequence, as far as the file says which they are."""
    window, max_tokens = fields.values.get("sliding_window"), fields.values.get("max_position_embeddings")
    if not window or (isinstance(max_tokens, int) and isinstance(window, int) and window >= max_tokens):
        return 0
    if fields.values.get("model_type") == "mistral":
        return num_layers
    types: list[str] = fields.values.get("layer_types") or []
    return types.count("sliding_attention")


def _sliding_and_full_heads(
    fields: _Fields, num_layers: int, num_kv_heads: int, head_dim: int
) -> tuple[HeadKV | None, int, int]:
    """Return the shape of the sliding layers, and number and size of the K/V heads of the full-attention layers.

    The shape is None if all layers are alike.

    Raises:
        ConfigError: layers of one kind differ.
    """
    types, num_query_heads = fields.values.get("layer_types"), fields.size("num_attention_heads")
    if not isinstance(types, list) or len(types) != num_layers:
        raise ConfigError(f"{fields.file}: layer_types: expected a list of {num_layers} kinds, got {shown(types)}")
    heads_of_kind: dict[str, set[tuple[int, int]]] = {}
    for layer, kind in enumerate(types):
        heads = _heads_of(fields, layer, kind == "sliding_attention", num_kv_heads, head_dim)
        heads_of_kind.setdefault(kind, set()).add(heads)
    if any(len(each) > 1 for each in heads_of_kind.values()):
        raise ConfigError(f"{fields.file}: per_layer_config: expected the same K/V in all layers of a kind, got others")
    sliding = next(iter(heads_of_kind.get("sliding_attention", ())), None)
    full = next(iter(heads_of_kind.get("full_attention", ())), None)
    if sliding is None or full is None or sliding == full:
        num_kv_heads, head_dim = full or sliding or (num_kv_heads, head_dim)
        return None, num_kv_heads, head_dim
    return HeadKV(types.count("sliding_attention"), *sliding, num_query_heads), *full


def _heads_of(fields: _Fields, layer: int, is_sliding: bool, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Return number and size of the K/V heads of a layer of a model type in `_SLIDING_DIFFERS`.

    Args:
        fields, layer, is_sliding: the model, the index of the layer, and whether it has sliding attention.
        num_kv_heads, head_dim: the values for the whole model, which some fields replace for some layers.
    """
    if fields.values["model_type"] == "mimo_v2_flash":
        sliding_heads = fields.size("swa_num_key_value_heads") or 2 * num_kv_heads
        return sliding_heads if is_sliding else num_kv_heads, head_dim
    layer_configs = fields.values.get("per_layer_config")
    if isinstance(layer_configs, dict):
        layer_fields = _Fields(fields.file, layer_configs.get(str(layer)) or {})
        return layer_fields.size("num_key_value_heads") or num_kv_heads, layer_fields.size("head_dim") or head_dim
    if is_sliding:
        return num_kv_heads, head_dim
    # Gemma 4 calls its layers of full attention global.
    num_global_heads = fields.size("num_global_key_value_heads") if fields.values.get("attention_k_eq_v") else None
    return num_global_heads or num_kv_heads, fields.size("global_head_dim") or _GEMMA4_GLOBAL_HEAD_DIM


def _num_kv_heads(fields: _Fields) -> int | None:
    if fields.values.get("multi_query") is True and not fields.values.get("new_decoder_architecture"):  # old Falcon
        return 1
    return fields.size("num_key_value_heads", "num_kv_heads")


def _head_dim(fields: _Fields, num_query_heads: int | None) -> int | None:
    head_dim = fields.size("head_dim")
    hidden_size = fields.size("hidden_size", "n_embd")
    if head_dim is not None or hidden_size is None or num_query_heads is None:
        return head_dim
    if hidden_size % num_query_heads:
        raise ConfigError(
            f"{fields.file}: hidden_size: expected a multiple of num_attention_heads {num_query_heads} where there is "
            f"no head_dim, got {hidden_size}"
        )
    return hidden_size // num_query_heads


def _weights_bytes(directory: Path) -> int | None:
    index = directory / INDEX
    if index.is_file():
        metadata = read_object(index).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if isinstance(total, int | float) and not isinstance(total, bool) and 1 <= total < 2**63:
            return int(total)
    return sum(file.stat().st_size for file in weight_files(directory)) or None
