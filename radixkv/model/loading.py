"""Loads a model from a directory or a GGUF file, or the embedded model. Refuses models that cannot be served."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from radixkv.config import ModelConfig
from radixkv.config.model_directory import read_object
from radixkv.config.sequence_limit import is_length, use_long_factors
from radixkv.errors import ConfigError, RadixKVError, UnsupportedModel
from radixkv.kernels.cpu.gemm_backends import QUANTIZED_BITS
from radixkv.kernels.cpu.int8_linear import adds_integers_exactly
from radixkv.model.architecture import check_architecture
from radixkv.model.attention.attention_function import ATTENTION_NAME
from radixkv.model.gguf_weights import load_gguf_weights
from radixkv.model.model import Model
from radixkv.model.on_cpu import native_library
from radixkv.model.on_gpu import require_triton
from radixkv.model.refusals import misfits, reason_of
from radixkv.model.report import Report, report_nothing
from radixkv.model.tiny_model import build_tiny_model
from radixkv.model_files.gguf_file import GgufFile
from radixkv.model_files.model_location import ModelLocation, check_servable, locate

_log = logging.getLogger(__name__)
_NO_LONGROPE = 'model.longrope: expected "short" for a model without longrope, got "long" for {}'


def load_model(config: ModelConfig, report: Report = report_nothing) -> Model:
    """Load a model, see `radixkv.model_files.model_location`, or create the embedded model. Logs the result.

    Args:
        config: the section `model` of the configuration.
        report: called with a description of each phase.

    Raises:
        ConfigError: the directory or a file in it cannot be used, the device does not exist, or the device or the
            processor does not support the configuration.
        UnsupportedModel: the model would ignore the cache, or needs something that the kernels do not support.
    """
    start_s = time.perf_counter()
    device = _resolve_device(config.device)
    if config.weights != "auto":
        _check_weights_format(config.weights, device)
    model = _make_tiny(config, device, report) if config.path == "tiny" else _load_from_files(config, device, report)
    _log.info(
        "loaded %s in %.1f s: %s with %.1f million parameters in %s on %s",
        model.name,
        time.perf_counter() - start_s,
        type(model.module).__name__,
        model.num_parameters / 1e6,
        str(model.module.dtype).removeprefix("torch."),
        device,
    )
    if device.type == "cpu" and model.module.dtype == torch.float16:
        # A prefill of 512 tokens by a 0.5B model on a Xeon with AMX took 1.28 s in float16, 1.22 s in float32, and
        # 0.25 s in bfloat16.
        _log.warning("float16 may take as long as float32 on a CPU: model.dtype=bfloat16 may be several times faster")
    return model


def _make_tiny(config: ModelConfig, device: torch.device, report: Report) -> Model:
    if config.longrope == "long":
        raise ConfigError(_NO_LONGROPE.format("the embedded model"))
    module = build_tiny_model(ATTENTION_NAME).to(_configured_dtype(config) or torch.float32)
    return _build_model("tiny", module, device, config, report)


def _load_from_files(config: ModelConfig, device: torch.device, report: Report) -> Model:
    check_servable(config.path)
    location = locate(config.path)
    directory = location.directory()
    try:
        report("reading the weights")
        module = _load_module(location, directory, config, device)
        model = _build_model(location.name, module, device, config, report, directory)
        _warn_of_files(directory, model)
        return model
    except RadixKVError:
        raise
    except Exception as error:  # transformers may raise anything for an invalid directory
        raise ConfigError(f"model.path: {location.path} can't be loaded: {reason_of(error)}") from error


def _build_model(
    name: str,
    module: PreTrainedModel,
    device: torch.device,
    config: ModelConfig,
    report: Report,
    directory: Path | None = None,
) -> Model:
    return Model(
        name,
        module,
        device,
        is_exact=config.exactness == "exact",
        weights=config.weights,
        # `config.max_adapters` adapters may have names. As many others may drain: they were unloaded, but requests
        # still use them.
        max_adapters=2 * config.max_adapters,
        adapter_bytes=config.adapter_bytes,
        directory=directory,
        report=report,
    )


def _load_module(
    location: ModelLocation, directory: Path, config: ModelConfig, device: torch.device
) -> PreTrainedModel:
    disable_progress_bar()  # the log of a service is not a terminal
    hf_config = AutoConfig.from_pretrained(directory, local_files_only=True)
    model_class = AutoModelForCausalLM._model_mapping.get(type(hf_config), None)
    if model_class is None:
        raise UnsupportedModel(f"model_type {hf_config.model_type}: expected a causal language model")
    check_architecture(model_class, hf_config, device)
    if config.longrope == "long":
        text_config = hf_config.get_text_config()
        # This changes the tables of `text_config` in place.
        has_longrope = use_long_factors({"rope_parameters": getattr(text_config, "rope_parameters", None)})
        if not has_longrope:
            raise ConfigError(_NO_LONGROPE.format(directory))
    if location.is_gguf:
        file = GgufFile.read(location.path)
        dtype = _configured_dtype(config) or getattr(torch, file.dtype)
        # If this is false, the weights are dequantized here. If another `model.weights` is the reason, they are then
        # quantized again, to that format.
        keeps_quantized = config.weights == "auto" and device.type == "cpu" and native_library() is not None
        return load_gguf_weights(file, model_class, hf_config, dtype, ATTENTION_NAME, keeps_quantized=keeps_quantized)
    module, info = AutoModelForCausalLM.from_pretrained(
        directory,
        config=hf_config,
        attn_implementation=ATTENTION_NAME,
        dtype=_configured_dtype(config) or "auto",
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )
    if description := misfits(info):
        raise ConfigError(f"model.path: the weights in {directory} do not fit its config.json: {description}")
    return module


def _warn_of_files(directory: Path, model: Model) -> None:
    """Log warnings if the files of a model disagree with each other, or with how the model is served."""
    limit = model.limit
    if limit.reason:
        _log.warning(
            "sequences of at most %d tokens are served, although config.json states %d: %s",
            limit.max_tokens,
            limit.stated_tokens,
            limit.explanation,
        )
    file = directory / "tokenizer_config.json"
    tokenizer_length = read_object(file).get("model_max_length") if file.is_file() else None
    if is_length(tokenizer_length) and limit.stated_tokens is not None and tokenizer_length != limit.stated_tokens:
        advice = "Answers to longer prompts than the tokenizer states may be poor"
        if tokenizer_length > limit.stated_tokens:
            advice = "Longer ones require RoPE scaling (rope_parameters) in config.json, if the model was made for it"
        _log.warning(
            "tokenizer_config.json states a model_max_length of %d tokens, config.json %d: sequences of at most %d "
            "tokens are served. %s",
            tokenizer_length,
            limit.stated_tokens,
            limit.max_tokens,
            advice,
        )
    custom_classes = read_object(directory / "config.json").get("auto_map")
    if custom_classes:
        _log.warning(
            "config.json names code of its own (auto_map) for the model_type %s: that code is not run, and the model "
            "is served as the %s of transformers. If the code computes something else, answers are wrong: compare some "
            "with those of its authors",
            model.module.config.model_type,
            type(model.module).__name__,
        )


def _configured_dtype(config: ModelConfig) -> torch.dtype | None:
    """Return the configured dtype; None for that of the checkpoint."""
    return None if config.dtype == "auto" else getattr(torch, config.dtype)


def _check_weights_format(weights: str, device: torch.device) -> None:
    if device.type != "cpu":
        raise ConfigError(f'model.weights: expected "auto" on {device}, got "{weights}", which runs on a CPU only')
    if weights == "int8" and not adds_integers_exactly():
        raise ConfigError(
            'model.weights: expected "auto", "q8" or "q4" on this processor, got "int8": its int8 matmuls are not '
            "exact (no VNNI)"
        )
    if weights in QUANTIZED_BITS and native_library() is None:
        raise ConfigError(
            f'model.weights: expected "auto" or "int8" without compiled kernels, got "{weights}"; the log says why '
            "there are none"
        )


def _resolve_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device: expected a CUDA device for `cuda`, got none")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        require_triton()
    return torch.device(name)
