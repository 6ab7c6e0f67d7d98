"""The arguments of an `LLM` as a configuration of the engine."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from radixkv.config import AdapterConfig, CacheConfig, Config, EngineConfig, ModelConfig
from radixkv.errors import ConfigError

_SECTIONS = {"model": ModelConfig, "cache": CacheConfig, "engine": EngineConfig}
# The section of each key that an `LLM` accepts as an argument. No name is in two sections.
SECTION_OF = {
    each.name: section
    for section, kind in _SECTIONS.items()
    for each in dataclasses.fields(kind)
    if each.name != "path"
}

# Arguments of vLLM's `LLM` that an `LLM` does not have: the values that would have no effect, and advice for others.
_ONE_DEVICE = "an engine computes on one device"
_VLLM_ARGUMENTS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "cpu_offload_gb": ((0,), "weights stay on the device"),
    "data_parallel_size": ((1,), _ONE_DEVICE),
    "disable_log_stats": ((True, False), ""),
    "download_dir": ((None,), "nothing is downloaded; HF_HOME is where downloaded models are"),
    "enable_chunked_prefill": ((True, None), "long prompts are always computed in chunks of max_step_tokens"),
    "enable_lora": ((False,), "name the directories of adapters in adapters"),
    "enable_prefix_caching": ((True, None), "SamplingParams(skip_reading_prefix_cache=True) does not read the cache"),
    "enforce_eager": ((True, False, None), ""),
    "generation_config": (("vllm",), "SamplingParams has the defaults"),
    "gpu_memory_utilization": ((), "use memory_share"),
    "kv_cache_dtype": (("auto",), "use kv_dtype"),
    "load_format": (("auto",), "safetensors and GGUF files are recognized"),
    "max_loras": ((), "use max_adapters"),
    "max_model_len": ((None,), "the model and the pool (capacity_tokens) limit the length of sequences"),
    "max_num_batched_tokens": ((None,), "use max_step_tokens"),
    "max_num_seqs": ((None,), "use max_running_requests"),
    "pipeline_parallel_size": ((1,), _ONE_DEVICE),
    "quantization": ((None,), "use weights"),
    "revision": ((None,), "add @REVISION to the model"),
    "skip_tokenizer_init": ((False,), "the tokenizer is loaded when it is needed"),
    "swap_space": ((0,), "use settings=['tiers.host_bytes=BYTES']"),
    "tensor_parallel_size": ((1,), _ONE_DEVICE),
    "tokenizer": ((None,), "the tokenizer is that of the model"),
    "tokenizer_mode": (("auto",), "the tokenizer is that of the model"),
    "trust_remote_code": ((False,), "no code of a model is run"),
}


def config_of(
    model: str | os.PathLike[str],
    file: str | Path | None,
    settings: Iterable[str],
    adapters: Mapping[str, str | os.PathLike[str]],
    keys: Mapping[str, Any],
) -> Config:
    """Return the configuration that the arguments of an `LLM` describe.

    Args:
        model: see `ModelConfig.path`.
        file: a TOML file; None without one.
        settings: values of `--set`, which override the file.
        adapters: directories of adapters by name.
        keys: keys of the sections model, cache and engine, which override all others, except with the value None; and
            arguments of vLLM with values that change nothing.

    Raises:
        ConfigError: an argument is unknown or wrong. The message names it.
    """
    keys = {name: value for name, value in keys.items() if not _changes_nothing(name, value)}
    values = {f"{SECTION_OF[name]}.{name}": value for name, value in keys.items() if value is not None}
    values["model.path"] = os.fspath(model)
    values["server.diagnosed_share"] = 0.0  # a library has no call that returns the causes of misses
    config = Config.load(file, [*settings, *(f"{key}={_toml(key, value)}" for key, value in values.items())])
    if not adapters:
        return config
    further_adapters = {name: AdapterConfig(os.fspath(path)) for name, path in adapters.items()}
    return dataclasses.replace(config, adapters={**config.adapters, **further_adapters})


def _changes_nothing(name: str, value: object) -> bool:
    """Return whether an argument is one of vLLM with a value that has no effect.

    Raises:
        ConfigError: the argument is unknown, or its value is not supported.
    """
    if name in SECTION_OF:
        return False
    if name not in _VLLM_ARGUMENTS:
        nearest = difflib.get_close_matches(name, [*SECTION_OF, "model", "adapters", "settings"], n=1, cutoff=0.0)
        raise ConfigError(f"LLM: {name}: unknown argument; the nearest is {nearest[0]}")
    values_without_effect, instead = _VLLM_ARGUMENTS[name]
    if not any(value is each or (value == each and type(value) is type(each)) for each in values_without_effect):
        expected = " or ".join(map(repr, values_without_effect)) or "no value"
        raise ConfigError(f"LLM: {name}: expected {expected}, got {value!r}; {instead}")
    return True


def _toml(key: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)  # these JSON values are also TOML
    except TypeError as error:
        raise ConfigError(f"{key}: expected text, a number or a boolean, got {type(value).__name__}") from error
