from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from radixkv.errors import InvalidAdapter
from radixkv.model.adapters.adapter_config import LoraFields, read_config

LAYER = "model.layers.1.self_attn.q_proj"


def read(directory: Path, **fields: Any) -> LoraFields:
    """Write a valid adapter_config.json with these fields added or replaced, and read it."""
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 16, **fields}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return read_config(directory, vocab_size=300)


def test_the_scale_is_alpha_over_rank_or_over_its_square_root(tmp_path: Path) -> None:
    assert read(tmp_path).scale_of(LAYER) == 4.0
    assert read(tmp_path, use_rslora=True).scale_of(LAYER) == 16 / math.sqrt(4)


def test_patterns_match_the_end_of_a_name(tmp_path: Path) -> None:
    config = read(tmp_path, rank_pattern={"q_proj": 8, r"layers\.1\..*": 2}, alpha_pattern={r"mlp\..*": 1.5})
    assert (config.rank_of(LAYER), config.scale_of(LAYER)) == (8, 2.0)
    assert config.rank_of("model.layers.1.mlp.up_proj") == 2
    assert config.scale_of("model.layers.0.mlp.up_proj") == 1.5 / 4
    assert config.rank_of("model.layers.0.xq_proj") == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type: expected LORA, got IA3"),
        ({"task_type": "SEQ_CLS"}, "task_type: expected CAUSAL_LM, got SEQ_CLS"),
        ({"bias": "all"}, "bias: expected none, got all"),
        ({"use_dora": True}, "use_dora: expected none, since it is not supported, got true"),
        ({"lora_bias": True}, "lora_bias: expected none"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: expected none, since it is not supported, got list of 1"),
        ({"target_parameters": ["experts"]}, "target_parameters: expected none"),
        ({"layer_replication": [[0, 2]]}, "layer_replication: expected none"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices: expected none"),
        ({"a_field_of_tomorrow": {"x": 1}}, "a_field_of_tomorrow: expected none"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: expected true, false, gaussian, eva or orthogonal"),
        ({"init_lora_weights": 1}, "init_lora_weights: expected true"),
        ({"r": 0}, "r: expected a positive integer, got 0"),
        ({"r": True}, "r: expected a positive integer, got true"),
        ({"lora_alpha": "x"}, "lora_alpha: expected a number, got x"),
        ({"lora_alpha": 10**400}, "lora_alpha: expected a number, got 10000"),
        ({"lora_alpha": float("inf")}, "lora_alpha: expected a number, got Infinity"),
        ({"rank_pattern": {"q": 0}}, "rank_pattern: expected positive integers keyed by regular expressions"),
        ({"alpha_pattern": [1]}, "alpha_pattern: expected numbers keyed by regular expressions, got list of 1"),
        ({"rank_pattern": {"(": 2}}, r"rank_pattern: expected regular expressions, got '\('"),
        ({"use_rslora": "yes"}, "use_rslora: expected true or false, got yes"),
        ({"alora_invocation_tokens": []}, "alora_invocation_tokens: expected at least one token id, got list of 0"),
        ({"alora_invocation_tokens": [1, 300]}, "alora_invocation_tokens: expected token ids below 300, got others"),
    ],
)
def test_unsupported_fields_are_rejected_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidAdapter, match=rf"^adapter_config\.json {message}"):
        read(tmp_path, **fields)


def test_activated_adapters_need_a_vocabulary_that_leaves_room_for_marks(tmp_path: Path) -> None:
    config = read(tmp_path, alora_invocation_tokens=[1])
    assert config.invocation_token_ids == (1,)
    with pytest.raises(
        InvalidAdapter, match="alora_invocation_tokens: expected a model of at most 1048576 token ids, got 1048577"
    ):
        read_config(tmp_path, 2**20 + 1)


def test_fields_without_effect_may_have_any_value(tmp_path: Path) -> None:
    fields = {"lora_dropout": 0.5, "target_modules": "all-linear", "fan_in_fan_out": True, "a_field_of_tomorrow": None}
    assert read(tmp_path, **fields) == read(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '"\udcff"'])
def test_a_file_that_is_not_a_json_object_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "adapter_config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(InvalidAdapter, match=r"^adapter_config\.json: expected a JSON object"):
        read_config(tmp_path, 300)


def test_a_missing_or_huge_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapter, match=r"^adapter_config\.json: expected a file"):
        read_config(tmp_path, 300)
    (tmp_path / "adapter_config.json").write_text(" " * (2**20 + 1))
    with pytest.raises(InvalidAdapter, match=r"^adapter_config\.json: expected at most 1048576 bytes, got 1048577"):
        read_config(tmp_path, 300)
