from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from radixkv.config import CacheConfig, Config, EngineConfig, ModelConfig
from radixkv.errors import ConfigError
from radixkv.service.offline.settings import _VLLM_ARGUMENTS, SECTION_OF, config_of


def config(model: str | Path = "tiny", **keys: Any) -> Config:
    return config_of(model, None, (), {}, keys)


def test_no_key_is_in_two_sections_or_an_argument_of_vllm_with_another_meaning() -> None:
    names = [each.name for kind in (ModelConfig, CacheConfig, EngineConfig) for each in dataclasses.fields(kind)]
    assert len(names) == len(set(names)) == len(SECTION_OF) + 1  # `model.path` has an argument of its own
    assert not SECTION_OF.keys() & _VLLM_ARGUMENTS.keys()


def test_keys_override_settings_and_settings_override_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[cache]\nblock_size = 16\ncapacity_tokens = 640\nkv_dtype = 'int8'\n")
    settings = ["cache.block_size=32", "cache.capacity_tokens=1280", "tiers.host_bytes=1000000"]
    configuration = config_of(
        Path("my model"), tmp_path / "config.toml", settings, {}, {"block_size": 64, "threads": None}
    )
    assert configuration.model == ModelConfig(path="my model")
    assert (configuration.cache.block_size, configuration.cache.capacity_tokens, configuration.cache.kv_dtype) == (
        64,
        1280,
        "int8",
    )
    assert configuration.tiers.host_bytes == 1_000_000


def test_keys_of_all_three_sections_are_arguments() -> None:
    configuration = config(dtype="float32", weights="q8", kv_dtype="bf16", max_step_tokens=64, cuda_graphs=False)
    assert (configuration.model.dtype, configuration.model.weights) == ("float32", "q8")
    assert (configuration.cache.kv_dtype, configuration.engine.max_step_tokens, configuration.engine.cuda_graphs) == (
        "bf16",
        64,
        False,
    )


def test_adapters_are_added_to_those_of_the_configuration() -> None:
    configuration = config_of("tiny", None, ["adapters.tax.path=/tax"], {"a.b": Path("/law")}, {})
    assert {name: each.path for name, each in configuration.adapters.items()} == {"tax": "/tax", "a.b": "/law"}


def test_arguments_of_vllm_that_change_nothing_have_no_effect() -> None:
    neutral = {name: values[0] for name, (values, _) in _VLLM_ARGUMENTS.items() if values}
    assert config(**neutral) == config()
    assert neutral.keys() == _VLLM_ARGUMENTS.keys() - {"gpu_memory_utilization", "max_loras"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tensor_parallel_size": 2}, "LLM: tensor_parallel_size: expected 1, got 2; an engine computes on one device"),
        ({"trust_remote_code": True}, "LLM: trust_remote_code: expected False, got True; no code of a model is run"),
        ({"enable_lora": 0}, "LLM: enable_lora: expected False, got 0; .*"),
        ({"gpu_memory_utilization": 0.9}, "LLM: gpu_memory_utilization: expected no value, got 0.9; use memory_share"),
        ({"max_num_seqs": 8}, "LLM: max_num_seqs: expected None, got 8; use max_running_requests"),
        ({"quantization": "awq"}, "LLM: quantization: expected None, got 'awq'; use weights"),
        ({"capacity_token": 64}, "LLM: capacity_token: unknown argument; the nearest is capacity_tokens"),
        ({"path": "x"}, "LLM: path: unknown argument; the nearest is .*"),
        ({"dtype": "half"}, "model.dtype: expected one of auto, float32, bfloat16, float16, got half"),
        ({"capacity_tokens": "many"}, "cache.capacity_tokens: expected .*"),
        ({"dtype": Path}, "model.dtype: expected text, a number or a boolean, got type"),
    ],
)
def test_wrong_arguments_are_refused_by_name(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        config(**keys)
