"""Reads adapter_config.json, and rejects by name every option that would change outputs and is not supported."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from radixkv.config.regular_file import read_regular
from radixkv.errors import InvalidAdapter
from radixkv.invocation import MAX_INVOKED_VOCAB

T = TypeVar("T")  # a rank, or an alpha

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 2**20

# Fields about training or naming, which do not change outputs. The tensors show which layers are adapted.
_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode", "task_type"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"),
        *("lora_dropout", "runtime_config", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
        *("eva_config", "loftq_config"),
    }
)
_READ_FIELDS = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "alora_invocation_tokens"),
        *("bias", "init_lora_weights"),
    }
)

# Initializations of an adapter that leave the base model's weights unchanged. Others subtract the adapter from them.
_PLAIN_INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class LoraFields:
    """The fields of adapter_config.json that change outputs.

    Attributes:
        rank: rank of the low-rank matrices.
        alpha: numerator of the scale.
        is_rank_stabilized: whether the scale is alpha / sqrt(rank) (rsLoRA) instead of alpha / rank.
        ranks, alphas: overrides for layers, by a regular expression that matches the end of the layer's name.
        invocation_token_ids: the adapter applies from the last occurrence of these tokens in the prompt; None if it
            applies to the whole prompt.
    """

    rank: int
    alpha: float
    is_rank_stabilized: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    invocation_token_ids: tuple[int, ...] | None

    def rank_of(self, layer: str) -> int:
        """Return the rank of a layer, given its name."""
        return _first_match(self.ranks, layer, self.rank)

    def scale_of(self, layer: str) -> float:
        """Return the scale of a layer, given its name."""
        rank = self.rank_of(layer)
        divisor = math.sqrt(rank) if self.is_rank_stabilized else rank
        return _first_match(self.alphas, layer, self.alpha) / divisor


def read_config(directory: Path, vocab_size: int) -> LoraFields:
    """Read and check adapter_config.json.

    Args:
        directory: directory of the adapter.
        vocab_size: token ids of the model are below this.

    Raises:
        InvalidAdapter: the file is missing, can't be read, or requires something that is not supported.
    """
    tree = _read_tree(directory / CONFIG_FILE)
    _require(tree, "peft_type", tree.get("peft_type") == "LORA", "LORA")
    task = tree.get("task_type")
    _require(tree, "task_type", task is None or task == "CAUSAL_LM", "CAUSAL_LM")
    _require(tree, "bias", tree.get("bias", "none") == "none", "none")
    init = tree.get("init_lora_weights", True)
    # `1 in (True, ...)` would be true, so only strings are compared by value.
    is_plain = any(init is each or (isinstance(each, str) and init == each) for each in _PLAIN_INITIALIZATIONS)
    _require(tree, "init_lora_weights", is_plain, "true, false, gaussian, eva or orthogonal")
    for name in sorted(tree.keys() - _READ_FIELDS - _WITHOUT_EFFECT):
        _require(tree, name, not tree[name], "none, since it is not supported")
    rslora = tree.get("use_rslora", False)
    _require(tree, "use_rslora", isinstance(rslora, bool), "true or false")
    rank, alpha = tree.get("r", 8), tree.get("lora_alpha", 8)
    _require(tree, "r", _is_count(rank), "a positive integer")
    _require(tree, "lora_alpha", _is_number(alpha), "a number")
    return LoraFields(
        rank=rank,
        alpha=float(alpha),
        is_rank_stabilized=rslora,
        ranks=_value_patterns(tree, "rank_pattern", is_count=True),
        alphas=_value_patterns(tree, "alpha_pattern", is_count=False),
        invocation_token_ids=_invocation_token_ids(tree, vocab_size),
    )


def require_files(directory: Path) -> None:
    """Check that a directory has the files of an adapter, without reading them.

    Raises:
        InvalidAdapter: a file is missing.
    """
    for name in (CONFIG_FILE, TENSOR_FILE):
        if not (directory / name).is_file():
            raise missing_file(name)


def missing_file(name: str) -> InvalidAdapter:
    """Return the error for a missing file."""
    return InvalidAdapter(f"{name}: expected a file in the adapter's directory, got none")


def _read_tree(file: Path) -> dict[str, Any]:
    try:
        size = file.stat().st_size
        if size > _MAX_CONFIG_BYTES:
            raise InvalidAdapter(f"{CONFIG_FILE}: expected at most {_MAX_CONFIG_BYTES} bytes, got {size}")
        tree = json.loads(read_regular(file, _MAX_CONFIG_BYTES).decode())
    except FileNotFoundError:
        raise missing_file(CONFIG_FILE) from None
    except OSError as error:
        raise InvalidAdapter(f"{CONFIG_FILE}: expected a readable file, got: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidAdapter(f"{CONFIG_FILE}: expected a JSON object, got text that is not JSON") from error
    if not isinstance(tree, dict):
        raise InvalidAdapter(f"{CONFIG_FILE}: expected a JSON object, got {type(tree).__name__}")
    return tree


def _require(tree: Mapping[str, Any], name: str, holds: bool, expected: str) -> None:
    if not holds:
        got = tree.get(name)
        raise InvalidAdapter(f"{CONFIG_FILE} {name}: expected {expected}, got {_shown(got)}")


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"{type(value).__name__} of {len(value)}"
    return str(value)[:100] if isinstance(value, str) else json.dumps(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any) -> bool:
    # An integer beyond the largest float would make `math.isfinite` raise an OverflowError.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _value_patterns(tree: Mapping[str, Any], name: str, *, is_count: bool) -> dict[str, Any]:
    patterns = tree.get(name) or {}
    is_value = _is_count if is_count else _is_number
    holds = isinstance(patterns, dict) and all(map(is_value, patterns.values()))
    _require(tree, name, holds, f"{'positive integers' if is_count else 'numbers'} keyed by regular expressions")
    try:
        for pattern in patterns:
            re.compile(pattern)
    except re.error as error:
        raise InvalidAdapter(f"{CONFIG_FILE} {name}: expected regular expressions, got {pattern!r}") from error
    return dict(patterns)


def _first_match(patterns: Mapping[str, T], layer: str, default: T) -> T:
    """Return the value of the first pattern that matches the end of a layer's name, as peft does."""
    matching = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", layer))
    return next(matching, default)


def _invocation_token_ids(tree: Mapping[str, Any], vocab_size: int) -> tuple[int, ...] | None:
    tokens = tree.get("alora_invocation_tokens")
    if tokens is None:
        return None
    name = "alora_invocation_tokens"
    if vocab_size > MAX_INVOKED_VOCAB:
        raise InvalidAdapter(
            f"{CONFIG_FILE} {name}: expected a model of at most {MAX_INVOKED_VOCAB} token ids, got {vocab_size}"
        )
    holds = isinstance(tokens, list) and bool(tokens)
    _require(tree, name, holds, "at least one token id")
    are_ids = all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < vocab_size for each in tokens)
    if not are_ids:
        raise InvalidAdapter(f"{CONFIG_FILE} {name}: expected token ids below {vocab_size}, got others")
    return tuple(tokens)
